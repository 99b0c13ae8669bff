// gemm_cuda.h's products of fewer tokens than gemm_large.h takes (weight_stream.cuh).
#pragma once

#include "kernels/gemm/gemm_cuda.h"

namespace fathom::kernels {

// What Launch of gemm_cuda.h has checked.
void LaunchGemmStream(const CudaGemmParams& params, device::Stream& stream);
void LaunchColumnSums(const CudaColumnSumsParams& params, device::Stream& stream);

}  // namespace fathom::kernels
