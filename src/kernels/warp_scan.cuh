// Prefix sums over the lanes of a warp, all of which call. Device code only.
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

}  // namespace fathom::kernels
