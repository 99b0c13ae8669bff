#include "checkpoint/shard.h"

#include <fmt/format.h>

#include <algorithm>

namespace fathom::checkpoint {
namespace {

Status CheckSizes(const config::ModelConfig& c, const config::ParallelConfig& parallel) {
  if (parallel.pipeline_parallel_size > c.num_layers) {
    return InvalidArgument(
        fmt::format("--pipeline-parallel-size {} is more than the model's {} layers",
                    parallel.pipeline_parallel_size, c.num_layers));
  }
  const int stage_ranks = parallel.stage_size();
  if (parallel.enable_expert_parallel && stage_ranks > c.num_experts) {
    return InvalidArgument(
        fmt::format("--enable-expert-parallel gives {} experts to {} ranks: use fewer ranks",
                    c.num_experts, stage_ranks));
  }
  if (parallel.tensor_parallel_size > c.num_heads) {
    return InvalidArgument(
        fmt::format("--tensor-parallel-size {} is more than the model's {} heads",
                    parallel.tensor_parallel_size, c.num_heads));
  }
  if (parallel.tensor_parallel_size > 1 && c.o_groups > 1 && c.o_lora_rank % kQuantizedRows != 0) {
    return InvalidArgument(
        fmt::format("--tensor-parallel-size {}: the model's o_lora_rank {} is not in whole blocks "
                    "of 128: use 1",
                    parallel.tensor_parallel_size, c.o_lora_rank));
  }
  return OkStatus();
}

void CutConfig(const config::ModelConfig& whole, bool several_stages, Shard& shard) {
  config::ModelConfig& c = shard.config;
  c.num_layers = static_cast<int>(shard.layers.size());
  c.num_heads = static_cast<int>(shard.groups.size()) * (whole.num_heads / whole.o_groups);
  c.o_groups = static_cast<int>(shard.groups.size());
  const int first = static_cast<int>(shard.layers.begin);
  c.num_hash_layers = std::clamp(whole.num_hash_layers - first, 0, c.num_layers);
  if (!several_stages) return;
  c.compress_ratios.assign(whole.compress_ratios.begin() + shard.layers.begin,
                           whole.compress_ratios.begin() + shard.layers.end);
  c.draft = config::DraftKind::kNone;
  c.num_draft_blocks = 0;
}

// FP8: wq_b, wo_a, wo_b.
int64_t OthersAttentionBytes(const config::ModelConfig& c, const config::ParallelConfig& parallel,
                             const Shard& shard) {
  const int size = parallel.tensor_parallel_size;
  const int64_t heads = int64_t{c.num_heads} * c.head_dim;
  const int64_t grouped = int64_t{c.o_groups} * c.o_lora_rank;
  const int64_t layer =
      heads * c.q_lora_rank + grouped * (heads / c.o_groups) + grouped * c.hidden_size;
  return shard.layers.size() * layer * (size - 1) / size;
}

}  // namespace

Range Part(int64_t total, int64_t unit, int i, int parts) {
  const int64_t units = (total + unit - 1) / unit;
  return {std::min(total, units * i / parts * unit),
          std::min(total, units * (i + 1) / parts * unit)};
}

Result<Shard> MakeShard(const config::ModelConfig& config, const config::ParallelConfig& parallel,
                        const config::RankPlace& place) {
  RETURN_IF_ERROR(CheckSizes(config, parallel));
  const int tensor_size = parallel.tensor_parallel_size;
  const int stages = parallel.pipeline_parallel_size;
  const int stage_ranks = parallel.stage_size();
  const int stage_rank = place.data * tensor_size + place.tensor;
  const int64_t intermediate = config.moe_intermediate_size, hidden = config.hidden_size;
  Shard shard{.config = config,
              .layers = Part(config.num_layers, 1, place.pipeline, stages),
              .groups = Part(config.o_groups, 1, place.tensor, tensor_size),
              .outputs = Part(hidden, kQuantizedRows, place.tensor, tensor_size),
              .experts = {0, config.num_experts},
              .routed_up = {0, intermediate},
              .routed_down = {0, hidden},
              .shared_up = Part(intermediate, kQuantizedRows, place.tensor, tensor_size),
              .shared_down = Part(hidden, kQuantizedRows, place.tensor, tensor_size),
              .vocabulary = Part(config.vocab_size, kVocabularyRows, place.tensor, tensor_size),
              .has_embedding = place.pipeline == 0,
              .has_head = place.pipeline == stages - 1};
  if (parallel.enable_expert_parallel) {
    shard.experts = Part(config.num_experts, 1, stage_rank, stage_ranks);
  } else {
    shard.routed_up = Part(intermediate, kQuantizedRows, stage_rank, stage_ranks);
    shard.routed_down = Part(hidden, kQuantizedRows, stage_rank, stage_ranks);
  }
  CutConfig(config, stages > 1, shard);
  return shard;
}

Result<Shard> MakeGpuShard(const config::ModelConfig& config,
                           const config::ParallelConfig& parallel, const config::RankPlace& place) {
  config::ParallelConfig held = parallel;
  held.enable_expert_parallel = parallel.gpus_have_whole_experts();
  ASSIGN_OR_RETURN(Shard shard, MakeShard(config, held, place));
  if (held.enable_expert_parallel) {
    shard.shared_up = {0, config.moe_intermediate_size};
    shard.shared_down = {0, config.hidden_size};
  } else {
    const int64_t others = OthersAttentionBytes(config, parallel, shard);
    shard.whole_attention = parallel.tensor_parallel_size > 1 &&
                            parallel.tensor_parallel_size <= config.o_groups &&
                            others <= kMaxOthersAttentionBytes;
  }
  return shard;
}

}  // namespace fathom::checkpoint
