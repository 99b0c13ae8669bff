// Shard: what of a checkpoint one rank holds, and the config that it computes with. Heads, output
// groups, the shared expert and the head's vocabulary are split over tensor ranks; routed experts
// over all ranks of a stage, by expert or by intermediate size; layers over stages. All else is
// replicated. Values; any thread.
//
// Quantized matrices are cut at whole blocks of 128, so that codes and scales stay what they are.
// Where the parts do not come out even, some ranks have one block less, or none.
#pragma once

#include <memory>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "config/model_config.h"
#include "config/parallel_config.h"

namespace fathom::checkpoint {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

struct Shard {
  // The rank's own sizes: num_heads, o_groups, moe_intermediate_size (of its routed experts),
  // layers and their kinds, no drafts where there are several stages. The rest is the model's.
  config::ModelConfig config;
  Range layers;               // of the model
  Range groups;               // output groups, with their heads
  Range experts;              // routed experts that it holds, whole or in part
  Range intermediate;         // of each of them
  Range shared_intermediate;  // of the shared expert
  Range vocabulary;           // rows of the head
  bool has_embedding = true;  // first stage
  bool has_head = true;       // last stage; with the final norm and mixing
};

// kInvalidArgument: more stages than layers, or more ranks than experts to give out whole.
Result<Shard> MakeShard(const config::ModelConfig& config, const config::ParallelConfig& parallel,
                        const config::RankPlace& place);

// The rows of the head that a tensor rank holds.
Range HeadRows(const config::ModelConfig& config, int tensor_rank, int tensor_size);

// The shard's tensors, layers numbered from 0, read out of `whole`, which outlives it.
std::unique_ptr<TensorSource> MakeShardedSource(const TensorSource& whole,
                                                const config::ModelConfig& config,
                                                const Shard& shard);

}  // namespace fathom::checkpoint
