// The weights on a GPU: matrices in tiles for the tensor cores, the rest as the checkpoint has it.
// Made once from weights in host memory; immutable; owns its memory; the device outlives it.
#pragma once

#include <cuda_bf16.h>

#include <memory>
#include <vector>

#include "base/status.h"
#include "device/device.h"
#include "kernels/gemm/weight_tiles.h"
#include "kernels/grouped_gemm/experts_cuda.h"
#include "model/weights.h"

namespace fathom::model {

struct CudaHyperConnection {
  const float* fn = nullptr;
  const float* base = nullptr;
  const float* scale = nullptr;
};

struct CudaCompressorWeights {
  kernels::TiledMatrix wkv, wgate;
  const float* ape = nullptr;
  const __nv_bfloat16* norm = nullptr;
};

struct CudaBlockWeights {
  CudaHyperConnection hc_attn, hc_ffn;
  const __nv_bfloat16* attn_norm = nullptr;
  const __nv_bfloat16* ffn_norm = nullptr;
  kernels::TiledMatrix wq_a, wq_b, wkv, wo_a, wo_b;
  const __nv_bfloat16* q_norm = nullptr;
  const __nv_bfloat16* kv_norm = nullptr;
  const float* sink = nullptr;
  CudaCompressorWeights compressor, index_compressor;
  kernels::TiledMatrix index_wq_b, index_proj;
  kernels::TiledMatrix gate;
  const float* bias = nullptr;
  const int32_t* tid2eid = nullptr;
  kernels::ExpertTiles routed, shared;
};

struct CudaWeights {
  const __nv_bfloat16* embed = nullptr;
  kernels::TiledMatrix head;
  const __nv_bfloat16* norm = nullptr;
  CudaHyperConnection hc_head;
  std::vector<CudaBlockWeights> layers;
  std::vector<device::Buffer> buffers;
  int64_t bytes() const;
};

// kOutOfMemory says what is needed. `dummy`: host's memory is not read; values are made on the GPU.
Result<std::unique_ptr<CudaWeights>> MakeCudaWeights(const config::ModelConfig& config,
                                                     const Weights& host, bool dummy,
                                                     device::Device& device);

}  // namespace fathom::model
