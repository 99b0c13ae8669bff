// The weights on a GPU: matrices in tiles for the tensor cores, the rest as the checkpoint has it.
// Made once from a checkpoint; immutable; owns its memory; the device outlives it.
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

// Rows [begin, begin + rows) of a matrix, from a multiple of 128 on.
constexpr kernels::TiledMatrix RowsOf(const kernels::TiledMatrix& whole, int64_t begin,
                                      int64_t rows) {
  kernels::TiledMatrix part = whole;
  part.rows = rows;
  part.tiles +=
      begin / kernels::kTileMatrixRows * whole.col_blocks() * kernels::TileMatrixBytes(whole.kind);
  if (whole.scales != nullptr) part.scales += begin / 128 * whole.col_blocks();
  return part;
}

// Columns [begin, begin + cols) of a matrix, from a multiple of 128 on.
constexpr kernels::TiledMatrix ColumnsOf(const kernels::TiledMatrix& whole, int64_t begin,
                                         int64_t cols) {
  kernels::TiledMatrix part = whole;
  part.cols = cols;
  part.matrix_cols = whole.cols;
  const int64_t block = begin / kernels::TileMatrixCols(whole.kind);
  part.tiles += block * kernels::TileMatrixBytes(whole.kind);
  if (whole.scales != nullptr) part.scales += block;
  return part;
}

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
  device::Buffer buffer;  // all of it
};

// Reads the weights of `source` to the device, or (`dummy`) makes values there. kOutOfMemory,
// before anything is read, when the device has no room for them and a workspace; kBadModel as
// LoadWeights; kDevice. `num_gpus`: that are loaded at the same time.
Result<std::unique_ptr<CudaWeights>> MakeCudaWeights(const config::ModelConfig& config,
                                                     const checkpoint::TensorSource& source,
                                                     bool dummy, int64_t workspace_bytes,
                                                     int num_gpus, device::Device& device);

}  // namespace fathom::model
