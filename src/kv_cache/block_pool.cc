#include "kv_cache/block_pool.h"

#include <algorithm>

#include "base/check.h"

namespace fathom::kv_cache {

int64_t MaxWindowPages(int sliding_window, int64_t num_tokens) {
  // The first of n consecutive positions stands last in its page at worst.
  const int64_t num_positions = sliding_window - 1 + kMaxRollbackTokens + num_tokens;
  return (num_positions + kWindowPageTokens - 2) / kWindowPageTokens + 1;
}

BlockPool::BlockPool(const PoolSizes& sizes, int sliding_window)
    : sliding_window_(sliding_window),
      blocks_(sizes.num_blocks),
      window_pages_(sizes.num_window_pages),
      state_slots_(sizes.num_state_slots),
      snapshots_(sizes.num_snapshots) {
  CHECK_GE(sizes.num_blocks, 1);
  CHECK_GE(sizes.num_window_pages, MaxWindowPages(sliding_window, 1));
  CHECK_GE(sizes.num_state_slots, 1);
}

bool BlockPool::Admit(int64_t num_tokens, request::BlockTable& table) {
  CHECK(table.state_slot < 0 && table.blocks.empty() && table.window_pages.empty());
  const int64_t num_blocks = NumBlocksFor(num_tokens);
  if (state_slots_.num_free() == 0 || blocks_.num_free() < num_blocks) return false;
  table.state_slot = state_slots_.Allocate();
  for (int64_t i = 0; i < num_blocks; ++i) table.blocks.push_back(blocks_.Allocate());
  table.first_window_page = 0;
  return true;
}

int64_t BlockPool::NumRunnable(const request::BlockTable& table, int64_t num_computed,
                               int64_t wanted) const {
  const int64_t num_blocks = static_cast<int64_t>(table.blocks.size()) + blocks_.num_available();
  const int64_t end_page = table.first_window_page +
                           static_cast<int64_t>(table.window_pages.size()) +
                           window_pages_.num_available();
  const int64_t end = std::min(num_blocks * kBlockTokens, end_page * kWindowPageTokens);
  return std::clamp<int64_t>(end - num_computed, 0, wanted);
}

int64_t BlockPool::NumNewBlocks(const request::BlockTable& table, int64_t end) const {
  return std::max<int64_t>(0, NumBlocksFor(end) - static_cast<int64_t>(table.blocks.size()));
}

int64_t BlockPool::NumNewWindowPages(const request::BlockTable& table, int64_t end) const {
  const int64_t end_page = (end + kWindowPageTokens - 1) / kWindowPageTokens;
  return std::max<int64_t>(
      0, end_page - table.first_window_page - static_cast<int64_t>(table.window_pages.size()));
}

void BlockPool::Extend(request::BlockTable& table, int64_t num_computed, int64_t num_tokens) {
  CHECK_LE(num_tokens, NumRunnable(table, num_computed, num_tokens));
  const int64_t end = num_computed + num_tokens;
  for (int64_t n = NumNewBlocks(table, end); n > 0; --n) {
    table.blocks.push_back(blocks_.Allocate());
  }
  for (int64_t n = NumNewWindowPages(table, end); n > 0; --n) {
    table.window_pages.push_back(window_pages_.Allocate());
  }
}

int64_t BlockPool::FirstReachablePage(int64_t num_computed) const {
  const int64_t first_position = num_computed - kMaxRollbackTokens - (sliding_window_ - 1);
  return std::max<int64_t>(first_position, 0) / kWindowPageTokens;
}

void BlockPool::ReleaseUnreachable(request::BlockTable& table, int64_t num_computed) {
  const int64_t num_gone =
      std::min<int64_t>(FirstReachablePage(num_computed) - table.first_window_page,
                        static_cast<int64_t>(table.window_pages.size()));
  if (num_gone <= 0) return;
  const auto end = table.window_pages.begin() + num_gone;
  for (auto it = table.window_pages.begin(); it != end; ++it) window_pages_.Release(*it);
  table.window_pages.erase(table.window_pages.begin(), end);
  table.first_window_page += static_cast<int32_t>(num_gone);
}

void BlockPool::Release(request::BlockTable& table) {
  for (const int32_t id : table.blocks) blocks_.Release(id);
  for (const int32_t id : table.window_pages) window_pages_.Release(id);
  if (table.state_slot >= 0) state_slots_.Release(table.state_slot);
  table = {};
}

bool BlockPool::IsEmpty() const {
  return blocks_.num_used() == 0 && window_pages_.num_used() == 0 && state_slots_.num_used() == 0 &&
         snapshots_.num_used() == 0;
}

bool BlockPool::IsIntact() const {
  return blocks_.IsIntact() && window_pages_.IsIntact() && state_slots_.IsIntact() &&
         snapshots_.IsIntact();
}

}  // namespace fathom::kv_cache
