// The Hadamard rotation of index_vector.h on the device, the same sums in the same order whether a
// vector lies on 32 lanes, four values each, or on eight. Device code only.
#pragma once

#include "kernels/quantize/quantize.cuh"

namespace fathom::kernels {

__device__ __forceinline__ void Butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// Of aligned groups of kLanes lanes, each lane with the next 128 / kLanes values.
template <int kLanes>
__device__ __forceinline__ void RotateIndexVector(float (&x)[128 / kLanes], int lane) {
  constexpr int kValues = 128 / kLanes;
#pragma unroll
  for (int half = 1; half < kValues; half *= 2) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      if ((k & half) == 0) Butterfly(x[k], x[k + half]);
    }
  }
#pragma unroll
  for (int half = 1; half < kLanes; half *= 2) {
    const float sign = (lane & half) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (float& v : x) v = fmaf(sign, v, __shfl_xor_sync(0xffffffffu, v, half));
  }
  const float scale = 1.0f / sqrtf(128.0f);
#pragma unroll
  for (int k = 0; k < kValues; k += 2) {
    const float2 pair = UnpackBf16(PackBf16(x[k] * scale, x[k + 1] * scale));
    x[k] = pair.x, x[k + 1] = pair.y;
  }
}

}  // namespace fathom::kernels
