// Weight products of many tokens (gemm_cuda.h says what they are): Launch of gemm_cuda.h comes here
// from kLargeGemmTokens tokens on, and for prefill, for all kinds of weights but FP4. A sum is
// taken in order of the columns, by one thread, whatever the number of tokens.
#pragma once

#include "kernels/gemm/gemm_cuda.h"

namespace fathom::kernels {

inline constexpr int64_t kLargeGemmTokens = 512;

// Of an item of LaunchNarrow's.
inline constexpr int kNarrowTokens = 64;

bool IsLarge(const CudaGemmParams& params);
void LaunchLarge(const CudaGemmParams& params, device::Stream& stream);
// Likewise, of FP8 and BF16 without mirrors: for few tokens, or few tiles of them.
void LaunchNarrow(const CudaGemmParams& params, device::Stream& stream);
// Likewise, of kFp8AsBf16.
void LaunchWidened(const CudaGemmParams& params, device::Stream& stream);

}  // namespace fathom::kernels
