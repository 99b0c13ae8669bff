// A head's row of 512 on its way into attention and out of it. Device code only.
#pragma once

#include "kernels/quantize/quantize.cuh"
#include "kernels/rope/rope.cuh"
#include "kernels/sparse_attention/token_keys.cuh"

namespace fathom::kernels {

inline constexpr float kLog2E = 1.4426950408889634f;

// A head row on its way in: b(head norm), then rope. Lane l holds columns 8 l .. and 256 + 8 l ..,
// packed; lanes from 24 the angles of theirs.
__device__ __forceinline__ void NormAndRotate(uint4 (&row)[2], float eps, const float2 (&angles)[4],
                                              int lane) {
  float2 x[8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    x[4 * half] = UnpackBf16(row[half].x), x[4 * half + 1] = UnpackBf16(row[half].y);
    x[4 * half + 2] = UnpackBf16(row[half].z), x[4 * half + 3] = UnpackBf16(row[half].w);
  }
  float sum = 0;
#pragma unroll
  for (const float2& v : x) sum += RoundBf16(v.x * v.x) + RoundBf16(v.y * v.y);
  const float mean = RoundBf16(WarpSum(sum) / static_cast<float>(kHeadDim));
  const float scale = RoundBf16(1.0f / sqrtf(RoundBf16(mean + eps)));
#pragma unroll
  for (float2& v : x) v = {RoundBf16(v.x * scale), RoundBf16(v.y * scale)};
  if (lane >= 24) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 + i] = RotatePair(x[4 + i], angles[i]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2* v = x + 4 * half;
    row[half] = {PackBf16(v[0].x, v[0].y), PackBf16(v[1].x, v[1].y), PackBf16(v[2].x, v[2].y),
                 PackBf16(v[3].x, v[3].y)};
  }
}

// b(inverse rope(b(o))) of columns `column` and + 1.
__device__ __forceinline__ uint32_t FinishPair(float2 o, int column, const float2* angles) {
  if (column < kNumFp8) return PackBf16(o.x, o.y);
  const float2 angle = angles[(column - kNumFp8) / 2];
  const float2 y = RotatePair({RoundBf16(o.x), RoundBf16(o.y)}, {angle.x, -angle.y});
  return PackBf16(y.x, y.y);
}

}  // namespace fathom::kernels
