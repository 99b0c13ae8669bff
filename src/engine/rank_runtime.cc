#include "engine/rank_runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "runtime/kv_cache.h"

namespace fathom::engine {
namespace {

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

// So that no step waits for it; each rank on a thread.
void CaptureDecodes(const std::vector<runtime::LocalExecutor::Rank>& ranks) {
  const SystemClock clock;
  const TimePoint begin = clock.Now();
  std::atomic<int> num_captured = 0;
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) {
    threads.emplace_back([&] { num_captured = rank.runner->CaptureDecodes(); });
  }
  for (std::thread& thread : threads) thread.join();
  if (num_captured == 0) return;
  LogInfo("captured {} steps of decodes in {:.2f} s", num_captured.load(),
          Seconds(clock.Now() - begin));
}

}  // namespace

int MaxLogitsRows(const EngineOptions& options) {
  constexpr int64_t kPromptLogitsBytes = int64_t{64} << 20;
  const int64_t row_bytes = int64_t{options.vocab_size} * static_cast<int64_t>(sizeof(float));
  const int64_t rows = options.limits.max_num_seqs + kPromptLogitsBytes / row_bytes;
  return static_cast<int>(std::min<int64_t>(rows, options.limits.max_batched_tokens));
}

Status CheckOptions(const EngineOptions& options) {
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

std::vector<RankMemory> MemoryOf(const EngineOptions& options,
                                 const std::vector<EngineRank>& ranks) {
  std::vector<RankMemory> memory;
  for (const EngineRank& rank : ranks) {
    memory.push_back(MemoryOf(options, rank.layout, *rank.device, static_cast<int>(ranks.size())));
  }
  return memory;
}

Result<std::unique_ptr<runtime::LocalExecutor>> MakeLocalExecutor(
    const EngineOptions& options, const KvPlan& plan, const std::vector<EngineRank>& ranks,
    int max_in_flight, std::unique_ptr<kv_store::DiskStore> disk) {
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
  CaptureDecodes(local);
  return std::make_unique<runtime::LocalExecutor>(options.parallel, std::move(local),
                                                  max_in_flight);
}

StepLimits StepLimitsOf(const EngineOptions& options, const KvPlan& plan) {
  return {.num_data_ranks = options.parallel.data_parallel_size,
          .vocab_size = options.vocab_size,
          .max_num_seqs = options.limits.max_num_seqs,
          .max_num_batched_tokens = options.limits.max_batched_tokens,
          .max_logits_rows = MaxLogitsRows(options),
          .max_model_len = plan.max_model_len,
          .sliding_window = options.sliding_window,
          .experts_per_token = options.num_layers * options.num_experts_per_token,
          .pools = plan.pools,
          .host = plan.host};
}

}  // namespace fathom::engine
