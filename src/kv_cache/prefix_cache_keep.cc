// What running sequences leave behind, and what is given up for them.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kv_cache/prefix_cache.h"

namespace fathom::kv_cache {

using request::KvCopy;
using request::KvHash;

void PrefixCache::OnComputed(SequenceKv& kv, std::span<const int32_t> token_ids,
                             int64_t num_computed) {
  CHECK(kv.admitted);
  CHECK_GE(num_computed, kv.num_computed);
  CHECK_GE(num_computed, kv.state_end - kMaxRollbackTokens);
  kv.num_computed = num_computed;
  if (options_.enabled) {
    HashTokens(token_ids, kv);
    Publish(kv, token_ids);
    MaybeSaveSnapshot(kv);
    UpdateTail(kv, token_ids);
    if (num_computed >= kv.num_prompt_tokens) BreakPromises(kv);
  }
  pool_.ReleaseUnreachable(kv.table, num_computed);
}

void PrefixCache::Publish(SequenceKv& kv, std::span<const int32_t> token_ids) {
  while (static_cast<int64_t>(kv.nodes.size()) * kBlockTokens <= kv.num_computed) {
    const size_t i = kv.nodes.size() - 1;
    PrefixNode* node = tree_.FindOrAdd(*kv.nodes.back(), kv.hashes[i],
                                       token_ids.subspan(i * kBlockTokens, kBlockTokens));
    if (node == nullptr) return;  // another block has this hash: ours is not shared
    KeptPart& block = node->block();
    int32_t& id = kv.table.blocks[i];
    if (!block.on_device()) {
      block.device_id = id;
      pool_.blocks().AddCacheReference(id);
    } else if (block.device_id != id) {
      // Somebody else computed the same meanwhile: one copy is enough.
      pool_.blocks().AddReference(block.device_id);
      pool_.blocks().Release(id);
      id = block.device_id;
    }
    Use(*node);
    CountSession(*node, kv.session);
    ++now_;
    Touch(*node, PartKind::kBlock, kv.session);
    lower_.WriteThrough(*node, PartKind::kBlock, kv.session, copies_);
    kv.nodes.push_back(node);
  }
}

void PrefixCache::MaybeSaveSnapshot(SequenceKv& kv) {
  PrefixNode& node = *kv.nodes.back();
  const int64_t boundary = kv.num_computed / kBlockTokens * kBlockTokens;
  // The slot still has the four rows before the boundary.
  const bool in_time = kv.state_end <= boundary + kC4StateRows - 4;
  if (boundary == 0 || node.num_tokens != boundary || !in_time) return;
  const bool decoding = boundary >= kv.prefill_end;
  const bool planned = std::binary_search(kv.snapshot_at.begin(), kv.snapshot_at.end(), boundary);
  if ((!decoding && !planned) || node.snapshot().on_device()) return;
  if (!SaveSnapshot(kv, node)) return;
  if (!decoding) {
    lower_.WriteThrough(node, PartKind::kSnapshot, kv.session, copies_);
    return;
  }
  // Of an answer the newest boundary is enough: it is where the next request goes on.
  PrefixNode* last = std::exchange(kv.last_snapshot, &node);
  if (last != nullptr && last->snapshot().on_device() && last->sessions.size() == 1) {
    EvictDevicePart(*last, PartKind::kSnapshot);
  }
}

bool PrefixCache::SaveSnapshot(SequenceKv& kv, PrefixNode& node) {
  IdPool& ids = pool_.snapshots();
  if (ids.num_free() == 0) {
    PrefixNode* oldest = device_queue_[size_t(PartKind::kSnapshot)].First(kv.session);
    if (oldest == nullptr) return false;
    ++stats_.evicted_device_snapshots;
    EvictDevicePart(*oldest, PartKind::kSnapshot);
  }
  KeptPart& snapshot = node.snapshot();
  snapshot.device_id = ids.Allocate();
  ids.AddCacheReference(snapshot.device_id);
  ids.Release(snapshot.device_id);
  const int num_pages = NumSnapshotPages(options_.sliding_window);
  const int64_t first =
      node.num_tokens / kWindowPageTokens - num_pages - kv.table.first_window_page;
  CHECK_GE(first, 0);
  const auto begin = kv.table.window_pages.begin() + first;
  snapshot.pages.assign(begin, begin + num_pages);
  for (const int32_t page : snapshot.pages) pool_.window_pages().AddCacheReference(page);
  copies_.push_back({.kind = KvCopy::Kind::kSaveSnapshot,
                     .from = kv.table.state_slot,
                     .to = snapshot.device_id,
                     .position = static_cast<int32_t>(node.num_tokens)});
  Touch(node, PartKind::kSnapshot, kv.session);
  return true;
}

void PrefixCache::UpdateTail(SequenceKv& kv, std::span<const int32_t> token_ids) {
  PrefixNode& node = *kv.nodes.back();
  PrefixTail& tail = kv.tail;
  if (kv.num_computed - node.num_tokens >= kBlockTokens) {  // not in the tree
    PrefixTree::Detach(tail);
    return;
  }
  if (tail.node != &node) tail.token_ids.clear();
  PrefixTree::Attach(tail, node);
  const auto begin = static_cast<size_t>(tail.num_tokens());
  const auto fresh = token_ids.subspan(begin, static_cast<size_t>(kv.num_computed) - begin);
  tail.token_ids.insert(tail.token_ids.end(), fresh.begin(), fresh.end());
  tail.state_end = kv.state_end;
  tail.table = &kv.table;
  tail.session = kv.session;
}

void PrefixCache::BreakPromises(SequenceKv& kv) {
  for (const KvHash& hash : kv.promised) promises_.erase(hash);
  kv.promised.clear();
}

void PrefixCache::Release(SequenceKv& kv, std::span<const int32_t> token_ids,
                          int64_t num_computed) {
  if (kv.admitted) {
    CHECK_EQ(num_computed, kv.num_computed);
    CHECK_LE(num_computed, static_cast<int64_t>(token_ids.size()));
    BreakPromises(kv);
    std::erase(extended_, &kv);
    ++now_;
    if (kv.tail.node != nullptr) KeepTail(kv);
    if (kv.last_snapshot != nullptr && kv.last_snapshot->snapshot().on_device()) {
      lower_.WriteThrough(*kv.last_snapshot, PartKind::kSnapshot, kv.session, copies_);
    }
    PrefixTree::Detach(kv.tail);
    pool_.Release(kv.table);
    for (auto node = kv.nodes.rbegin(); node != kv.nodes.rend(); ++node) Unuse(**node, kv.session);
  }
  const bool counted = kv.counted;
  kv = {};
  kv.counted = counted;
}

void PrefixCache::KeepTail(SequenceKv& kv) {
  PrefixNode& node = *kv.tail.node;
  const bool has_block = !kv.tail.token_ids.empty();
  if (!has_block && node.snapshot().on_device()) return;  // as good
  // What it goes on from is of no use any more.
  const auto is_superseded = [&](const PrefixTail* old) {
    const auto& a = old->token_ids;
    const auto& b = kv.tail.token_ids;
    return !old->running && old->session == kv.session && a.size() <= b.size() &&
           std::equal(a.begin(), a.end(), b.begin());
  };
  for (const auto tails = node.tails; PrefixTail* old : tails) {
    if (is_superseded(old)) DropTail(*old);
  }
  auto owner = std::make_unique<PrefixTail>();
  PrefixTail& tail = *owner;
  tail.running = false;
  tail.token_ids = std::move(kv.tail.token_ids);
  tail.state_end = kv.state_end;
  tail.session = kv.session;
  tail.kept.state_slot = kv.table.state_slot;
  tail.kept.window_pages = kv.table.window_pages;
  tail.kept.first_window_page = kv.table.first_window_page;
  pool_.state_slots().AddCacheReference(kv.table.state_slot);
  for (const int32_t id : tail.kept.window_pages) pool_.window_pages().AddCacheReference(id);
  if (has_block) {
    tail.kept.blocks = {kv.table.blocks[kv.nodes.size() - 1]};
    pool_.blocks().AddCacheReference(tail.kept.blocks[0]);
  }
  PrefixTree::Attach(tail, node);
  kept_tails_.emplace(&tail, std::move(owner));
  tail_queue_.Put(tail, tail.place, tail.session,
                  {.time = now_, .order = tail.num_tokens(), .serial = next_tail_serial_++});
}

void PrefixCache::Use(PrefixNode& node) {
  if (node.num_users++ == 0) {
    device_queue_[size_t(PartKind::kBlock)].Remove(node.block().device_place);
  }
}

void PrefixCache::Unuse(PrefixNode& node, uint64_t session) {
  CHECK_GT(node.num_users, 0);
  --node.num_users;
  Touch(node, PartKind::kBlock, session);
  tree_.Prune(&node);
}

// Marks a use and orders the part anew in every tier.
void PrefixCache::Touch(PrefixNode& node, PartKind kind, uint64_t session) {
  if (node.num_tokens == 0) return;
  CountSession(node, session);
  KeptPart& part = node.part(kind);
  part.last_use = now_;
  lower_.Requeue(node, kind);
  const bool evictable = kind == PartKind::kSnapshot || node.num_users == 0;
  if (part.on_device() && evictable) {
    device_queue_[size_t(kind)].Put(node, part.device_place, EvictionGroup(node),
                                    MakeEvictionKey(node, kind, session_credit_));
  }
}

void PrefixCache::EvictDevicePart(PrefixNode& node, PartKind kind) {
  KeptPart& part = node.part(kind);
  device_queue_[size_t(kind)].Remove(part.device_place);
  const int32_t id = std::exchange(part.device_id, -1);
  if (kind == PartKind::kBlock) {
    pool_.blocks().ReleaseCacheReference(id);
    // Nothing reaches the tails after a block that is nowhere.
    ++node.num_users;  // it stays until the last is dropped
    for (const auto tails = node.tails; PrefixTail* tail : tails) {
      if (!part.kept()) DropTail(*tail);
    }
    --node.num_users;
  } else {
    pool_.snapshots().ReleaseCacheReference(id);
    for (const int32_t page : std::exchange(part.pages, {})) {
      pool_.window_pages().ReleaseCacheReference(page);
    }
  }
  tree_.Prune(&node);
}

void PrefixCache::DropTail(PrefixTail& tail) {
  CHECK(!tail.running);
  for (const int32_t id : tail.kept.blocks) pool_.blocks().ReleaseCacheReference(id);
  for (const int32_t id : tail.kept.window_pages) pool_.window_pages().ReleaseCacheReference(id);
  pool_.state_slots().ReleaseCacheReference(tail.kept.state_slot);
  tail_queue_.Remove(tail.place);
  PrefixNode* node = tail.node;
  PrefixTree::Detach(tail);
  kept_tails_.erase(&tail);
  tree_.Prune(node);
}

bool PrefixCache::EvictTail(uint64_t session) {
  PrefixTail* victim = tail_queue_.First(session);
  if (victim == nullptr) return false;
  if (victim->session == session) {
    // Its own session's least: a side request's before the conversation's.
    for (const auto& [tail, owner] : kept_tails_) {
      const auto size = [](const PrefixTail* t) {
        return std::pair(t->num_tokens(), t->place.key);
      };
      if (size(tail) < size(victim)) victim = tail;
    }
  }
  ++stats_.evicted_tails;
  DropTail(*victim);
  return true;
}

// Whether the tail goes before the node's part: not the sparing session's first, then the older.
bool PrefixCache::TailGoesFirst(const EvictionPlace* part, uint64_t session) const {
  const PrefixTail* tail = tail_queue_.First(session);
  if (tail == nullptr || part == nullptr) return tail != nullptr;
  const bool tail_spared = tail->session == session, part_spared = part->group == session;
  return tail_spared != part_spared ? part_spared : tail->place.key < part->key;
}

bool PrefixCache::EvictFor(PartKind kind, uint64_t session) {
  PrefixNode* node = device_queue_[size_t(kind)].First(session);
  if (TailGoesFirst(node == nullptr ? nullptr : &node->part(kind).device_place, session)) {
    return EvictTail(session);
  }
  if (node == nullptr) return false;
  ++(kind == PartKind::kBlock ? stats_.evicted_device_blocks : stats_.evicted_device_snapshots);
  EvictDevicePart(*node, kind);
  return true;
}

void PrefixCache::MakeRoom(int64_t num_blocks, int64_t num_pages, int64_t num_slots,
                           uint64_t session) {
  while (pool_.blocks().num_free() < num_blocks) CHECK(EvictFor(PartKind::kBlock, session));
  while (pool_.window_pages().num_free() < num_pages) {
    CHECK(EvictFor(PartKind::kSnapshot, session));
  }
  while (pool_.state_slots().num_free() < num_slots) CHECK(EvictTail(session));
}

void PrefixCache::Clear() {
  while (PrefixTail* tail = tail_queue_.First(kNoSession)) DropTail(*tail);
  for (const PartKind kind : kPartKinds) {
    while (PrefixNode* node = device_queue_[size_t(kind)].First(kNoSession)) {
      EvictDevicePart(*node, kind);
    }
  }
  lower_.Clear();
}

}  // namespace fathom::kv_cache
