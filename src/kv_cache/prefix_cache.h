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
// longest ago goes first, but not before the memory of other sessions, where a sequence's own is
// concerned, and later the more sessions share it. A block leaves after its children.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kv_cache/block_pool.h"
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
  // Host memory; 0: no such tier. The disk needs both.
  int32_t num_host_blocks = 0;
  int32_t num_host_snapshots = 0;
  int64_t disk_bytes = 0;
  int64_t block_bytes = 0, snapshot_bytes = 0;  // of a record on the disk, for its budget
  // Of the hashes. Random, unless the disk's contents are to be found again.
  std::array<uint8_t, 32> hash_key = {};
};

class PrefixTree;
struct PrefixNode;

// A sequence's hold on the cache. Made empty by its owner (the scheduler); changed by PrefixCache
// alone. Movable while it is not admitted.
struct SequenceKv {
  request::BlockTable table;

  // Below: PrefixCache's own.
  bool admitted = false;
  uint64_t session = 0;
  int64_t num_cached_tokens = 0;     // that admission found
  std::vector<PrefixNode*> nodes;    // of the full blocks that are in the tree, from the first
  PrefixNode* root = nullptr;        // of the salt
  std::vector<int64_t> snapshot_at;  // boundaries still to come, ascending
};

struct AdmitRequest {
  request::RequestId id = 0;
  std::string_view session;              // empty: a session of its own
  std::string_view salt;                 // isolates: prefixes are shared within one salt only
  std::span<const int32_t> token_ids;    // the prompt; with its output, when it was preempted
  int64_t num_prompt_tokens = 0;
  int64_t num_tokens = 0;                // whose history blocks are reserved: all of them and more
  bool compute_all = false;              // prompt log-probabilities: no token may be skipped
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
  uint64_t query_tokens = 0;      // prompt tokens that could have been found
  uint64_t device_hit_tokens = 0;
  uint64_t host_hit_tokens = 0;
  uint64_t disk_hit_tokens = 0;
  uint64_t tail_hit_tokens = 0;   // the part of the device's that only a tail gave
  uint64_t evicted_device_blocks = 0;     // for a running sequence; also kept elsewhere or not
  uint64_t evicted_device_snapshots = 0;
  uint64_t evicted_tails = 0;
  uint64_t evicted_host_blocks = 0;       // host memory is full
  uint64_t evicted_host_snapshots = 0;
  uint64_t evicted_disk_records = 0;      // the disk's budget is full
  uint64_t lost_disk_records = 0;         // corrupt or gone
  uint64_t host_bytes_written = 0;
  uint64_t disk_bytes_written = 0;
  int64_t disk_bytes_used = 0;
  bool disk_on = false;
};

class PrefixCache {
 public:
  explicit PrefixCache(const PrefixCacheOptions& options);
  ~PrefixCache();

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

  // Makes the table cover the step's tokens; they are part of the batch that is being made, and the
  // sequence is not released before that batch's result. num_tokens is at most NumRunnable and
  // ClipChunk.
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
  BlockPool pool_;
};

}  // namespace fathom::kv_cache
