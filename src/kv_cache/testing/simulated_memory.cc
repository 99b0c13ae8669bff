#include "kv_cache/testing/simulated_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace fathom::kv_cache {

using request::KvCopy;
using request::KvStoreEvent;
using request::KvStoreRequest;

namespace {

constexpr int kOverlap = 4;

size_t Index(int64_t i) { return static_cast<size_t>(i); }

}  // namespace

SimulatedMemory::SimulatedMemory(const PrefixCacheOptions& options)
    : window_(options.sliding_window),
      blocks_(Index(options.pools.num_blocks), Page(kBlockTokens, -1)),
      pages_(Index(options.pools.num_window_pages), Page(kWindowPageTokens, -1)),
      host_blocks_(Index(options.num_host_blocks)),
      slots_(Index(options.pools.num_state_slots)),
      snapshots_(Index(options.pools.num_snapshots)),
      host_snapshots_(Index(options.num_host_snapshots)) {
  if (options.disk_bytes > 0) events_.push_back({.kind = KvStoreEvent::Kind::kIndexed});
}

void SimulatedMemory::Run(const request::KvTransfers& transfers) {
  for (const KvCopy& copy : transfers.copies) Copy(copy);
  waiting_.insert(waiting_.end(), transfers.store.begin(), transfers.store.end());
  for (int i = 0; i < 3 && !waiting_.empty(); ++i) {
    const KvStoreRequest request = waiting_.front();
    waiting_.pop_front();
    const KvStoreEvent event = Answer(request);
    if (request.kind != KvStoreRequest::Kind::kDelete) events_.push_back(event);
  }
}

void SimulatedMemory::Copy(const KvCopy& copy) {
  const size_t from = Index(copy.from), to = Index(copy.to);
  const auto save = [](const Slot& slot, Snapshot& snapshot) {
    snapshot.rows.assign(slot.rows.end() - kOverlap, slot.rows.end());
  };
  const auto load = [&copy](const Snapshot& snapshot, Slot& slot) {
    slot = {};
    slot.num_tokens = slot.oldest = copy.position;
    std::copy(snapshot.rows.begin(), snapshot.rows.end(), slot.rows.end() - kOverlap);
  };
  switch (copy.kind) {
    case KvCopy::Kind::kBlock:
      blocks_.at(to) = blocks_.at(from);
      break;
    case KvCopy::Kind::kWindowPage:
      pages_.at(to) = pages_.at(from);
      break;
    case KvCopy::Kind::kStateSlot:
      slots_.at(to) = slots_.at(from);
      break;
    case KvCopy::Kind::kSaveSnapshot:
      save(slots_.at(from), snapshots_.at(to));
      break;
    case KvCopy::Kind::kLoadSnapshot:
      load(snapshots_.at(from), slots_.at(to));
      break;
    case KvCopy::Kind::kBlockToHost:
      host_blocks_.at(to) = blocks_.at(from);
      break;
    case KvCopy::Kind::kBlockFromHost:
      blocks_.at(to) = host_blocks_.at(from);
      break;
    case KvCopy::Kind::kSnapshotToHost:
      host_snapshots_.at(to) = snapshots_.at(from);
      host_snapshots_.at(to).pages.clear();
      for (const int32_t page : copy.pages) {
        host_snapshots_.at(to).pages.push_back(pages_.at(Index(page)));
      }
      break;
    case KvCopy::Kind::kSnapshotFromHost:
      load(host_snapshots_.at(from), slots_.at(to));
      CHECK_EQ(copy.pages.size(), host_snapshots_.at(from).pages.size());
      for (size_t i = 0; i < copy.pages.size(); ++i) {
        pages_.at(Index(copy.pages[i])) = host_snapshots_.at(from).pages[i];
      }
      break;
  }
}

KvStoreEvent SimulatedMemory::Answer(const KvStoreRequest& request) {
  KvStoreEvent event{.record = request.record, .host_slot = request.host_slot, .file_bytes = 100};
  const DiskKey key{{request.record.hash.high, request.record.hash.low}, request.record.kind};
  const bool is_block = request.record.kind == PartKind::kBlock;
  const size_t slot = Index(request.host_slot);
  switch (request.kind) {
    case KvStoreRequest::Kind::kWrite: {
      event.kind = KvStoreEvent::Kind::kWrite;
      event.ok = !disk_broken_;
      if (!event.ok) break;
      Record& record = disk_[key];
      record.record = request.record;
      if (is_block) {
        record.block = host_blocks_.at(slot);
      } else {
        record.snapshot = host_snapshots_.at(slot);
      }
      break;
    }
    case KvStoreRequest::Kind::kRead: {
      const auto it = disk_.find(key);
      event.ok = it != disk_.end() && !disk_broken_;
      if (!event.ok) break;
      if (is_block) {
        host_blocks_.at(slot) = it->second.block;
      } else {
        host_snapshots_.at(slot) = it->second.snapshot;
      }
      break;
    }
    case KvStoreRequest::Kind::kDelete:
      disk_.erase(key);
      break;
  }
  return event;
}

std::vector<KvStoreEvent> SimulatedMemory::TakeEvents() { return std::exchange(events_, {}); }

void SimulatedMemory::Restart() {
  waiting_.clear();
  events_.clear();
  for (auto* pages : {&blocks_, &pages_, &host_blocks_}) {
    for (Page& page : *pages) std::fill(page.begin(), page.end(), -2);
  }
  std::fill(slots_.begin(), slots_.end(), Slot{});
  for (const auto& [key, record] : disk_) {
    events_.push_back(
        {.kind = KvStoreEvent::Kind::kFound, .record = record.record, .file_bytes = 100});
  }
  events_.push_back({.kind = KvStoreEvent::Kind::kIndexed});
}

void SimulatedMemory::BreakDisk() {
  disk_broken_ = true;
  while (!waiting_.empty()) {
    const KvStoreRequest request = waiting_.front();
    waiting_.pop_front();
    const KvStoreEvent event = Answer(request);
    if (request.kind != KvStoreRequest::Kind::kDelete) events_.push_back(event);
  }
  events_.push_back({.kind = KvStoreEvent::Kind::kOff});
}

std::string SimulatedMemory::Step(const request::BlockTable& table,
                                  std::span<const int32_t> token_ids, int64_t num_computed,
                                  int64_t num_tokens) {
  Slot& slot = slots_.at(Index(table.state_slot));
  if (num_computed == 0) slot = {};
  const auto block_at = [&](int64_t p) -> int32_t& {
    return blocks_.at(Index(table.blocks.at(Index(p / kBlockTokens))))[Index(p % kBlockTokens)];
  };
  const auto page_at = [&](int64_t p) -> int32_t& {
    const int64_t page = p / kWindowPageTokens - table.first_window_page;
    return pages_.at(Index(table.window_pages.at(Index(page))))[Index(p % kWindowPageTokens)];
  };
  if (num_computed > slot.num_tokens || num_computed < slot.oldest ||
      num_computed < slot.num_tokens - kMaxRollbackTokens) {
    return fmt::format("at {}: the state has {} tokens and goes back to {}", num_computed,
                       slot.num_tokens, slot.oldest);
  }
  for (int64_t p = 0; p < num_computed; ++p) {
    if (block_at(p) != token_ids[Index(p)]) return fmt::format("block entry {} is wrong", p);
  }
  for (int64_t p = std::max<int64_t>(0, num_computed - (window_ - 1)); p < num_computed; ++p) {
    if (page_at(p) != token_ids[Index(p)]) return fmt::format("window entry {} is wrong", p);
  }
  // A C4 entry overlaps the four tokens before its own four.
  for (int64_t p = std::max<int64_t>(0, num_computed / 4 * 4 - kOverlap); p < num_computed; ++p) {
    if (slot.rows[Index(p % kC4StateRows)] != token_ids[Index(p)]) {
      return fmt::format("state row of token {} is wrong at {}", p, num_computed);
    }
  }
  for (int64_t p = num_computed; p < num_computed + num_tokens; ++p) {
    block_at(p) = token_ids[Index(p)];
    slot.rows[Index(p % kC4StateRows)] = token_ids[Index(p)];
    if (p >= num_computed + num_tokens - kMaxRollbackTokens - (window_ - 1)) {
      page_at(p) = token_ids[Index(p)];
    }
  }
  slot.num_tokens = std::max(slot.num_tokens, num_computed + num_tokens);
  return "";
}

}  // namespace fathom::kv_cache
