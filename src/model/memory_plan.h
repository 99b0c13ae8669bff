// MemoryPlan: what a layout puts into the memory of each GPU, and what fits beside it. From the
// config alone; pure functions, any thread.
//
// All ranks of a pipeline stage hold about the same; a stage is planned by its fullest rank. The KV
// cache is of one data rank: its tensor ranks hold the same, and every stage has the same blocks of
// its own layers, so that the stage with least room decides.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/shard_summary.h"
#include "config/model_config.h"
#include "config/parallel_config.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/kv_layout.h"
#include "model/model.h"

namespace fathom::model {

struct MemoryDemand {
  double memory_bytes = 0;  // of one GPU
  double utilization = 0.9;
  ModelLimits limits;           // of a data rank; max_model_len is the most that is wanted
  bool auto_model_len = false;  // a shorter context will do
  bool prefix_cache = true;
  kv_cache::IndexKeyDType index_dtype = kv_cache::IndexKeyDType::kFp4;
};

struct StageMemory {
  std::vector<checkpoint::PartBytes> weights;  // on the GPU; those of draft blocks are not loaded
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;  // of a step of max_batched_tokens
  int64_t logits_bytes = 0;
  int64_t kv_budget_bytes = 0;  // what is left for the KV cache; below 0: weights alone do not fit
  kv_cache::KvLayout layout;
  kv_cache::PoolSizes pools;  // what is taken of it
  int64_t kv_bytes = 0;       // their bytes
};

struct MemoryPlan {
  std::vector<StageMemory> stages;
  int64_t max_model_len = 0;
  int max_num_seqs = 0;       // of each data rank
  int64_t num_blocks = 0;     // likewise
  int64_t missing_bytes = 0;  // on the fullest GPU, for one sequence of max_model_len; 0: it fits

  bool fits() const { return missing_bytes == 0; }
  int64_t num_tokens() const { return num_blocks * kv_cache::kBlockTokens; }
  // Of a request that is `num_tokens` long at its end.
  int64_t NumRequests(int64_t num_tokens) const;
};

// What CUDA takes of a GPU before anything is allocated, graphs included: a guess.
inline constexpr int64_t kCudaBytes = int64_t{1} << 30;

// kInvalidArgument: the model cannot be split so.
Result<MemoryPlan> PlanMemory(const config::ModelConfig& config,
                              const checkpoint::ShardSummary& summary,
                              const config::ParallelConfig& parallel, const MemoryDemand& demand);

// The scratch of a step on a GPU, within some percent of what is allocated, and what tensor ranks
// write into each other's memory. `shard` has the rank's own sizes; the experts see the tokens of
// all data ranks.
int64_t StepWorkspaceBytes(const checkpoint::Shard& shard, const config::ParallelConfig& parallel,
                           const ModelLimits& limits);

}  // namespace fathom::model
