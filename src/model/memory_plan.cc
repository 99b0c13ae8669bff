#include "model/memory_plan.h"

#include <algorithm>
#include <utility>

#include "kernels/collective/peer_view.h"
#include "kv_cache/pool_plan.h"

namespace fathom::model {
namespace {

using checkpoint::Shard;
using config::ModelConfig;
using config::ParallelConfig;
using kv_cache::PoolDemand;

// What a GPU's memory holds of a shard: expert ids of 32 bits, no draft blocks, and of FP4 experts
// the largest scale of each row.
std::vector<checkpoint::PartBytes> WeightsOnGpu(std::vector<checkpoint::PartBytes> parts,
                                                const Shard& shard) {
  const ModelConfig& c = shard.config;
  const int64_t expert_ids = int64_t{c.vocab_size} * c.num_experts_per_token;
  const int64_t expert_rows = 2 * shard.routed_up.size() + c.hidden_size;
  std::erase_if(parts, [](const checkpoint::PartBytes& part) { return part.name == "draft"; });
  for (checkpoint::PartBytes& part : parts) {
    if (part.name == "router") part.bytes -= c.num_hash_layers * expert_ids * 4;
    if (part.name == "experts" && c.expert_dtype == config::ExpertDType::kFp4) {
      part.bytes += c.num_layers * shard.experts.size() * expert_rows;
    }
  }
  return parts;
}

// A row for each sequence, and some for prompt log-probabilities.
int64_t LogitsBytes(const ModelConfig& config, const ModelLimits& limits) {
  constexpr int64_t kPromptBytes = int64_t{64} << 20;
  return int64_t{limits.max_num_seqs} * config.vocab_size * 4 + kPromptBytes;
}

PoolDemand DemandOf(const ModelConfig& config, const MemoryDemand& demand, int64_t max_model_len) {
  return {.max_num_seqs = demand.limits.max_num_seqs,
          .max_num_batched_tokens = demand.limits.max_batched_tokens,
          .max_model_len = max_model_len,
          .sliding_window = config.sliding_window,
          .prefix_cache = demand.prefix_cache};
}

// The least that serves one sequence of max_model_len beside the window pages and states of all.
int64_t LeastBytes(const kv_cache::KvLayout& layout, PoolDemand demand) {
  demand.prefix_cache = false;
  const int64_t blocks = kv_cache::NumBlocksFor(demand.max_model_len);
  return kv_cache::MaxUsefulBytes(layout, demand) -
         (demand.max_num_seqs - 1) * blocks * layout.block_bytes;
}

StageMemory PlanStage(const ModelConfig& config, const checkpoint::ShardSummary& summary,
                      const Shard& shard, const ParallelConfig& parallel,
                      const MemoryDemand& demand) {
  StageMemory stage;
  stage.weights = WeightsOnGpu(summary.Of(shard), shard);
  for (const checkpoint::PartBytes& part : stage.weights) stage.weight_bytes += part.bytes;
  stage.workspace_bytes = StepWorkspaceBytes(shard, parallel, demand.limits);
  if (shard.has_head) stage.logits_bytes = LogitsBytes(config, demand.limits);
  stage.kv_budget_bytes = static_cast<int64_t>(demand.memory_bytes * demand.utilization) -
                          stage.weight_bytes - stage.workspace_bytes - stage.logits_bytes -
                          kCudaBytes;
  stage.layout =
      kv_cache::MakeKvLayout(shard.config, config::Numerics::kOfficial, demand.index_dtype);
  return stage;
}

// What a group of so many ranks has of each other's memory besides what is shared.
double PacketBytes(int size) {
  return size > 1 ? static_cast<double>(kernels::MakePeerLayout(size, 0).bytes) : 0;
}

// The longest context that every stage has room for, in whole blocks; at least one block.
int64_t LongestContext(const ModelConfig& config, const MemoryPlan& plan,
                       const MemoryDemand& demand) {
  const PoolDemand most = DemandOf(config, demand, demand.limits.max_model_len);
  int64_t longest = most.max_model_len;
  for (const StageMemory& stage : plan.stages) {
    longest =
        std::min(longest, kv_cache::LongestSequence(stage.layout, most, stage.kv_budget_bytes));
  }
  return std::max(longest, std::min<int64_t>(most.max_model_len, kv_cache::kBlockTokens));
}

// Every stage takes as many of each as the one with fewest can.
Status TakePools(const PoolDemand& demand, MemoryPlan& plan) {
  kv_cache::PoolSizes least;
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const StageMemory& stage = plan.stages[i];
    ASSIGN_OR_RETURN(const kv_cache::PoolSizes pools,
                     kv_cache::PlanPools(stage.layout, demand, stage.kv_budget_bytes));
    if (i == 0) least = pools;
    least.num_blocks = std::min(least.num_blocks, pools.num_blocks);
    least.num_window_pages = std::min(least.num_window_pages, pools.num_window_pages);
    least.num_state_slots = std::min(least.num_state_slots, pools.num_state_slots);
    least.num_snapshots = std::min(least.num_snapshots, pools.num_snapshots);
  }
  for (StageMemory& stage : plan.stages) {
    stage.pools = least;
    stage.kv_bytes = kv_cache::PoolBytes(stage.layout, least);
  }
  plan.num_blocks = least.num_blocks;
  return OkStatus();
}

}  // namespace

int64_t MemoryPlan::NumRequests(int64_t num_tokens) const {
  if (!fits() || num_tokens > max_model_len) return 0;
  return std::min<int64_t>(max_num_seqs, num_blocks / kv_cache::NumBlocksFor(num_tokens));
}

int64_t StepWorkspaceBytes(const Shard& shard, const ParallelConfig& parallel,
                           const ModelLimits& limits) {
  const ModelConfig& c = shard.config;
  constexpr double kFp8 = 1 + 4.0 / 128;  // a value, and its share of an FP32 scale
  const int data_ranks = parallel.data_parallel_size, tensor_ranks = parallel.tensor_parallel_size;
  const double tokens = limits.max_batched_tokens, all_tokens = tokens * data_ranks;
  const double hidden = c.hidden_size, heads = 1.0 * c.head_dim * c.num_heads;
  const double grouped = 1.0 * c.o_groups * c.o_lora_rank * tensor_ranks;  // of all ranks
  const double row = hidden * (4 * 2 + 2 + kFp8 + 2)  // streams, input in two types, output
                     + c.q_lora_rank * (2 + kFp8) + c.head_dim * 2.0 +
                     4.0 * 4 * (c.head_dim + c.index_head_dim)  // compressors
                     + heads * (2 + 2) + grouped * kFp8 +
                     c.index_num_heads * (c.index_head_dim * 3.0 + 6) + c.index_topk * 4.0 +
                     c.num_experts * 4.0 + c.num_layers * c.num_experts_per_token * 4.0 + 3072;
  const double entries = static_cast<double>(limits.max_model_len) / 4 + 64;
  const double scores = std::min(tokens * entries * 4, 1.0 * (1 << 30));
  // Chosen experts' inputs, intermediates and outputs; a tile of each expert may be begun.
  const double inner = c.moe_intermediate_size;
  const double pairs = all_tokens * (c.num_experts_per_token + 1) + 8.0 * c.num_experts;
  const double experts = pairs * (hidden * (kFp8 + 2) + inner * kFp8);
  // With whole experts the tokens of all data ranks, and what comes back for its own: the shared
  // expert's and pairs'.
  const double returned = tokens * (c.num_experts_per_token + 1) * hidden * 2;
  const bool has_whole_experts = parallel.gpus_have_whole_experts();
  const double gathered = has_whole_experts ? all_tokens * hidden * kFp8 + returned : 0;
  const double packets =
      PacketBytes(tensor_ranks) + (has_whole_experts ? PacketBytes(parallel.stage_size()) : 0);
  constexpr double kAttentionParts = 34.0 * (1 << 20), kIndexLists = 22.5 * (1 << 20);
  return static_cast<int64_t>(tokens * row + scores + experts + gathered + packets +
                              kAttentionParts + kIndexLists);
}

Result<MemoryPlan> PlanMemory(const ModelConfig& config, const checkpoint::ShardSummary& summary,
                              const ParallelConfig& parallel, const MemoryDemand& demand) {
  MemoryPlan plan;
  plan.max_num_seqs = demand.limits.max_num_seqs;
  for (int stage = 0; stage < parallel.pipeline_parallel_size; ++stage) {
    // Where parts are uneven, the last ranks have the larger ones.
    const config::RankPlace fullest = {.tensor = parallel.tensor_parallel_size - 1,
                                       .data = parallel.data_parallel_size - 1,
                                       .pipeline = stage};
    ASSIGN_OR_RETURN(const Shard shard, checkpoint::MakeGpuShard(config, parallel, fullest));
    plan.stages.push_back(PlanStage(config, summary, shard, parallel, demand));
  }
  plan.max_model_len =
      demand.auto_model_len ? LongestContext(config, plan, demand) : demand.limits.max_model_len;
  const PoolDemand pools = DemandOf(config, demand, plan.max_model_len);
  for (const StageMemory& stage : plan.stages) {
    plan.missing_bytes =
        std::max(plan.missing_bytes, LeastBytes(stage.layout, pools) - stage.kv_budget_bytes);
  }
  if (plan.fits()) RETURN_IF_ERROR(TakePools(pools, plan));
  return plan;
}

}  // namespace fathom::model
