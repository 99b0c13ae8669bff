#include "engine/make_engine.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine/engine_loop.h"
#include "kv_cache/pool_plan.h"
#include "kv_store/disk_store.h"
#include "runtime/kv_cache.h"
#include "runtime/model_runner.h"

namespace fathom::engine {
namespace {

// Logits of a step beyond one row a sequence, for prompt log-probabilities.
constexpr int64_t kPromptLogitsBytes = int64_t{64} << 20;

int MaxLogitsRows(const EngineOptions& options) {
  const int64_t row_bytes = int64_t{options.vocab_size} * static_cast<int64_t>(sizeof(float));
  const int64_t rows = options.limits.max_num_seqs + kPromptLogitsBytes / row_bytes;
  return static_cast<int>(std::min<int64_t>(rows, options.limits.max_batched_tokens));
}

struct KvTiers {
  kv_cache::PrefixCacheOptions cache;
  runtime::HostPoolSizes host;
  std::unique_ptr<kv_store::DiskStore> disk;  // null: none
};

// Without a disk the names of blocks mean nothing after this process: a key of its own.
Result<kv_cache::HashKey> RandomKey() {
  kv_cache::HashKey key;
  if (getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size())) {
    return InternalError("the system gives no random bytes (getrandom)");
  }
  return key;
}

Result<KvTiers> OpenKvTiers(const EngineOptions& options, const kv_cache::KvLayout& layout,
                            const kv_cache::PoolSizes& pools) {
  constexpr int64_t kHostBytesForDisk = int64_t{4} << 30;
  const KvTierOptions& kv = options.kv;
  KvTiers tiers;
  tiers.cache = {
      .pools = pools,
      .sliding_window = options.sliding_window,
      .enabled = kv.prefix_caching,
      .retention_interval = kv.retention_interval,
      .turn_token_id = kv.turn_token_id,
      .block_bytes = layout.block_bytes,
      .snapshot_bytes = kv_cache::SnapshotBytesWithPages(layout, options.sliding_window)};
  ASSIGN_OR_RETURN(tiers.cache.hash_key, RandomKey());
  const bool has_disk = !kv.disk_directory.empty() && kv.disk_bytes > 0;
  const int64_t host_bytes = kv.host_bytes == 0 && has_disk ? kHostBytesForDisk : kv.host_bytes;
  // A model of window layers alone has nothing to keep there.
  if (!kv.prefix_caching || layout.block_bytes == 0 || host_bytes == 0) return tiers;
  const kv_cache::HostSlots slots =
      kv_cache::PlanHostSlots(layout, options.sliding_window, host_bytes);
  tiers.cache.num_host_blocks = slots.num_blocks;
  tiers.cache.num_host_snapshots = slots.num_snapshots;
  tiers.host = {.num_blocks = slots.num_blocks,
                .num_snapshots = slots.num_snapshots,
                .snapshot_bytes = tiers.cache.snapshot_bytes};
  if (!has_disk) return tiers;
  ASSIGN_OR_RETURN(
      tiers.disk,
      kv_store::DiskStore::Open({.directory = kv.disk_directory,
                                 .content_name = kv.model_fingerprint,
                                 .payload_bytes = {layout.block_bytes, tiers.cache.snapshot_bytes},
                                 .write_bytes_per_second = kv.disk_write_bytes_per_second}));
  tiers.cache.hash_key = tiers.disk->key();
  tiers.cache.disk_bytes = kv.disk_bytes;
  return tiers;
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
  return OkStatus();
}

int64_t KvCacheBudget(const EngineOptions& options, const kv_cache::KvLayout& layout,
                      const kv_cache::PoolDemand& demand, const device::Device& device) {
  if (options.kv_cache_bytes != 0) return options.kv_cache_bytes;
  return runtime::AutomaticKvCacheBytes(kv_cache::MaxUsefulBytes(layout, demand), device,
                                        options.kv_memory_share);
}

// What of a GPU the budget was taken from.
Status ExplainBudget(const Status& status, const EngineOptions& options, int64_t budget_bytes,
                     const device::Device& device) {
  if (options.kv_cache_bytes != 0 || device.kind() == device::DeviceKind::kCpu) return status;
  const int64_t total = device.total_memory_bytes(), used = total - device.free_memory_bytes();
  return OutOfMemory(fmt::format(
      "{} has {} MiB, weights, workspace and other programs use {}, and --gpu-memory-utilization "
      "{:.2f} leaves {}: {}",
      device.name(), total >> 20, used >> 20, options.kv_memory_share, budget_bytes >> 20,
      status.message()));
}

// Shortens demand.max_model_len to what the budget holds, where that is asked for.
void ChooseModelLen(const EngineOptions& options, const kv_cache::KvLayout& layout,
                    int64_t budget_bytes, kv_cache::PoolDemand& demand) {
  if (!options.auto_model_len) return;
  const int64_t most = demand.max_model_len;
  const int64_t fits = kv_cache::LongestSequence(layout, demand, budget_bytes);
  demand.max_model_len =
      std::clamp<int64_t>(fits, std::min<int64_t>(most, kv_cache::kBlockTokens), most);
  if (fits >= most || fits < kv_cache::kBlockTokens) return;
  LogInfo("context of {} tokens: what the KV cache holds; the model was made for {}",
          demand.max_model_len, most);
}

}  // namespace

Result<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options,
                                           const kv_cache::KvLayout& layout,
                                           model::DeepSeekV4& model, device::Device& device,
                                           MetricsRegistry& metrics, const Clock& clock) {
  RETURN_IF_ERROR(CheckLimits(options));
  kv_cache::PoolDemand demand{.max_num_seqs = options.limits.max_num_seqs,
                              .max_num_batched_tokens = options.limits.max_batched_tokens,
                              .max_model_len = options.limits.max_model_len,
                              .sliding_window = options.sliding_window,
                              .prefix_cache = options.kv.prefix_caching};
  const int64_t budget_bytes = KvCacheBudget(options, layout, demand, device);
  ChooseModelLen(options, layout, budget_bytes, demand);
  const auto pools = kv_cache::PlanPools(layout, demand, budget_bytes);
  if (!pools.ok()) return ExplainBudget(pools.status(), options, budget_bytes, device);
  ASSIGN_OR_RETURN(KvTiers tiers, OpenKvTiers(options, layout, *pools));
  ASSIGN_OR_RETURN(auto kv_cache, runtime::KvCache::Make(layout, *pools, device, tiers.host));
  LogInfo("KV cache: {} blocks of {} tokens, {}", pools->num_blocks, kv_cache::kBlockTokens,
          kv_cache::DescribePools(layout, *pools));
  if (kv_cache.host_bytes() > 0) {
    LogInfo("KV cache in host memory: {} MiB; on disk: {}", kv_cache.host_bytes() >> 20,
            options.kv.disk_directory.empty() ? "none" : options.kv.disk_directory);
  }

  const int max_logits_rows = MaxLogitsRows(options);
  ASSIGN_OR_RETURN(auto runner, runtime::ModelRunner::Make(
                                    {.vocab_size = options.vocab_size,
                                     .max_logits_rows = max_logits_rows,
                                     .eos_token_ids = options.eos_token_ids,
                                     .num_layers = options.num_layers,
                                     .num_experts_per_token = options.num_experts_per_token},
                                    model, std::move(kv_cache), device, std::move(tiers.disk)));
  const scheduler::SchedulerOptions scheduler_options{
      .max_num_seqs = options.limits.max_num_seqs,
      .max_num_batched_tokens = options.limits.max_batched_tokens,
      .max_logits_rows = max_logits_rows,
      .max_model_len = demand.max_model_len,
      .vocab_size = options.vocab_size,
      .eos_token_ids = options.eos_token_ids,
      .cache = tiers.cache,
      .decode_floor = options.decode_floor};
  const bool overlaps = options.async_scheduling.value_or(runner->overlaps());
  const EngineLoopOptions loop_options{
      .model_name = options.model_name,
      .max_live_requests = options.limits.max_num_seqs + options.max_queue,
      .max_steps_in_flight = overlaps ? runtime::ModelRunner::kMaxInFlight : 1};
  return std::unique_ptr<Engine>(std::make_unique<EngineLoop>(loop_options, scheduler_options,
                                                              std::move(runner), metrics, clock));
}

}  // namespace fathom::engine
