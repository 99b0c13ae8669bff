#include "engine/make_engine.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine/engine_loop.h"
#include "engine/kv_plan.h"
#include "kv_store/disk_store.h"
#include "runtime/kv_cache.h"
#include "runtime/local_executor.h"

namespace fathom::engine {
namespace {

// Logits of a step beyond one row a sequence, for prompt log-probabilities.
constexpr int64_t kPromptLogitsBytes = int64_t{64} << 20;

int MaxLogitsRows(const EngineOptions& options) {
  const int64_t row_bytes = int64_t{options.vocab_size} * static_cast<int64_t>(sizeof(float));
  const int64_t rows = options.limits.max_num_seqs + kPromptLogitsBytes / row_bytes;
  return static_cast<int>(std::min<int64_t>(rows, options.limits.max_batched_tokens));
}

Status CheckLimits(const EngineOptions& options) {
  const model::ModelLimits& limits = options.limits;
  if (limits.max_num_seqs < 1 || limits.max_model_len < 2 || options.max_queue < 0) {
    return InvalidArgument(
        fmt::format("--max-num-seqs must be at least 1, --max-model-len at least 2 and --max-queue "
                    "at least 0, got {}, {} and {}",
                    limits.max_num_seqs, limits.max_model_len, options.max_queue));
  }
  if (limits.max_batched_tokens < limits.max_num_seqs) {
    return InvalidArgument(fmt::format(
        "--max-num-batched-tokens is {}: it must be at least --max-num-seqs, which is {}",
        limits.max_batched_tokens, limits.max_num_seqs));
  }
  if (!(options.decode_floor >= 0 && options.decode_floor <= 0.95)) {
    return InvalidArgument(
        fmt::format("--decode-floor must be 0 to 0.95, got {}", options.decode_floor));
  }
  if (options.parallel.world_size() > 1 && !options.kv.disk_directory.empty()) {
    return InvalidArgument(
        "--kv-disk-dir keeps the KV cache of one device: leave it out, or use --kv-host-size");
  }
  return OkStatus();
}

// Without a disk the names of blocks mean nothing after this process: a key of its own.
Result<kv_cache::HashKey> RandomKey() {
  kv_cache::HashKey key;
  if (getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size())) {
    return InternalError("the system gives no random bytes (getrandom)");
  }
  return key;
}

// Of a data rank. `layout`: for what the tiers below the device are measured in.
Result<kv_cache::PrefixCacheOptions> CacheOptions(const EngineOptions& options, const KvPlan& plan,
                                                  const kv_cache::KvLayout& layout) {
  const KvTierOptions& kv = options.kv;
  kv_cache::PrefixCacheOptions cache{
      .pools = plan.pools,
      .sliding_window = options.sliding_window,
      .enabled = kv.prefix_caching,
      .retention_interval = kv.retention_interval,
      .turn_token_id = kv.turn_token_id,
      .num_host_blocks = plan.host.num_blocks,
      .num_host_snapshots = plan.host.num_snapshots,
      .block_bytes = layout.block_bytes,
      .snapshot_bytes = kv_cache::SnapshotBytesWithPages(layout, options.sliding_window)};
  ASSIGN_OR_RETURN(cache.hash_key, RandomKey());
  return cache;
}

// Null where nothing is kept on disk.
Result<std::unique_ptr<kv_store::DiskStore>> OpenDisk(const KvTierOptions& kv,
                                                      kv_cache::PrefixCacheOptions& cache) {
  const bool has_disk = !kv.disk_directory.empty() && kv.disk_bytes > 0;
  if (!has_disk || cache.num_host_blocks == 0) return std::unique_ptr<kv_store::DiskStore>();
  ASSIGN_OR_RETURN(auto disk, kv_store::DiskStore::Open(
                                  {.directory = kv.disk_directory,
                                   .content_name = kv.model_fingerprint,
                                   .payload_bytes = {cache.block_bytes, cache.snapshot_bytes},
                                   .write_bytes_per_second = kv.disk_write_bytes_per_second}));
  cache.hash_key = disk->key();
  cache.disk_bytes = kv.disk_bytes;
  return disk;
}

Result<runtime::KvCache> MakeKvCache(const EngineOptions& options, const KvPlan& plan,
                                     const EngineRank& rank) {
  runtime::HostPoolSizes host;
  if (plan.host.num_blocks > 0) {
    host = {
        .num_blocks = plan.host.num_blocks,
        .num_snapshots = plan.host.num_snapshots,
        .snapshot_bytes = kv_cache::SnapshotBytesWithPages(rank.layout, options.sliding_window)};
  }
  ASSIGN_OR_RETURN(auto cache, runtime::KvCache::Make(rank.layout, plan.pools, *rank.device, host));
  const std::string name =
      options.parallel.world_size() == 1
          ? ""
          : fmt::format(" of rank {}", config::RankOf(options.parallel, rank.place));
  LogInfo("KV cache{}: {} blocks of {} tokens, {}", name, plan.pools.num_blocks,
          kv_cache::kBlockTokens, kv_cache::DescribePools(rank.layout, plan.pools));
  if (cache.host_bytes() > 0) {
    LogInfo("KV cache{} in host memory: {} MiB; on disk: {}", name, cache.host_bytes() >> 20,
            options.kv.disk_directory.empty() ? "none" : options.kv.disk_directory);
  }
  return cache;
}

// How many steps may be under way: with several stages one, because the first one needs tokens that
// the last one samples.
int MaxInFlight(const EngineOptions& options, const std::vector<EngineRank>& ranks) {
  if (options.parallel.pipeline_parallel_size > 1) return 1;
  const bool overlaps = options.async_scheduling.value_or(std::all_of(
      ranks.begin(), ranks.end(),
      [](const EngineRank& rank) { return rank.device->kind() != device::DeviceKind::kCpu; }));
  return overlaps ? runtime::ModelRunner::kMaxInFlight : 1;
}

Result<std::unique_ptr<runtime::LocalExecutor>> MakeLocalExecutor(
    const EngineOptions& options, const KvPlan& plan, const std::vector<EngineRank>& ranks,
    std::unique_ptr<kv_store::DiskStore> disk) {
  const int max_in_flight = MaxInFlight(options, ranks);
  std::vector<runtime::LocalExecutor::Rank> local;
  for (const EngineRank& rank : ranks) {
    ASSIGN_OR_RETURN(auto kv_cache, MakeKvCache(options, plan, rank));
    ASSIGN_OR_RETURN(
        auto runner,
        runtime::ModelRunner::Make(
            {.vocab_size = options.vocab_size,
             .max_logits_rows = MaxLogitsRows(options),
             .eos_token_ids = options.eos_token_ids,
             .num_layers = options.num_layers,
             .num_experts_per_token = options.num_experts_per_token,
             .sampling = runtime::SamplingOf(options.parallel, rank.place, max_in_flight)},
            *rank.model, std::move(kv_cache), *rank.device, std::move(disk)));
    local.push_back(
        {.place = rank.place, .runner = std::move(runner), .transport = rank.transport});
  }
  return std::make_unique<runtime::LocalExecutor>(options.parallel, std::move(local),
                                                  max_in_flight);
}

scheduler::SchedulerOptions SchedulerOptionsOf(const EngineOptions& options, const KvPlan& plan,
                                               const kv_cache::PrefixCacheOptions& cache) {
  return {.max_num_seqs = options.limits.max_num_seqs,
          .max_num_batched_tokens = options.limits.max_batched_tokens,
          .max_logits_rows = MaxLogitsRows(options),
          .max_model_len = plan.max_model_len,
          .vocab_size = options.vocab_size,
          .eos_token_ids = options.eos_token_ids,
          .cache = cache,
          .decode_floor = options.decode_floor,
          .constraints_need_results = options.parallel.tensor_parallel_size > 1};
}

}  // namespace

Result<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options,
                                           const std::vector<EngineRank>& ranks,
                                           MetricsRegistry& metrics, const Clock& clock) {
  RETURN_IF_ERROR(CheckLimits(options));
  CHECK_EQ(ranks.size(), static_cast<size_t>(options.parallel.world_size()));
  std::vector<RankMemory> memory;
  for (const EngineRank& rank : ranks) {
    memory.push_back(MemoryOf(options, rank.layout, *rank.device, static_cast<int>(ranks.size())));
  }
  ASSIGN_OR_RETURN(const KvPlan plan, PlanKv(options, memory));
  ASSIGN_OR_RETURN(auto cache, CacheOptions(options, plan, ranks.front().layout));
  ASSIGN_OR_RETURN(auto disk, OpenDisk(options.kv, cache));
  ASSIGN_OR_RETURN(auto executor, MakeLocalExecutor(options, plan, ranks, std::move(disk)));
  const int num_data_ranks = options.parallel.data_parallel_size;
  const EngineLoopOptions loop_options{
      .model_name = options.model_name,
      .max_live_requests = options.limits.max_num_seqs * num_data_ranks + options.max_queue,
      .num_data_ranks = num_data_ranks,
      .reports_experts = options.parallel.pipeline_parallel_size == 1};
  return std::unique_ptr<Engine>(std::make_unique<EngineLoop>(
      loop_options, SchedulerOptionsOf(options, plan, cache), std::move(executor), metrics, clock));
}

}  // namespace fathom::engine
