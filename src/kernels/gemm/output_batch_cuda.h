// As output_alone_cuda.h, of 2 to 16 tokens on one of four ranks, of 2 to 8 on one of two. FP8
// passes between the products, as all blocks' reading FP32 sums of so many tokens would take longer
// than to add them up in clusters. The first one is also that of up to 16 tokens on ranks of few
// rows (output_rows_cuda.h).
#pragma once

#include "kernels/gemm/gemm_cuda.h"

namespace fathom::kernels {

// Lets its successor start before it waits.
struct CudaGroupedBatchParams {
  GemmProblem product;  // kFp8Tiles
  int num_tokens = 0;
  bool few_rows = false;  // CudaGemmParams': the order of the sums
};
struct CudaSumsBatchParams {
  GemmProblem product;  // kF32
  int num_tokens = 0;
  PeerExchange exchange;  // as CudaColumnSumsParams has it
};

// Whether there are kernels for these shapes and that many tokens.
bool HaveBatchProducts(const TiledMatrix& grouped, const TiledMatrix& sums, int64_t num_tokens);

void Launch(const CudaGroupedBatchParams& params, device::Stream& stream);
void Launch(const CudaSumsBatchParams& params, device::Stream& stream);

}  // namespace fathom::kernels
