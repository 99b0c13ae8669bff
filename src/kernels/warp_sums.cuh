// Sums over the lanes of a warp, all of which call. Device code only.
#pragma once

namespace fathom::kernels {

// Of the values up to this lane's, its own among them.
__device__ __forceinline__ int WarpInclusiveSum(int x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, x, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) x += other;
  }
  return x;
}

// Of the values before this lane's; `total` of all.
__device__ __forceinline__ int WarpExclusiveSum(int x, int& total) {
  const int sum = WarpInclusiveSum(x);
  total = __shfl_sync(0xffffffffu, sum, 31);
  return sum - x;
}

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
