// Rotation of one pair on the device, bit for bit as RotateRow. Device code only.
#pragma once

#include <cuda_runtime.h>

namespace fathom::kernels {

// {cosine, sine} of fl32(position * frequency).
__device__ __forceinline__ float2 RopeAngle(int32_t position, float frequency) {
  float2 angle;
  sincosf(__fmul_rn(static_cast<float>(position), frequency), &angle.y, &angle.x);
  return angle;
}

__device__ __forceinline__ float2 RotatePair(float2 x, float2 angle) {
  return {__fsub_rn(__fmul_rn(x.x, angle.x), __fmul_rn(x.y, angle.y)),
          __fadd_rn(__fmul_rn(x.x, angle.y), __fmul_rn(x.y, angle.x))};
}

}  // namespace fathom::kernels
