// PlanKv: the pools of the KV cache, the same on all ranks: a block table is read by every rank
// that runs a data rank's batch, and data ranks take the same requests. What a rank's memory holds
// follows from the bytes of its own layers, so each is planned alone, and the least of each count
// is taken. Pure, but for MemoryOf.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/status.h"
#include "device/device.h"
#include "engine/make_engine.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/chain_hash.h"
#include "kv_cache/kv_layout.h"
#include "kv_cache/pool_plan.h"

namespace fathom::engine {

// What a rank has for its KV cache.
struct RankMemory {
  kv_cache::KvLayout layout;
  int64_t budget_bytes = 0;
  int64_t host_bytes = 0;
  std::string origin;  // what the budget was taken from, for a message; empty: it was given
};

struct KvPlan {
  int64_t max_model_len = 0;
  kv_cache::PoolSizes pools;
  kv_cache::HostSlots host;
  // Of the records on disk, the same for all ranks; none: nothing is kept there.
  std::optional<kv_cache::HashKey> disk_key = {};
};

// The memory of one of `num_local_ranks` ranks of this process.
RankMemory MemoryOf(const EngineOptions& options, const kv_cache::KvLayout& layout,
                    const device::Device& device, int num_local_ranks);

// kOutOfMemory as MakeEngine. Says so (log) when options.auto_model_len shortens the context.
Result<KvPlan> PlanKv(const EngineOptions& options, std::span<const RankMemory> ranks);

}  // namespace fathom::engine
