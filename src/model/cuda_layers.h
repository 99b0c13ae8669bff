// The sub-layers of the model on a GPU, as operators on a workspace; attention.cc and moe.cc have
// the same on a CPU. Everything is enqueued.
#pragma once

#include "comm/cuda_expert_ranks.h"
#include "config/model_config.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "kv_cache/kv_layout.h"
#include "model/cuda_operators.h"
#include "model/cuda_recording.h"
#include "model/cuda_step.h"
#include "model/cuda_tensor_ranks.h"
#include "model/cuda_weights.h"
#include "model/cuda_workspace.h"

namespace fathom::model {

// What they share: the model's, which outlive a step.
struct CudaContext {
  const config::ModelConfig& config;
  const kv_cache::KvLayout& layout;
  kv_cache::IndexKeyDType index_dtype;
  const CudaWorkspace& ws;
  const CudaRecording& recording;
  CudaTensorRanks& ranks;
  comm::CudaExpertRanks* expert_ranks;  // null: no rank has whole experts
  CudaOperators& operators;
  bool is_first_stage = true;

  // A sub-layer's input, which the boundary before it leaves, of the step's own tokens.
  kernels::Bf16Tiles H(const CudaStep& step) const { return {ws.h, RowGroups(step)}; }
  kernels::Fp8Tiles HFp8(const CudaStep& step) const {
    const int64_t first = step.first_token;
    return {ws.h_fp8 + first / kernels::kTileRows * kernels::kTileBytes, ws.h_scales + first,
            TotalRowGroups(step)};
  }
};

// One layer of a step. `share`: CudaTensorRanks::ShareOf.
struct CudaLayer {
  const CudaStep& step;
  const CudaStep& share;
  int idx = 0;
  const CudaBlockWeights& w;
};

// What enqueues a sub-layer of one layer has at hand.
class CudaPass {
 protected:
  CudaPass(const CudaContext& context, const CudaLayer& layer)
      : c_(context.config),
        context_(context),
        ws_(context.ws),
        ranks_(context.ranks),
        operators_(context.operators),
        layer_(layer),
        step_(layer.step),
        share_(layer.share),
        w_(layer.w) {}

  const config::ModelConfig& c_;
  const CudaContext& context_;
  const CudaWorkspace& ws_;
  CudaTensorRanks& ranks_;
  CudaOperators& operators_;
  const CudaLayer& layer_;
  const CudaStep& step_;
  const CudaStep& share_;
  const CudaBlockWeights& w_;
};

// The output is ws.y.
void EnqueueAttention(const CudaContext& context, const CudaLayer& layer);
kernels::SublayerOutput EnqueueMoe(const CudaContext& context, const CudaLayer& layer);

}  // namespace fathom::model
