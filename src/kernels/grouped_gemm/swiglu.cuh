// What an expert does between its two products, for one value on the device.
#pragma once

#include "kernels/quantize/quantize.cuh"

namespace fathom::kernels {

// b(weight * silu(b(gate)) * b(up)) with gate at most `limit` and up within it; 0: no limit.
__device__ __forceinline__ float Intermediate(float gate, float up, float weight, float limit) {
  gate = RoundBf16(gate);
  up = RoundBf16(up);
  if (limit > 0) {
    up = fminf(fmaxf(up, -limit), limit);
    gate = fminf(gate, limit);
  }
  const float silu = __fdividef(gate, 1.0f + __expf(-gate));  // 2^-17 off at most, BF16's is 2^-9
  return RoundBf16(weight * (silu * up));
}

}  // namespace fathom::kernels
