// As output_batch_cuda.h, of up to 16 tokens on one of eight ranks of Pro: each has few rows of the
// second product, and gathers the first one's output before it. Lets its successor start before it
// waits.
#pragma once

#include "kernels/gemm/gemm_cuda.h"

namespace fathom::kernels {

struct CudaOutputRowsParams {
  GemmProblem product;  // kBf16
  int num_tokens = 0;
};

// Whether there is a kernel for these shapes of few rows (CudaGemmParams), of which the first
// product's is output_batch_cuda.h's.
bool HaveRowsProducts(const TiledMatrix& grouped, const TiledMatrix& rows, int64_t num_tokens);

void Launch(const CudaOutputRowsParams& params, device::Stream& stream);

}  // namespace fathom::kernels
