// Shard: what of a checkpoint one rank holds, and the config that it computes with. The rows of
// wq_b and wo_a (heads, in whole output groups), wo_b, the shared expert and the head are split
// over tensor ranks; routed experts over all ranks of a stage, by expert or by rows; layers over
// stages. All else is replicated. Values; any thread.
//
// No rank has a part of a sum, so that a model gives the same bits on any number of ranks: what a
// product reads is gathered before it (but for one that has the parts of one GPU: docs/kernels.md).
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

inline constexpr int64_t kQuantizedRows = 128;  // under one scale
inline constexpr int64_t kVocabularyRows = 64;  // of a tile of the head

// The part of [0, total) that is the i-th of `parts`, cut at multiples of `unit`.
Range Part(int64_t total, int64_t unit, int i, int parts);

struct Shard {
  // The rank's own sizes: num_heads, o_groups, layers and their kinds; no drafts where there are
  // several stages. The rest is the model's.
  config::ModelConfig config;
  Range layers;       // of the model
  Range groups;       // output groups, with their heads
  Range outputs;      // rows of wo_b
  Range experts;      // routed experts that it holds, whole or in part
  Range routed_up;    // rows of their w1 and w3
  Range routed_down;  // rows of their w2
  Range shared_up;    // rows of the shared expert's w1 and w3
  Range shared_down;  // rows of its w2
  Range vocabulary;   // rows of the head
  // All of attention's rows are there, not only those of the groups and outputs above.
  bool whole_attention = false;
  bool has_embedding = true;  // first stage
  bool has_head = true;       // last stage; with the final norm and mixing
};

// kInvalidArgument: more stages than layers, or more ranks than experts to give out whole.
Result<Shard> MakeShard(const config::ModelConfig& config, const config::ParallelConfig& parallel,
                        const config::RankPlace& place);

// A rank's on a GPU. Data ranks hold whole experts with or without enable_expert_parallel, and
// beside whole routed experts a tensor rank has all of the shared one. Without them it holds the
// rows of attention that are other ranks', too, with which it runs all heads of its share of a
// prompt's tokens (model/token_shares.h); not where they would take more than
// kMaxOthersAttentionBytes, or a rank has no heads of its own. As many bytes on every rank, so all
// do alike.
inline constexpr int64_t kMaxOthersAttentionBytes = int64_t{4} << 30;
Result<Shard> MakeGpuShard(const config::ModelConfig& config,
                           const config::ParallelConfig& parallel, const config::RankPlace& place);

// The shard's tensors, layers numbered from 0, read out of `whole`, which outlives it.
std::unique_ptr<TensorSource> MakeShardedSource(const TensorSource& whole,
                                                const config::ModelConfig& config,
                                                const Shard& shard);

}  // namespace fathom::checkpoint
