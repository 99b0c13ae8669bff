// The input products of a step of one token: several products of the same 4,096 columns. Their
// weights arrive while the boundary before them runs: a block has a row tile and eight column
// blocks in shared memory at once, no ring, and the blocks of a row tile, a cluster or half of one,
// add up their sums. Where there is no room for all row tiles, the first clusters take the last
// ones when they have multiplied their own.
#pragma once

#include "kernels/gemm/gemm_cuda.h"

namespace fathom::kernels {

// Whether there is a kernel for these products.
bool AreInputAlone(const CudaGemmParams& params);

// Such products, which Launch of gemm_cuda.h has checked.
void LaunchInputAlone(const CudaGemmParams& params, device::Stream& stream);

}  // namespace fathom::kernels
