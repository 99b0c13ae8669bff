#include "kv_cache/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fathom::kv_cache {

using request::KvCopy;
using request::KvHash;

namespace {

// Reads that bring a prefix from disk piece by piece, because others push it out meanwhile.
constexpr int kMaxReadRounds = 3;

bool IsInReach(const KeptPart& part, bool disk) {
  return part.on_device() || part.in_host() || (disk && part.on_disk);
}

// One token at least is run: it brings the logits.
int64_t MostCachedTokens(const AdmitRequest& request) {
  return std::min(static_cast<int64_t>(request.token_ids.size()) - 1, request.max_cached_tokens);
}

bool IsLimited(const AdmitRequest& request) {
  return request.max_cached_tokens < static_cast<int64_t>(request.token_ids.size()) - 1;
}

bool IsOnDiskOnly(const KeptPart& part) { return !part.on_device() && !part.in_host(); }

}  // namespace

PrefixCache::PrefixCache(const PrefixCacheOptions& options)
    : options_(options),
      session_credit_(static_cast<uint64_t>(options.pools.num_blocks) / 2),
      pool_(options.pools, options.sliding_window),
      tree_(options.hash_key),
      lower_({.num_host_slots = {options.num_host_blocks, options.num_host_snapshots},
              .disk_bytes = options.disk_bytes,
              .num_disk_ranks = options.num_disk_ranks,
              .record_bytes = {options.block_bytes, options.snapshot_bytes}},
             tree_, session_credit_) {
  CHECK_LE(NumSnapshotPages(options.sliding_window) * kWindowPageTokens, kBlockTokens);
}

void PrefixCache::HashTokens(std::span<const int32_t> token_ids, SequenceKv& kv) const {
  const size_t num_blocks = token_ids.size() / kBlockTokens;
  for (size_t i = kv.hashes.size(); i < num_blocks; ++i) {
    const KvHash parent = i == 0 ? kv.root_hash : kv.hashes[i - 1];
    kv.hashes.push_back(
        tree_.hash().Next(parent, token_ids.subspan(i * kBlockTokens, kBlockTokens)));
  }
}

void PrefixCache::Begin(const AdmitRequest& request, SequenceKv& kv) const {
  kv.session = MakeSessionKey(request);
  kv.num_prompt_tokens = request.num_prompt_tokens;
  kv.prefill_end = static_cast<int64_t>(request.token_ids.size());
  if (!options_.enabled) return;
  if (kv.hashes.empty()) kv.root_hash = tree_.hash().Root(request.salt);
  HashTokens(request.token_ids, kv);
}

uint64_t PrefixCache::MakeSessionKey(const AdmitRequest& request) const {
  // Without a name a request is a session of its own.
  const KvHash hash = tree_.hash().Root(request.session);
  const uint64_t key = request.session.empty() ? request.id : hash.high | (uint64_t{1} << 63);
  return key == kNoSession || key == kSharedGroup ? 1 : key;
}

PrefixTail* PrefixCache::FindTail(const PrefixNode& node, const AdmitRequest& request,
                                  int64_t& num_tokens) const {
  PrefixTail* best = nullptr;
  const auto rest = request.token_ids.subspan(static_cast<size_t>(node.num_tokens));
  const int64_t most = MostCachedTokens(request);
  for (PrefixTail* tail : node.tails) {
    const auto end =
        std::mismatch(rest.begin(), rest.end(), tail->token_ids.begin(), tail->token_ids.end());
    const int64_t common = std::min(most, node.num_tokens + (end.first - rest.begin()));
    if (common < tail->state_end - kMaxRollbackTokens || common < 1) continue;
    // At the block's end a snapshot is as good, and stays.
    if (common == node.num_tokens && node.part(PartKind::kSnapshot).on_device()) continue;
    if (best != nullptr && common <= num_tokens) continue;
    best = tail;
    num_tokens = common;
  }
  return best;
}

PrefixCache::Prefix PrefixCache::FindPrefix(const AdmitRequest& request, const SequenceKv& kv,
                                            Reach reach) const {
  const bool disk = reach == Reach::kDisk;
  Prefix prefix;
  PrefixNode* root = tree_.FindHash(kv.root_hash);
  if (root == nullptr) return prefix;
  prefix.nodes.push_back(root);
  const auto most_blocks = static_cast<size_t>(MostCachedTokens(request) / kBlockTokens);
  for (size_t i = 0; i < most_blocks; ++i) {
    PrefixNode* node = tree_.Find(*prefix.nodes.back(), kv.hashes[i],
                                  request.token_ids.subspan(i * kBlockTokens, kBlockTokens));
    if (node == nullptr || !IsInReach(node->block(), disk)) break;
    prefix.nodes.push_back(node);
  }
  prefix.num_known_tokens = prefix.nodes.back()->num_tokens;
  while (true) {
    PrefixNode& last = *prefix.nodes.back();
    prefix.num_tokens = last.num_tokens;
    prefix.tail = FindTail(last, request, prefix.num_tokens);
    const bool is_root = prefix.nodes.size() == 1;
    if (prefix.tail != nullptr || is_root || IsInReach(last.snapshot(), disk)) return prefix;
    prefix.nodes.pop_back();
  }
}

int64_t PrefixCache::NumCachedTokens(const AdmitRequest& request) const {
  if (!options_.enabled) return 0;
  SequenceKv kv;
  Begin(request, kv);
  return FindPrefix(request, kv, Reach::kDisk).num_tokens;
}

bool PrefixCache::IsPromised(const AdmitRequest& request, const Prefix& prefix,
                             const SequenceKv& kv) const {
  const auto owner_of = [this](const KvHash& hash) {
    const auto it = promises_.find(hash);
    return it == promises_.end() ? nullptr : it->second;
  };
  const auto num_tokens = static_cast<int64_t>(request.token_ids.size());
  if (prefix.num_tokens == num_tokens - 1) return false;
  const auto most_blocks = static_cast<size_t>((num_tokens - 1) / kBlockTokens);
  const auto num_known = static_cast<size_t>(prefix.num_known_tokens / kBlockTokens);
  if (num_known == most_blocks) {
    if (num_tokens != request.num_prompt_tokens || num_tokens % kBlockTokens == 0) return false;
    return owner_of(PromptHash(request, kv)) != nullptr;
  }
  SequenceKv* owner = owner_of(kv.hashes[num_known]);
  if (owner == nullptr) return false;
  size_t end = num_known + 1;
  while (end < most_blocks && owner_of(kv.hashes[end]) == owner) ++end;
  // What is waited for is of use from a snapshot only.
  const int64_t boundary = static_cast<int64_t>(end) * kBlockTokens;
  const auto at = std::lower_bound(owner->snapshot_at.begin(), owner->snapshot_at.end(), boundary);
  if (at == owner->snapshot_at.end() || *at != boundary) owner->snapshot_at.insert(at, boundary);
  return true;
}

KvHash PrefixCache::PromptHash(const AdmitRequest& request, const SequenceKv& kv) const {
  const auto num_blocks = static_cast<size_t>(request.num_prompt_tokens / kBlockTokens);
  const KvHash parent = num_blocks == 0 ? kv.root_hash : kv.hashes[num_blocks - 1];
  return tree_.hash().Next(parent, request.token_ids.subspan(num_blocks * kBlockTokens));
}

void PrefixCache::Promise(const AdmitRequest& request, SequenceKv& kv) {
  const auto promise = [this, &kv](const KvHash& hash) {
    if (promises_.emplace(hash, &kv).second) kv.promised.push_back(hash);
  };
  for (size_t i = kv.nodes.size() - 1; i < kv.hashes.size(); ++i) promise(kv.hashes[i]);
  const auto num_tokens = static_cast<int64_t>(request.token_ids.size());
  if (num_tokens == request.num_prompt_tokens && num_tokens % kBlockTokens != 0) {
    promise(PromptHash(request, kv));
  }
}

bool PrefixCache::StartReads(const Prefix& prefix, SequenceKv& kv) {
  std::array<std::vector<PrefixNode*>, 2> needed;
  for (PrefixNode* node : prefix.nodes) {
    if (node->num_tokens > 0 && IsOnDiskOnly(node->block())) needed[0].push_back(node);
  }
  PrefixNode* last = prefix.nodes.back();
  if (prefix.tail == nullptr && last->num_tokens > 0 && IsOnDiskOnly(last->snapshot())) {
    needed[1].push_back(last);
  }
  if (needed[0].empty() && needed[1].empty()) return false;
  bool reading = false;
  std::array<int64_t, 2> num_new = {};
  for (const PartKind kind : kPartKinds) {
    for (const PrefixNode* node : needed[size_t(kind)]) {
      if (node->part(kind).reading) {
        reading = true;
      } else {
        ++num_new[size_t(kind)];
      }
    }
  }
  if (num_new[0] + num_new[1] == 0) return reading;
  if (kv.num_read_rounds == kMaxReadRounds || !lower_.HasRoomFor(PartKind::kBlock, num_new[0]) ||
      !lower_.HasRoomFor(PartKind::kSnapshot, num_new[1])) {
    return false;
  }
  ++kv.num_read_rounds;
  for (PrefixNode* node : prefix.nodes) Touch(*node, PartKind::kBlock, kv.session);
  for (const PartKind kind : kPartKinds) {
    for (PrefixNode* node : needed[size_t(kind)]) {
      Touch(*node, kind, kv.session);
      lower_.StartRead(*node, kind, kv.session);
    }
  }
  return true;
}

Admission PrefixCache::Admit(const AdmitRequest& request, SequenceKv& kv) {
  CHECK(!kv.admitted);
  CHECK(!request.token_ids.empty());
  Begin(request, kv);
  ++now_;
  Prefix prefix;
  if (options_.enabled) {
    PrefixNode* root = &tree_.Root(request.salt);
    prefix = FindPrefix(request, kv, Reach::kDisk);
    if (!IsLimited(request) && IsPromised(request, prefix, kv)) {
      tree_.Prune(root);
      return {.outcome = Admission::Outcome::kWait};
    }
    if (StartReads(prefix, kv)) return {.outcome = Admission::Outcome::kWait};
    prefix = FindPrefix(request, kv, Reach::kHost);
    if (!Fits(request, prefix)) {
      tree_.Prune(root);
      return {.outcome = Admission::Outcome::kNoRoom};
    }
  } else if (!Fits(request, prefix)) {
    return {.outcome = Admission::Outcome::kNoRoom};
  }
  CountHits(request, prefix, kv);
  Take(request, prefix, kv);
  return {.outcome = Admission::Outcome::kAdmitted, .num_cached_tokens = prefix.num_tokens};
}

void PrefixCache::CountHits(const AdmitRequest& request, const Prefix& prefix, SequenceKv& kv) {
  // A request that comes back after a preemption asks for nothing new.
  if (std::exchange(kv.counted, true) || IsLimited(request) || !options_.enabled) return;
  stats_.query_tokens += request.token_ids.size();
  for (PrefixNode* node : prefix.nodes) {
    if (node->num_tokens == 0) continue;
    uint64_t& hits = node->block().on_device() ? stats_.device_hit_tokens
                     : kv.num_read_rounds > 0  ? stats_.disk_hit_tokens
                                               : stats_.host_hit_tokens;
    hits += kBlockTokens;
  }
  if (prefix.nodes.empty()) return;
  const auto in_tail = static_cast<uint64_t>(prefix.num_tokens - prefix.nodes.back()->num_tokens);
  stats_.device_hit_tokens += in_tail;
}

bool PrefixCache::Fits(const AdmitRequest& request, const Prefix& prefix) const {
  int64_t new_blocks = NumBlocksFor(request.num_tokens);
  int64_t blocks = pool_.blocks().num_available() - request.num_spare_blocks;
  int64_t pages = pool_.window_pages().num_available();
  int64_t slots = pool_.state_slots().num_available();
  const auto share_pages = [&](std::span<const int32_t> ids) {
    for (const int32_t id : ids) pages -= pool_.window_pages().is_reclaimable(id) ? 1 : 0;
  };
  for (const PrefixNode* node : prefix.nodes) {
    const KeptPart& block = node->part(PartKind::kBlock);
    if (!block.on_device()) continue;
    --new_blocks;
    blocks -= pool_.blocks().is_reclaimable(block.device_id) ? 1 : 0;
  }
  // The next token's page, when the prefix ends with a page.
  int64_t new_pages = prefix.num_tokens % kWindowPageTokens == 0 ? 1 : 0;
  if (prefix.tail != nullptr && !prefix.tail->running) {
    const request::BlockTable& kept = prefix.tail->kept;
    new_blocks -= static_cast<int64_t>(kept.blocks.size());
    blocks -= static_cast<int64_t>(kept.blocks.size());
    share_pages(kept.window_pages);
    const int64_t end_page =
        kept.first_window_page + static_cast<int64_t>(kept.window_pages.size());
    new_pages = end_page * kWindowPageTokens > prefix.num_tokens ? 0 : 1;
    return blocks >= new_blocks && pages >= new_pages;
  }
  if (prefix.tail != nullptr) {
    new_pages = 1;  // the copy of the last one, or the next
  } else if (prefix.num_tokens > 0) {
    const KeptPart& snapshot = prefix.nodes.back()->snapshot();
    if (snapshot.on_device()) {
      share_pages(snapshot.pages);
    } else {
      new_pages += NumSnapshotPages(options_.sliding_window);
    }
  }
  return blocks >= new_blocks && pages >= new_pages && slots >= 1;
}

int64_t PrefixCache::NumRunnable(const SequenceKv& kv, int64_t num_computed, int64_t wanted) const {
  return pool_.NumRunnable(kv.table, num_computed, wanted);
}

int64_t PrefixCache::ClipChunk(const SequenceKv& kv, int64_t num_computed,
                               int64_t num_tokens) const {
  const auto next = std::upper_bound(kv.snapshot_at.begin(), kv.snapshot_at.end(), num_computed);
  return next == kv.snapshot_at.end() ? num_tokens : std::min(num_tokens, *next - num_computed);
}

void PrefixCache::Extend(SequenceKv& kv, int64_t num_computed, int64_t num_tokens) {
  CHECK(kv.admitted);
  const int64_t end = num_computed + num_tokens;
  MakeRoom(pool_.NumNewBlocks(kv.table, end), pool_.NumNewWindowPages(kv.table, end), 0,
           kv.session);
  pool_.Extend(kv.table, num_computed, num_tokens);
  kv.state_end = std::max(kv.state_end, end);
  extended_.push_back(&kv);
}

request::KvTransfers PrefixCache::TakeTransfers(bool idle) {
  // The next batch's copies of a running tail run after this batch.
  for (SequenceKv* kv : extended_) kv->tail.state_end = kv->state_end;
  extended_.clear();
  request::KvTransfers transfers;
  transfers.copies = std::exchange(copies_, {});
  lower_.TakeRequests(transfers.store);
  transfers.wait_for_store = idle && transfers.copies.empty() && lower_.is_waiting();
  return transfers;
}

void PrefixCache::OnStoreEvents(std::span<const request::KvStoreEvent> events) {
  if (!events.empty()) lower_.OnEvents(events, ++now_, copies_);
}

bool PrefixCache::HasWork() const {
  return !copies_.empty() || lower_.has_requests() || lower_.is_waiting();
}

double PrefixCache::usage() const {
  const IdPool& blocks = pool_.blocks();
  return static_cast<double>(blocks.num_used() - blocks.num_reclaimable()) / blocks.capacity();
}

PrefixCacheStats PrefixCache::stats() const {
  PrefixCacheStats stats = stats_;
  const LowerTiersStats& lower = lower_.stats();
  stats.evicted_host_blocks = lower.num_evicted_host[0];
  stats.evicted_host_snapshots = lower.num_evicted_host[1];
  stats.evicted_disk_records = lower.num_evicted_disk;
  stats.lost_disk_records = lower.num_lost_disk;
  stats.host_bytes_written = lower.host_bytes_written;
  stats.disk_bytes_written = lower.disk_bytes_written;
  stats.disk_bytes_used = lower_.disk_bytes_used();
  stats.disk_on = lower_.disk_on();
  return stats;
}

}  // namespace fathom::kv_cache
