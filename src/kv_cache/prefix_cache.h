// PrefixCache: the KV memory of all sequences, running and past. It hands out history blocks,
// window pages and state slots, keeps what ended sequences computed, and gives it to requests that
// begin with the same tokens. Host metadata only: the copies it wants are in TakeTransfers(). One
// thread (the engine's), deterministic.
//
// What is kept, for a chain of full blocks of 256 tokens named by a keyed hash:
//  - blocks, shared by reference: their bytes never change once they are full;
//  - snapshots, at chosen block boundaries: the window pages before the boundary, shared by
//    reference, and the compressor state. A prefix can be continued from a snapshot only;
//  - tails: the exact end of a sequence, running or ended: a state slot, window pages and the last,
//    unfinished block. A request that goes on from there, or from up to 8 tokens before, copies
//    these and computes nothing twice.
// Tokens are compared on every hit: a hash that collides is a miss. A salt opens a tree of its own.
//
// Kept memory is free memory: it is reclaimed when a running sequence needs room. What was used
// longest ago goes first; later, the more sessions share it; and what belongs to the session that
// needs the room goes after that of others, as long as it is at most half of all.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kv_cache/block_pool.h"
#include "kv_cache/lower_tiers.h"
#include "kv_cache/prefix_tree.h"
#include "request/kv_transfers.h"
#include "request/request.h"
#include "request/scheduled_batch.h"

namespace fathom::kv_cache {

struct PrefixCacheOptions {
  PoolSizes pools;
  int sliding_window = 128;
  bool enabled = true;  // false: nothing is kept, nothing is found
  // Tokens between the snapshots that a prefill takes, besides those at its end and where prompts
  // were seen to part; 0: none.
  int64_t retention_interval = 4096;
  // The token that begins a user's turn; -1: none. Clients change the last turn (a date, a reminder
  // that moves on), so a prefill takes a snapshot before it.
  int32_t turn_token_id = -1;
  // Host memory; 0: no such tier. The disk needs both.
  int32_t num_host_blocks = 0;
  int32_t num_host_snapshots = 0;
  int64_t disk_bytes = 0;
  int num_disk_ranks = 1;                       // whose stores must all have a record
  int64_t block_bytes = 0, snapshot_bytes = 0;  // of all ranks, in host memory
  // Of the hashes. Random, unless the disk's contents are to be found again.
  HashKey hash_key = {};
};

// A sequence's hold on the cache. Made empty by its owner (the scheduler) and never moved while it
// is admitted; changed by PrefixCache alone. To be Released in any state.
struct SequenceKv {
  request::BlockTable table;

  // Below: PrefixCache's own.
  bool admitted = false;
  bool counted = false;  // in the statistics
  uint64_t session = 0;
  int num_read_rounds = 0;
  int64_t num_prompt_tokens = 0;
  int64_t prefill_end = 0;   // known tokens at admission
  int64_t num_computed = 0;  // that OnComputed has seen
  int64_t state_end = 0;     // the most tokens that the state slot has seen
  request::KvHash root_hash;
  std::vector<request::KvHash> hashes;    // of the full blocks of the known tokens
  std::vector<PrefixNode*> nodes;         // root, then the full blocks that are in the tree
  std::vector<int64_t> snapshot_at;       // boundaries of the prefill, ascending
  PrefixNode* last_snapshot = nullptr;    // that the sequence took while it decoded
  std::vector<request::KvHash> promised;  // what others wait for: blocks, then the whole prompt
  PrefixTail tail;
};

struct AdmitRequest {
  request::RequestId id = 0;
  std::string_view session = {};       // empty: a session of its own
  std::string_view salt = {};          // isolates: prefixes are shared within one salt only
  std::span<const int32_t> token_ids;  // the prompt; with its output, when it was preempted
  int64_t num_prompt_tokens = 0;
  int64_t num_tokens = 0;  // whose history blocks are reserved: all of them and more
  // The tokens from here on must all be run: their log-probabilities or experts are wanted.
  int64_t max_cached_tokens = std::numeric_limits<int64_t>::max();
  int64_t num_spare_blocks = 0;  // that must be left for others
};

struct Admission {
  enum class Outcome {
    kAdmitted,
    kNoRoom,  // nothing was taken; ask again when memory was freed
    kWait,    // its prefix is on its way (from disk, or another sequence computes it): ask again
              // next step, and let others pass
  };
  Outcome outcome = Outcome::kNoRoom;
  // Start here: the KV of the tokens before is in place once the batch's transfers have run. Less
  // than token_ids.size().
  int64_t num_cached_tokens = 0;
};

// Since the start; vLLM's names in docs/kv-cache.md.
struct PrefixCacheStats {
  uint64_t query_tokens = 0;  // prompt tokens that could have been found
  uint64_t device_hit_tokens = 0;
  uint64_t host_hit_tokens = 0;
  uint64_t disk_hit_tokens = 0;
  uint64_t evicted_device_blocks = 0;  // for a running sequence; also kept elsewhere or not
  uint64_t evicted_device_snapshots = 0;
  uint64_t evicted_tails = 0;
  uint64_t evicted_host_blocks = 0;  // host memory is full
  uint64_t evicted_host_snapshots = 0;
  uint64_t evicted_disk_records = 0;  // the disk's budget is full
  uint64_t lost_disk_records = 0;     // corrupt or gone
  uint64_t host_bytes_written = 0;
  uint64_t disk_bytes_written = 0;
  int64_t disk_bytes_used = 0;
  bool disk_on = false;
};

class PrefixCache {
 public:
  explicit PrefixCache(const PrefixCacheOptions& options);

  // --- The life of a sequence: Admit, then each step NumRunnable, ClipChunk, Extend (in
  // Schedule) and OnComputed (in Commit), then Release.

  // Finds the longest prefix, takes a state slot, the prefix's memory and the blocks of
  // `num_tokens`.
  Admission Admit(const AdmitRequest& request, SequenceKv& kv);

  // How many of the `wanted` tokens after `num_computed` have room: as BlockPool's, with what can
  // be reclaimed.
  int64_t NumRunnable(const SequenceKv& kv, int64_t num_computed, int64_t wanted) const;

  // A chunk of a prefill ends where a snapshot is to be taken: at most `num_tokens`, at least 1.
  int64_t ClipChunk(const SequenceKv& kv, int64_t num_computed, int64_t num_tokens) const;

  // Makes the table cover the step's tokens; they are part of the batch that is being made.
  // num_tokens is at most NumRunnable and ClipChunk. A step may be planned before the one before it
  // is done, where that one ran the sequence's last known token: batches run in their order, so a
  // sequence may be released at any time after its batch was made.
  void Extend(SequenceKv& kv, int64_t num_computed, int64_t num_tokens);

  // The step is done: `num_computed` of `token_ids` are in the cache for good. With drafts it may
  // be less than what Extend was told, by up to kMaxRollbackTokens.
  void OnComputed(SequenceKv& kv, std::span<const int32_t> token_ids, int64_t num_computed);

  // The sequence ended, was preempted or cancelled: what it computed is kept as long as nobody
  // needs the room. The hold is empty again.
  void Release(SequenceKv& kv, std::span<const int32_t> token_ids, int64_t num_computed);

  // --- A step: at the end of Schedule, what goes with the batch; `idle` when it has no sequences.
  request::KvTransfers TakeTransfers(bool idle);
  // At the start of Commit.
  void OnStoreEvents(std::span<const request::KvStoreEvent> events);

  // Whether a step without sequences is worth running now: copies to make, or a disk to wait for.
  bool HasWork() const;

  // Forgets everything that no running sequence uses, in every tier.
  void Clear();

  // Tokens of the request's prefix that are on the device, in host memory or on disk: for routing
  // and for the order of admission. Takes nothing.
  int64_t NumCachedTokens(const AdmitRequest& request) const;

  const BlockPool& pool() const { return pool_; }
  // Share of the history blocks that running sequences hold.
  double usage() const;
  PrefixCacheStats stats() const;

 private:
  // What admission found: the nodes of num_tokens / 256 blocks, and where the state comes from.
  struct Prefix {
    int64_t num_tokens = 0;
    std::vector<PrefixNode*> nodes;  // root first
    PrefixTail* tail = nullptr;      // else the last node's snapshot, when num_tokens > 0
    // Blocks that are known beyond: where this prompt and another part.
    int64_t num_known_tokens = 0;
  };
  enum class Reach { kHost, kDisk };  // the lowest tier that is good enough

  void Begin(const AdmitRequest& request, SequenceKv& kv) const;
  uint64_t MakeSessionKey(const AdmitRequest& request) const;
  void HashTokens(std::span<const int32_t> token_ids, SequenceKv& kv) const;
  Prefix FindPrefix(const AdmitRequest& request, const SequenceKv& kv, Reach reach) const;
  PrefixTail* FindTail(const PrefixNode& node, const AdmitRequest& request,
                       int64_t& num_tokens) const;
  bool IsPromised(const AdmitRequest& request, const Prefix& prefix, const SequenceKv& kv) const;
  request::KvHash PromptHash(const AdmitRequest& request, const SequenceKv& kv) const;
  void Promise(const AdmitRequest& request, SequenceKv& kv);
  void BreakPromises(SequenceKv& kv);
  bool StartReads(const Prefix& prefix, SequenceKv& kv);
  void CountHits(const AdmitRequest& request, const Prefix& prefix, SequenceKv& kv);

  // Taking a prefix. Fits looks at what is free and reclaimable; the rest cannot fail then.
  bool Fits(const AdmitRequest& request, const Prefix& prefix) const;
  void Take(const AdmitRequest& request, const Prefix& prefix, SequenceKv& kv);
  void TakeNodes(const Prefix& prefix, SequenceKv& kv);
  void TakeSnapshot(PrefixNode& node, SequenceKv& kv);
  // Moves all of it, but for the block, which goes behind the nodes'.
  std::vector<int32_t> TakeKeptTail(PrefixTail& tail, SequenceKv& kv);
  void ForkTail(const PrefixTail& tail, int64_t num_tokens, SequenceKv& kv);
  void PlanSnapshots(const AdmitRequest& request, const Prefix& prefix, SequenceKv& kv) const;

  // A running sequence.
  void Publish(SequenceKv& kv, std::span<const int32_t> token_ids);
  void MaybeSaveSnapshot(SequenceKv& kv);
  bool SaveSnapshot(SequenceKv& kv, PrefixNode& node);
  void UpdateTail(SequenceKv& kv, std::span<const int32_t> token_ids);
  void KeepTail(SequenceKv& kv);

  // Device memory that is kept.
  void MakeRoom(int64_t num_blocks, int64_t num_pages, int64_t num_slots, uint64_t session);
  // Gives up what holds a block, or window pages.
  bool EvictFor(PartKind kind, uint64_t session);
  bool EvictTail(uint64_t session);
  bool TailGoesFirst(const EvictionPlace* part, uint64_t session) const;
  void EvictDevicePart(PrefixNode& node, PartKind kind);
  void DropTail(PrefixTail& tail);
  void Touch(PrefixNode& node, PartKind kind, uint64_t session);
  void Use(PrefixNode& node);
  void Unuse(PrefixNode& node, uint64_t session);

  const PrefixCacheOptions options_;
  const uint64_t session_credit_;
  uint64_t now_ = 1;  // counts what is admitted and computed: the age of memory is in blocks
  BlockPool pool_;
  PrefixTree tree_;
  LowerTiers lower_;
  std::array<EvictionQueue<PrefixNode>, 2> device_queue_;
  EvictionQueue<PrefixTail> tail_queue_;
  std::unordered_map<PrefixTail*, std::unique_ptr<PrefixTail>> kept_tails_;
  uint64_t next_tail_serial_ = 1;
  std::unordered_map<request::KvHash, SequenceKv*, KvHashHasher> promises_;
  std::vector<request::KvCopy> copies_;
  std::vector<SequenceKv*> extended_;  // for the batch that is being made
  PrefixCacheStats stats_;
};

}  // namespace fathom::kv_cache
