// Shard: what of a checkpoint one rank holds, and the config that it computes with. The rows of
// wq_b and wo_a (heads, in whole output groups), wo_b, the shared expert and the head are split
// over tensor ranks; routed experts over all ranks of a stage, by expert or by rows; layers over
// stages. All else is replicated. Values; any thread.
//
// kRows: no rank has a part of a sum, so that a model gives the same bits on any number of ranks;
// what a product reads is gathered before it. kSums: wo_b and w2 are split by the columns that read
// what the rank itself computes, so that nothing is gathered, and the ranks add up their outputs:
// half the exchanges, for GPUs. Quantized matrices are cut at whole blocks of 128, so that codes
// and scales stay what they are. Where the parts do not come out even, some ranks have one block
// less, or none.
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

enum class Split { kRows, kSums };

struct Shard {
  Split split = Split::kRows;
  // The rank's own sizes: num_heads, o_groups, layers and their kinds; no drafts where there are
  // several stages; with kSums moe_intermediate_size, of its routed experts. The rest is the
  // model's.
  config::ModelConfig config;
  Range layers;               // of the model
  Range groups;               // output groups, with their heads
  Range outputs;              // rows of wo_b, and of the shared expert's w2; with kSums all
  Range experts;              // routed experts that it holds, whole or in part
  Range routed_up;            // rows of their w1 and w3; with kSums columns of w2, too
  Range routed_down;          // rows of their w2; with kSums all
  Range shared_up;            // rows of the shared expert's w1 and w3; with kSums as routed_up
  Range vocabulary;           // rows of the head
  bool has_embedding = true;  // first stage
  bool has_head = true;       // last stage; with the final norm and mixing
};

// kInvalidArgument: more stages than layers, or more ranks than experts to give out whole.
Result<Shard> MakeShard(const config::ModelConfig& config, const config::ParallelConfig& parallel,
                        const config::RankPlace& place, Split split = Split::kRows);

// The shard's tensors, layers numbered from 0, read out of `whole`, which outlives it.
std::unique_ptr<TensorSource> MakeShardedSource(const TensorSource& whole,
                                                const config::ModelConfig& config,
                                                const Shard& shard);

}  // namespace fathom::checkpoint
