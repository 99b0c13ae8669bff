#include "engine/make_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine/engine_loop.h"
#include "kv_cache/pool_plan.h"
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

}  // namespace

Result<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options,
                                           const kv_cache::KvLayout& layout,
                                           model::DeepSeekV4& model, device::Device& device,
                                           MetricsRegistry& metrics, const Clock& clock) {
  RETURN_IF_ERROR(CheckLimits(options));
  const kv_cache::PoolDemand demand{.max_num_seqs = options.limits.max_num_seqs,
                                    .max_num_batched_tokens = options.limits.max_batched_tokens,
                                    .max_model_len = options.limits.max_model_len,
                                    .sliding_window = options.sliding_window};
  const int64_t budget_bytes =
      options.kv_cache_bytes != 0
          ? options.kv_cache_bytes
          : runtime::AutomaticKvCacheBytes(kv_cache::MaxUsefulBytes(layout, demand), device,
                                           options.kv_memory_share);
  ASSIGN_OR_RETURN(const auto pools, kv_cache::PlanPools(layout, demand, budget_bytes));
  ASSIGN_OR_RETURN(auto kv_cache, runtime::KvCache::Make(layout, pools, device));
  LogInfo("KV cache: {} blocks of {} tokens, {} MiB", pools.num_blocks, kv_cache::kBlockTokens,
          kv_cache.bytes() >> 20);

  const int max_logits_rows = MaxLogitsRows(options);
  ASSIGN_OR_RETURN(auto runner, runtime::ModelRunner::Make({.vocab_size = options.vocab_size,
                                                            .max_logits_rows = max_logits_rows,
                                                            .eos_token_ids = options.eos_token_ids},
                                                           model, std::move(kv_cache), device));
  const scheduler::SchedulerOptions scheduler_options{
      .max_num_seqs = options.limits.max_num_seqs,
      .max_num_batched_tokens = options.limits.max_batched_tokens,
      .max_logits_rows = max_logits_rows,
      .max_model_len = options.limits.max_model_len,
      .vocab_size = options.vocab_size,
      .eos_token_ids = options.eos_token_ids,
      .cache = {.pools = pools, .sliding_window = options.sliding_window, .enabled = false},
      .decode_floor = options.decode_floor};
  const EngineLoopOptions loop_options{
      .model_name = options.model_name,
      .max_live_requests = options.limits.max_num_seqs + options.max_queue};
  return std::unique_ptr<Engine>(std::make_unique<EngineLoop>(loop_options, scheduler_options,
                                                              std::move(runner), metrics, clock));
}

}  // namespace fathom::engine
