// gemm_cuda.h's products for up to kMaxStreamTokens tokens (weight_stream.cuh).
#pragma once

#include "kernels/gemm/gemm_cuda.h"

namespace fathom::kernels {

inline constexpr int64_t kMaxStreamTokens = 32;

// What Launch of gemm_cuda.h has checked.
void LaunchGemmStream(const CudaGemmParams& params, device::Stream& stream);

}  // namespace fathom::kernels
