#include "apps/fathom/memory_check.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/shard_summary.h"
#include "model/memory_plan.h"

namespace fathom::app {
namespace {

using model::StageMemory;

model::MemoryDemand DemandOf(const ModelOptions& options, const ModelSession& session) {
  const device::Device& device = session.device();
  const bool is_auto = options.max_model_len == 0;
  return {.memory_bytes = static_cast<double>(device.total_memory_bytes()),
          .utilization = options.gpu_memory_utilization,
          .limits = {.max_batched_tokens =
                         std::max(MaxBatchedTokens(options, device.kind()), options.max_num_seqs),
                     .max_num_seqs = options.max_num_seqs,
                     .max_model_len =
                         is_auto ? session.config.max_position_embeddings : options.max_model_len},
          .auto_model_len = is_auto,
          .prefix_cache = options.kv.prefix_caching,
          .index_dtype = session.index_dtype};
}

// Of the plan, what may not be so.
int64_t Guessed(const StageMemory& stage) {
  return model::kCudaBytes + stage.logits_bytes + stage.workspace_bytes / 10;
}

}  // namespace

Status CheckKvRoom(const ModelOptions& options, const ModelSession& session) {
  const bool has_others = session.nodes != nullptr && session.nodes->nodes().size() > 1;
  if (!session.on_gpu() || has_others || options.kv_cache_bytes > 0) return OkStatus();
  const model::MemoryDemand demand = DemandOf(options, session);
  ASSIGN_OR_RETURN(const model::MemoryPlan plan,
                   PlanMemory(session.config, checkpoint::ShardSummary(session.config),
                              options.parallel, demand));
  const StageMemory& fullest = *std::min_element(plan.stages.begin(), plan.stages.end(),
                                                 [](const StageMemory& a, const StageMemory& b) {
                                                   return a.kv_budget_bytes < b.kv_budget_bytes;
                                                 });
  if (plan.missing_bytes <= Guessed(fullest)) return OkStatus();
  const auto mib = [](double bytes) { return static_cast<int64_t>(bytes) >> 20; };
  return OutOfMemory(fmt::format(
      "{} has {} MiB, of which --gpu-memory-utilization {:.2f} allows {}; the weights take {}, the "
      "workspace of a step {} (less with a smaller --max-num-batched-tokens), and the KV cache for "
      "a context of {} tokens and --max-num-seqs {} {} at least: allow more, or see fathom plan",
      session.device().name(), mib(demand.memory_bytes), options.gpu_memory_utilization,
      mib(demand.memory_bytes * demand.utilization), mib(static_cast<double>(fullest.weight_bytes)),
      mib(static_cast<double>(fullest.workspace_bytes)), plan.max_model_len, options.max_num_seqs,
      mib(static_cast<double>(plan.missing_bytes + fullest.kv_budget_bytes))));
}

}  // namespace fathom::app
