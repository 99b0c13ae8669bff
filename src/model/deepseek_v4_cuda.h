// DeepSeekV4 on one GPU: the same model as deepseek_v4.cc in official numerics, as fused kernels on
// weights in tiles. A decode step (every sequence one token, no recorder) is captured once a size
// as a CUDA graph and replayed.
//
// A tensor rank has its shard's config and weights (checkpoint/shard.h). Ranks complete what their
// products read and the sub-layers' outputs for each other, four times a layer; no sum is split, so
// any number of ranks has the bits of one, and all logits. A stage has some of the layers; the
// residual streams go from one to the next (cuda_stages.h). Ranks of several data ranks, and tensor
// ranks if so wished, have some of the experts whole, and run them on the tokens of all
// (kernels/collective/expert_exchange_cuda.h); a data rank that has no tokens runs a step of
// padding beside the others.
#pragma once

#include <memory>

#include "checkpoint/checkpoint.h"
#include "comm/cuda_group.h"
#include "model/model.h"

namespace fathom::model {

struct CudaModelOptions {
  bool enforce_eager = false;   // steps of decodes are never captured
  bool sync_operators = false;  // for tests: each is waited for, so that none overlap
  bool poison_scratch = false;  // for tests: what no step may rely on is NaN before each
  // Of the tensor ranks that this model is one of; null: there is one.
  std::shared_ptr<comm::CudaCollectives> collectives = nullptr;
  // Of the ranks that have whole experts, which it is one of; null: it has a part of each, or all.
  std::shared_ptr<comm::CudaExpertRanks> expert_ranks = nullptr;
  ModelRank rank = {};  // with a transport where there are several stages
};

// For the collectives of `num_ranks` tensor ranks; the whole model's config.
comm::CudaGroupOptions GroupOptions(const config::ModelConfig& config, const ModelLimits& limits,
                                    int num_ranks, int num_data_ranks = 1);

// Reads the weights from `source`, which is not needed afterwards. `dummy`: their values are not
// read but made on the GPU. kOutOfMemory says what is needed, before anything is read; kDevice in a
// build without CUDA code; kBadModel where the rank's part is not one that the kernels run, as
// checkpoint::MakeGpuShard's is.
Result<std::unique_ptr<DeepSeekV4>> MakeDeepSeekV4Cuda(const config::ModelConfig& config,
                                                       kv_cache::IndexKeyDType index_dtype,
                                                       const checkpoint::TensorSource& source,
                                                       bool dummy, const ModelLimits& limits,
                                                       device::Device& device,
                                                       const CudaModelOptions& options = {});

}  // namespace fathom::model
