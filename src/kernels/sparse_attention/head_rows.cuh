// A head's row of 512 on its way into attention and out of it. Device code only.
#pragma once

#include "kernels/quantize/quantize.cuh"
#include "kernels/rope/rope.cuh"
#include "kernels/sparse_attention/token_keys.cuh"

namespace fathom::kernels {

inline constexpr float kLog2E = 1.4426950408889634f;

// What the sink adds to the sum of p, for the maximum of these (log2 units). Here and wherever a
// head's blocks may be of 8, 16 or 32 heads, a product that is added to something is fused with
// that, or not, by name: left to the compiler it is fused in one of these kernels and not in
// another, and a rank's head would not have the bits that one GPU gives it.
__device__ __forceinline__ float SinkWeight(float sink, float max) {
  return exp2f(fmaf(sink, kLog2E, -max));
}

// b(a * b) of two pairs.
__device__ __forceinline__ uint32_t MultiplyBf16(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Sums of a warp's lanes, of which each has kRuns: what is left to add up over 32 / kRuns lanes,
// in the order in which a warp adds up.
template <int kRuns>
__device__ __forceinline__ float SumOfRuns(float (&sums)[kRuns]) {
#pragma unroll
  for (int n = kRuns / 2; n > 0; n /= 2) {
#pragma unroll
    for (int r = 0; r < n; ++r) sums[r] += sums[r + n];
  }
  return sums[0];
}

// What b(head norm) multiplies pairs with.
__device__ __forceinline__ uint32_t HeadNormScale(float sum_of_squares, float eps) {
  const float mean = RoundBf16(sum_of_squares / static_cast<float>(kHeadDim));
  const float scale = 1.0f / sqrtf(RoundBf16(mean + eps));
  return PackBf16(scale, scale);
}

// Of a row that 32 / kRuns lanes hold, kRuns times 8 pairs a lane. The order of the sum is that of
// a warp: a lane's r-th run is what its lane l + 32 / kRuns * r would hold.
template <int kRuns>
__device__ __forceinline__ float SumOfSquares(const uint32_t (&row)[kRuns][8]) {
  float sums[kRuns] = {};
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
#pragma unroll
    for (const uint32_t pair : row[r]) {
      const float2 squares = UnpackBf16(MultiplyBf16(pair, pair));
      sums[r] += squares.x + squares.y;
    }
  }
  return WarpSum<32 / kRuns>(SumOfRuns(sums));
}
template <int kRuns>
__device__ __forceinline__ void ScaleHead(uint32_t (&row)[kRuns][8], uint32_t scales) {
#pragma unroll
  for (auto& run : row) {
#pragma unroll
    for (uint32_t& pair : run) pair = MultiplyBf16(pair, scales);
  }
}
// b(head norm) of such a row.
template <int kRuns>
__device__ __forceinline__ void NormHead(uint32_t (&row)[kRuns][8], float eps) {
  ScaleHead(row, HeadNormScale(SumOfSquares(row), eps));
}
template <int kRuns>
__device__ __forceinline__ void NormHeads(uint32_t (&rows)[1][kRuns][8], float eps) {
  NormHead(rows[0], eps);
}
// Of two rows: half of the lanes make the scale of each.
template <int kRuns>
__device__ __forceinline__ void NormHeads(uint32_t (&rows)[2][kRuns][8], float eps) {
  constexpr int kHalf = 16 / kRuns;
  const float sums[2] = {SumOfSquares(rows[0]), SumOfSquares(rows[1])};
  const bool second = threadIdx.x / kHalf % 2 != 0;
  const uint32_t own = HeadNormScale(second ? sums[1] : sums[0], eps);
  const uint32_t other = __shfl_xor_sync(0xffffffffu, own, kHalf);
  ScaleHead(rows[0], second ? other : own);
  ScaleHead(rows[1], second ? own : other);
}

// b(rope) of a pair.
__device__ __forceinline__ uint32_t RotateBf16(uint32_t pair, float2 angle) {
  const float2 x = RotatePair(UnpackBf16(pair), angle);
  return PackBf16(x.x, x.y);
}

// b(inverse rope(b(o))) of columns `column` and + 1.
__device__ __forceinline__ uint32_t FinishPair(float2 o, int column, const float2* angles) {
  const uint32_t pair = PackBf16(o.x, o.y);
  if (column < kNumFp8) return pair;
  const float2 angle = angles[(column - kNumFp8) / 2];
  return RotateBf16(pair, {angle.x, -angle.y});
}

}  // namespace fathom::kernels
