// PlanPools: how many blocks, pages and slots a memory budget buys. Pure functions.
//
// State slots and window pages are bought for every sequence that may run, so that only history
// blocks can be short. With a prefix cache an eighth of the rest buys snapshots and the state of
// ended sequences, or less where one context of max_model_len would not fit beside them. History
// blocks get what is left, up to max_num_seqs full contexts.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/kv_layout.h"

namespace fathom::kv_cache {

struct PoolDemand {
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  int64_t max_model_len = 0;
  int sliding_window = 128;
  bool prefix_cache = false;
};

// kOutOfMemory when one sequence of max_model_len does not fit into `budget_bytes`: says how long a
// one would, and how many bytes are needed.
Result<PoolSizes> PlanPools(const KvLayout& layout, const PoolDemand& demand, int64_t budget_bytes);

// The bytes of the pools.
int64_t PoolBytes(const KvLayout& layout, const PoolSizes& sizes);
// The same for people, by kind: "3577 MiB: 3514 for history blocks, …".
std::string DescribePools(const KvLayout& layout, const PoolSizes& sizes);

// The bytes that every one of max_num_seqs full contexts needs at once: more than this is never
// used.
int64_t MaxUsefulBytes(const KvLayout& layout, const PoolDemand& demand);

// How many blocks and snapshots `bytes` of host memory hold: a fifth is for snapshots.
struct HostSlots {
  int32_t num_blocks = 0;
  int32_t num_snapshots = 0;
};
HostSlots PlanHostSlots(const KvLayout& layout, int sliding_window, int64_t bytes);

// The longest sequence, up to max_model_len, that `budget_bytes` hold beside what the prefix cache
// gets; 0 when not even one block fits.
int64_t LongestSequence(const KvLayout& layout, const PoolDemand& demand, int64_t budget_bytes);

}  // namespace fathom::kv_cache
