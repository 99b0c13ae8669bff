#include "engine/kv_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "base/log.h"
#include "runtime/kv_cache.h"

namespace fathom::engine {
namespace {

kv_cache::PoolDemand DemandOf(const EngineOptions& options) {
  return {.max_num_seqs = options.limits.max_num_seqs,
          .max_num_batched_tokens = options.limits.max_batched_tokens,
          .max_model_len = options.limits.max_model_len,
          .sliding_window = options.sliding_window,
          .prefix_cache = options.kv.prefix_caching};
}

// The context: what every rank holds, where that is asked for.
void ChooseModelLen(const EngineOptions& options, std::span<const RankMemory> ranks,
                    kv_cache::PoolDemand& demand) {
  if (!options.auto_model_len) return;
  const int64_t most = demand.max_model_len;
  int64_t fits = most;
  for (const RankMemory& rank : ranks) {
    fits = std::min(fits, kv_cache::LongestSequence(rank.layout, demand, rank.budget_bytes));
  }
  demand.max_model_len =
      std::clamp<int64_t>(fits, std::min<int64_t>(most, kv_cache::kBlockTokens), most);
  if (fits >= most || fits < kv_cache::kBlockTokens) return;
  LogInfo("context of {} tokens: what the KV cache holds; the model was made for {}",
          demand.max_model_len, most);
}

Status ExplainBudget(const Status& status, const RankMemory& rank) {
  if (rank.origin.empty()) return status;
  return OutOfMemory(fmt::format("{}: {}", rank.origin, status.message()));
}

void TakeLeast(const kv_cache::PoolSizes& rank, kv_cache::PoolSizes& least) {
  least.num_blocks = std::min(least.num_blocks, rank.num_blocks);
  least.num_window_pages = std::min(least.num_window_pages, rank.num_window_pages);
  least.num_state_slots = std::min(least.num_state_slots, rank.num_state_slots);
  least.num_snapshots = std::min(least.num_snapshots, rank.num_snapshots);
}

// A rank of window layers alone has nothing to keep there, and follows the others.
kv_cache::HostSlots PlanHost(const EngineOptions& options, std::span<const RankMemory> ranks) {
  kv_cache::HostSlots least;
  for (const RankMemory& rank : ranks) {
    if (!options.kv.prefix_caching || rank.layout.block_bytes == 0 || rank.host_bytes == 0)
      continue;
    const kv_cache::HostSlots slots =
        kv_cache::PlanHostSlots(rank.layout, options.sliding_window, rank.host_bytes);
    const bool is_first = least.num_blocks == 0;
    least.num_blocks = is_first ? slots.num_blocks : std::min(least.num_blocks, slots.num_blocks);
    least.num_snapshots =
        is_first ? slots.num_snapshots : std::min(least.num_snapshots, slots.num_snapshots);
  }
  return least;
}

}  // namespace

RankMemory MemoryOf(const EngineOptions& options, const kv_cache::KvLayout& layout,
                    const device::Device& device, int num_local_ranks) {
  constexpr int64_t kHostBytesForDisk = int64_t{4} << 30;
  const KvTierOptions& kv = options.kv;
  const bool has_disk = !kv.disk_directory.empty() && kv.disk_bytes > 0;
  const int64_t host_bytes = kv.host_bytes == 0 && has_disk ? kHostBytesForDisk : kv.host_bytes;
  RankMemory memory{.layout = layout,
                    .budget_bytes = options.kv_cache_bytes,
                    .host_bytes = host_bytes / num_local_ranks,
                    .origin = {}};
  if (options.kv_cache_bytes != 0) return memory;
  // The ranks of a CPU share its memory.
  const bool is_cpu = device.kind() == device::DeviceKind::kCpu;
  memory.budget_bytes = runtime::AutomaticKvCacheBytes(
      kv_cache::MaxUsefulBytes(layout, DemandOf(options)), device,
      is_cpu ? options.kv_memory_share / num_local_ranks : options.kv_memory_share);
  if (is_cpu) return memory;
  const int64_t total = device.total_memory_bytes(), used = total - device.free_memory_bytes();
  memory.origin = fmt::format(
      "{} has {} MiB, weights, workspace and other programs use {}, and --gpu-memory-utilization "
      "{:.2f} leaves {}",
      device.name(), total >> 20, used >> 20, options.kv_memory_share, memory.budget_bytes >> 20);
  return memory;
}

Result<KvPlan> PlanKv(const EngineOptions& options, std::span<const RankMemory> ranks) {
  CHECK(!ranks.empty());
  kv_cache::PoolDemand demand = DemandOf(options);
  ChooseModelLen(options, ranks, demand);
  KvPlan plan{.max_model_len = demand.max_model_len, .pools = {}, .host = PlanHost(options, ranks)};
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto pools = kv_cache::PlanPools(ranks[i].layout, demand, ranks[i].budget_bytes);
    if (!pools.ok()) return ExplainBudget(pools.status(), ranks[i]);
    if (i == 0) plan.pools = *pools;
    TakeLeast(*pools, plan.pools);
  }
  return plan;
}

}  // namespace fathom::engine
