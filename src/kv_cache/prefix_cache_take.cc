// How an admitted sequence gets the memory of the prefix that was found for it.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kv_cache/prefix_cache.h"

namespace fathom::kv_cache {

using request::KvCopy;

void PrefixCache::Take(const AdmitRequest& request, const Prefix& prefix, SequenceKv& kv) {
  kv.admitted = true;
  kv.num_computed = prefix.num_tokens;
  kv.state_end = prefix.num_tokens;
  const bool kept_tail = prefix.tail != nullptr && !prefix.tail->running;
  // First, before room is made for the rest.
  std::vector<int32_t> tail_block;
  if (kept_tail) tail_block = TakeKeptTail(*prefix.tail, kv);
  TakeNodes(prefix, kv);
  kv.table.blocks.insert(kv.table.blocks.end(), tail_block.begin(), tail_block.end());
  if (prefix.tail != nullptr && !kept_tail) {
    ForkTail(*prefix.tail, prefix.num_tokens, kv);
  } else if (prefix.tail == nullptr) {
    MakeRoom(0, 0, 1, kv.session);
    kv.table.state_slot = pool_.state_slots().Allocate();
    if (prefix.num_tokens > 0) TakeSnapshot(*prefix.nodes.back(), kv);
  }
  const int64_t num_missing = pool_.NumNewBlocks(kv.table, request.num_tokens);
  MakeRoom(num_missing, 0, 0, kv.session);
  for (int64_t i = 0; i < num_missing; ++i) {
    kv.table.blocks.push_back(pool_.blocks().Allocate());
  }
  if (!options_.enabled) return;
  PlanSnapshots(request, prefix, kv);
  Promise(request, kv);
}

void PrefixCache::TakeNodes(const Prefix& prefix, SequenceKv& kv) {
  kv.nodes = prefix.nodes;
  for (PrefixNode* node : kv.nodes) {
    Use(*node);
    CountSession(*node, kv.session);
    Touch(*node, PartKind::kBlock, kv.session);
    if (node->block().on_device()) pool_.blocks().AddReference(node->block().device_id);
  }
  // Only now: what is shared cannot be reclaimed any more.
  for (PrefixNode* node : kv.nodes) {
    if (node->num_tokens == 0) continue;
    KeptPart& block = node->block();
    if (!block.on_device()) {
      MakeRoom(1, 0, 0, kv.session);
      block.device_id = pool_.blocks().Allocate();
      pool_.blocks().AddCacheReference(block.device_id);
      copies_.push_back(
          {.kind = KvCopy::Kind::kBlockFromHost, .from = block.host_slot, .to = block.device_id});
    }
    kv.table.blocks.push_back(block.device_id);
  }
}

void PrefixCache::TakeSnapshot(PrefixNode& node, SequenceKv& kv) {
  KeptPart& snapshot = node.snapshot();
  const auto position = static_cast<int32_t>(node.num_tokens);
  const int num_pages = NumSnapshotPages(options_.sliding_window);
  kv.table.first_window_page = position / kWindowPageTokens - num_pages;
  Touch(node, PartKind::kSnapshot, kv.session);
  if (snapshot.on_device()) {
    for (const int32_t page : snapshot.pages) pool_.window_pages().AddReference(page);
    kv.table.window_pages = snapshot.pages;
    copies_.push_back({.kind = KvCopy::Kind::kLoadSnapshot,
                       .from = snapshot.device_id,
                       .to = kv.table.state_slot,
                       .position = position});
    return;
  }
  MakeRoom(0, num_pages, 0, kv.session);
  for (int i = 0; i < num_pages; ++i) {
    kv.table.window_pages.push_back(pool_.window_pages().Allocate());
  }
  copies_.push_back({.kind = KvCopy::Kind::kSnapshotFromHost,
                     .from = snapshot.host_slot,
                     .to = kv.table.state_slot,
                     .position = position,
                     .pages = kv.table.window_pages});
  SaveSnapshot(kv, node);  // on the device again, for the next one
}

std::vector<int32_t> PrefixCache::TakeKeptTail(PrefixTail& tail, SequenceKv& kv) {
  const request::BlockTable kept = tail.kept;
  const auto take = [](IdPool& pool, int32_t id) {
    pool.AddReference(id);
    pool.ReleaseCacheReference(id);
  };
  take(pool_.state_slots(), kept.state_slot);
  for (const int32_t id : kept.window_pages) take(pool_.window_pages(), id);
  for (const int32_t id : kept.blocks) take(pool_.blocks(), id);
  kv.table.state_slot = kept.state_slot;
  kv.table.window_pages = kept.window_pages;
  kv.table.first_window_page = kept.first_window_page;
  kv.state_end = tail.state_end;
  tail_queue_.Remove(tail.place);
  PrefixTree::Detach(tail);
  kept_tails_.erase(&tail);
  return kept.blocks;
}

void PrefixCache::ForkTail(const PrefixTail& tail, int64_t num_tokens, SequenceKv& kv) {
  const request::BlockTable& from = *tail.table;
  kv.state_end = tail.state_end;
  MakeRoom(0, 0, 1, kv.session);
  kv.table.state_slot = pool_.state_slots().Allocate();
  copies_.push_back(
      {.kind = KvCopy::Kind::kStateSlot, .from = from.state_slot, .to = kv.table.state_slot});
  const size_t num_full = kv.table.blocks.size();
  if (num_tokens > tail.node->num_tokens) {
    MakeRoom(1, 0, 0, kv.session);
    kv.table.blocks.push_back(pool_.blocks().Allocate());
    copies_.push_back({.kind = KvCopy::Kind::kBlock,
                       .from = from.blocks[num_full],
                       .to = kv.table.blocks.back()});
  }
  const int64_t first =
      std::max<int64_t>(from.first_window_page, pool_.FirstReachablePage(num_tokens));
  kv.table.first_window_page = static_cast<int32_t>(first);
  for (int64_t page = first; page * kWindowPageTokens < num_tokens; ++page) {
    const int32_t id = from.window_pages[static_cast<size_t>(page - from.first_window_page)];
    if ((page + 1) * kWindowPageTokens <= num_tokens) {
      pool_.window_pages().AddReference(id);
      kv.table.window_pages.push_back(id);
      continue;
    }
    // Both will write the rest of this page.
    MakeRoom(0, 1, 0, kv.session);
    kv.table.window_pages.push_back(pool_.window_pages().Allocate());
    copies_.push_back(
        {.kind = KvCopy::Kind::kWindowPage, .from = id, .to = kv.table.window_pages.back()});
  }
}

void PrefixCache::PlanSnapshots(const AdmitRequest& request, const Prefix& prefix,
                                SequenceKv& kv) const {
  const int32_t capacity = pool_.snapshots().capacity();
  if (capacity == 0) return;
  std::vector<int64_t>& at = kv.snapshot_at;
  const auto boundary = [](int64_t n) { return n / kBlockTokens * kBlockTokens; };
  at = {boundary(kv.num_prompt_tokens - 1), boundary(kv.prefill_end - 1), prefix.num_known_tokens};
  const auto prompt = request.token_ids.first(static_cast<size_t>(kv.num_prompt_tokens));
  const auto turn = std::find(prompt.rbegin(), prompt.rend(), options_.turn_token_id);
  if (turn != prompt.rend()) at.push_back(boundary(prompt.rend() - turn - 1));
  if (options_.retention_interval > 0) {
    // One prompt takes no more than a quarter of all snapshots.
    const int64_t least = kv.prefill_end / std::max(1, capacity / 4);
    const int64_t interval =
        boundary(std::max(options_.retention_interval, least) + kBlockTokens - 1);
    for (int64_t b = interval; b < kv.prefill_end; b += interval) at.push_back(b);
  }
  std::erase_if(at, [&](int64_t b) { return b <= prefix.num_tokens; });
  std::sort(at.begin(), at.end());
  at.erase(std::unique(at.begin(), at.end()), at.end());
}

}  // namespace fathom::kv_cache
