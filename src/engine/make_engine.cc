#include "engine/make_engine.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "engine/engine_loop.h"
#include "engine/leading_executor.h"
#include "engine/rank_runtime.h"

namespace fathom::engine {
namespace {

// Without a disk the names of blocks mean nothing after this process: a key of its own.
Result<kv_cache::HashKey> RandomKey() {
  kv_cache::HashKey key;
  if (getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size())) {
    return InternalError("the system gives no random bytes (getrandom)");
  }
  return key;
}

// Of a data rank. `ranks`: all there are.
Result<kv_cache::PrefixCacheOptions> CacheOptions(const EngineOptions& options, const KvPlan& plan,
                                                  const std::vector<RankMemory>& ranks) {
  const KvTierOptions& kv = options.kv;
  const int num_data_ranks = options.parallel.data_parallel_size;
  kv_cache::PrefixCacheOptions cache{
      .pools = plan.pools,
      .sliding_window = options.sliding_window,
      .enabled = kv.prefix_caching,
      .retention_interval = kv.retention_interval,
      .turn_token_id = kv.turn_token_id,
      .num_host_blocks = plan.host.num_blocks,
      .num_host_snapshots = plan.host.num_snapshots,
      .disk_bytes = plan.disk_key ? kv.disk_bytes / num_data_ranks : 0,
      .num_disk_ranks = options.parallel.world_size() / num_data_ranks};
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (config::PlaceOf(options.parallel, static_cast<int>(rank)).data != 0) continue;
    const kv_cache::KvLayout& layout = ranks[rank].layout;
    cache.block_bytes += layout.block_bytes;
    cache.snapshot_bytes += kv_cache::SnapshotBytesWithPages(layout, options.sliding_window);
  }
  if (plan.disk_key) {
    cache.hash_key = *plan.disk_key;
  } else {
    ASSIGN_OR_RETURN(cache.hash_key, RandomKey());
  }
  return cache;
}

// How many steps may be under way. One with several stages, because the first one needs tokens that
// the last one samples, and with several nodes, whose plans hold all tokens.
int MaxInFlight(const EngineOptions& options, const std::vector<EngineRank>& ranks, int num_nodes) {
  if (options.parallel.pipeline_parallel_size > 1 || num_nodes > 1) return 1;
  const bool overlaps = options.async_scheduling.value_or(std::all_of(
      ranks.begin(), ranks.end(),
      [](const EngineRank& rank) { return rank.device->kind() != device::DeviceKind::kCpu; }));
  return overlaps ? runtime::ModelRunner::kMaxInFlight : 1;
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

Result<std::unique_ptr<Engine>> MakeOverNodes(const EngineOptions& options,
                                              const std::vector<EngineRank>& ranks,
                                              comm::NodeGroup* nodes, MetricsRegistry& metrics,
                                              const Clock& clock) {
  RETURN_IF_ERROR(CheckOptions(options));
  const int num_nodes = nodes == nullptr ? 1 : static_cast<int>(nodes->nodes().size());
  std::vector<RankMemory> memory = MemoryOf(options, ranks);
  if (num_nodes > 1) RETURN_IF_ERROR(ReceiveMemory(*nodes, memory));
  CHECK_EQ(memory.size(), static_cast<size_t>(options.parallel.world_size()));
  ASSIGN_OR_RETURN(KvPlan plan, PlanKv(options, memory));
  ASSIGN_OR_RETURN(auto disk, OpenDisk(options, plan, ranks, num_nodes));
  if (disk != nullptr) plan.disk_key = disk->key();
  ASSIGN_OR_RETURN(const auto cache, CacheOptions(options, plan, memory));
  if (num_nodes > 1) RETURN_IF_ERROR(nodes->control().Broadcast(EncodeKvPlan(plan)));
  ASSIGN_OR_RETURN(auto local,
                   MakeLocalExecutor(options, plan, ranks, MaxInFlight(options, ranks, num_nodes),
                                     std::move(disk)));
  std::unique_ptr<runtime::Executor> executor = std::move(local);
  if (num_nodes > 1) {
    RETURN_IF_ERROR(AwaitFollowers(*nodes));
    executor = std::make_unique<LeadingExecutor>(StepLimitsOf(options, plan), options.parallel,
                                                 std::move(executor), *nodes);
  }
  const int num_data_ranks = options.parallel.data_parallel_size;
  const EngineLoopOptions loop_options{
      .model_name = options.model_name,
      .max_live_requests = options.limits.max_num_seqs * num_data_ranks + options.max_queue,
      .num_data_ranks = num_data_ranks,
      .reports_experts = options.parallel.pipeline_parallel_size == 1};
  return std::unique_ptr<Engine>(std::make_unique<EngineLoop>(
      loop_options, SchedulerOptionsOf(options, plan, cache), std::move(executor), metrics, clock));
}

}  // namespace

EngineOptions OptionsFor(const config::ModelConfig& config, const model::ModelLimits& limits) {
  EngineOptions options;
  options.vocab_size = config.vocab_size;
  options.sliding_window = config.sliding_window;
  options.eos_token_ids = {config.eos_token_id};
  options.num_layers = config.num_layers;
  options.num_experts_per_token = config.num_experts_per_token;
  options.limits = limits;
  return options;
}

Result<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options,
                                           const std::vector<EngineRank>& ranks,
                                           MetricsRegistry& metrics, const Clock& clock,
                                           comm::NodeGroup* nodes) {
  auto engine = MakeOverNodes(options, ranks, nodes, metrics, clock);
  if (!engine.ok() && nodes != nullptr) nodes->control().Abort(engine.status());
  return engine;
}

}  // namespace fathom::engine
