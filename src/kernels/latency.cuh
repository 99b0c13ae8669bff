// What kernels of few tokens share, whose time is that of instructions and exchanges that happen
// once. Device code only.
#pragma once

#include <cuda_runtime.h>

namespace fathom::kernels {

// The sums of kValues values over a warp, a power of two of them: that of value i on the
// 32 / kValues lanes from i * 32 / kValues on.
template <int kValues>
__device__ __forceinline__ float TransposedSum(float (&v)[kValues]) {
  int stride = 16;
#pragma unroll
  for (int n = kValues / 2; n > 0; n /= 2, stride /= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(stride)) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float kept = upper ? v[i + n] : v[i], sent = upper ? v[i] : v[i + n];
      v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, stride);
    }
  }
  for (; stride > 0; stride /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], stride);
  return v[0];
}

}  // namespace fathom::kernels
