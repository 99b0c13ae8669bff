// The Hadamard rotation of index_vector.h on the device, the same sums in the same order: one warp
// a vector, lane l holding values 4 * l .., or eight lanes, each 16 values. Device code only.
#pragma once

#include "kernels/quantize/quantize.cuh"

namespace fathom::kernels {

__device__ __forceinline__ void Butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

__device__ __forceinline__ void RotateIndexVectorWarp(float (&x)[4], int lane) {
  Butterfly(x[0], x[1]);
  Butterfly(x[2], x[3]);
  Butterfly(x[0], x[2]);
  Butterfly(x[1], x[3]);
#pragma unroll
  for (int half = 1; half < 32; half *= 2) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float other = __shfl_xor_sync(0xffffffffu, x[k], half);
      x[k] = (lane & half) != 0 ? other - x[k] : x[k] + other;
    }
  }
  const float scale = 1.0f / sqrtf(128.0f);
#pragma unroll
  for (int k = 0; k < 4; ++k) x[k] = RoundBf16(x[k] * scale);
}

// Of the eight lanes 8 * (lane / 8) ..
__device__ __forceinline__ void RotateIndexVector(float (&x)[16], int lane) {
#pragma unroll
  for (int half = 1; half < 16; half *= 2) {
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      if ((k & half) == 0) Butterfly(x[k], x[k + half]);
    }
  }
#pragma unroll
  for (int half = 1; half < 8; half *= 2) {
    const float sign = (lane & half) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (float& v : x) v = fmaf(sign, v, __shfl_xor_sync(0xffffffffu, v, half));
  }
  const float scale = 1.0f / sqrtf(128.0f);
#pragma unroll
  for (int k = 0; k < 16; k += 2) {
    const float2 pair = UnpackBf16(PackBf16(x[k] * scale, x[k + 1] * scale));
    x[k] = pair.x, x[k + 1] = pair.y;
  }
}

}  // namespace fathom::kernels
