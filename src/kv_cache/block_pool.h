// BlockPool: who holds which history block, window page and state slot. It grows and shrinks the
// BlockTable of a sequence; the bytes behind the ids belong to runtime/kv_cache.h. One thread (the
// engine's).
//
// A sequence holds its history blocks until it ends or is preempted. Of its window it holds only
// the pages that a next token, or a rollback of kMaxRollbackTokens, can still reach. Snapshots
// belong to the prefix cache alone (prefix_cache.h), which also holds what of the other pools is
// reclaimable, and makes it free before it lets a sequence grow.
#pragma once

#include <cstdint>

#include "kv_cache/id_pool.h"
#include "kv_cache/kv_layout.h"
#include "request/scheduled_batch.h"

namespace fathom::kv_cache {

struct PoolSizes {
  int32_t num_blocks = 0;
  int32_t num_window_pages = 0;
  int32_t num_state_slots = 0;
  int32_t num_snapshots = 0;
  bool operator==(const PoolSizes&) const = default;
};

// History blocks that hold `num_tokens`.
inline int64_t NumBlocksFor(int64_t num_tokens) {
  return (num_tokens + kBlockTokens - 1) / kBlockTokens;
}

// The most window pages that a sequence holds while `num_tokens` of it run in one step, wherever
// they stand.
int64_t MaxWindowPages(int sliding_window, int64_t num_tokens);

class BlockPool {
 public:
  // There must be window pages for one token of one sequence, and a state slot.
  BlockPool(const PoolSizes& sizes, int sliding_window);

  // Gives an empty table a state slot and the history blocks of `num_tokens`. False, with nothing
  // taken, when either is short.
  bool Admit(int64_t num_tokens, request::BlockTable& table);

  // How many of the `wanted` tokens after `num_computed` have room, in the table or in what is
  // free.
  int64_t NumRunnable(const request::BlockTable& table, int64_t num_computed, int64_t wanted) const;

  // What a table that covers `end` tokens needs beyond what it has.
  int64_t NumNewBlocks(const request::BlockTable& table, int64_t end) const;
  int64_t NumNewWindowPages(const request::BlockTable& table, int64_t end) const;

  // Makes the table cover num_computed + num_tokens; num_tokens is at most NumRunnable, and what is
  // needed is free.
  void Extend(request::BlockTable& table, int64_t num_computed, int64_t num_tokens);

  // Frees the window pages that a sequence with `num_computed` tokens no longer reaches.
  void ReleaseUnreachable(request::BlockTable& table, int64_t num_computed);

  // Frees all; the table is empty again.
  void Release(request::BlockTable& table);

  const IdPool& blocks() const { return blocks_; }
  const IdPool& window_pages() const { return window_pages_; }
  const IdPool& state_slots() const { return state_slots_; }
  const IdPool& snapshots() const { return snapshots_; }
  IdPool& blocks() { return blocks_; }
  IdPool& window_pages() { return window_pages_; }
  IdPool& state_slots() { return state_slots_; }
  IdPool& snapshots() { return snapshots_; }
  // The first page that a sequence with `num_computed` tokens still reaches.
  int64_t FirstReachablePage(int64_t num_computed) const;
  bool IsEmpty() const;
  bool IsIntact() const;

 private:
  const int sliding_window_;
  IdPool blocks_;
  IdPool window_pages_;
  IdPool state_slots_;
  IdPool snapshots_;
};

}  // namespace fathom::kv_cache
