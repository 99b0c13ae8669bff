// FP8 and power-of-two scales on the device, bit for bit as quantize.h.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace fathom::kernels {

inline constexpr float kFp8Floor = 1e-4f;

// 2^(byte - 127); byte 0 is the subnormal 2^-127.
__device__ inline float ScaleOf(uint32_t byte) {
  return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}
// The byte of 2^ceil(log2(x)) for a positive normal x.
__device__ inline uint32_t CeilToScaleByte(float x) {
  const uint32_t u = __float_as_uint(x);
  return (u >> 23) + ((u & 0x7fffffu) != 0 ? 1u : 0u);
}
// The scale byte of an FP8 block whose largest magnitude is `largest`.
__device__ inline uint32_t Fp8ScaleByte(float largest) {
  return CeilToScaleByte(fmaxf(largest, kFp8Floor) * (1.0f / 448.0f));
}
// 1 / ScaleOf(byte), exact for the bytes that Fp8ScaleByte gives.
__device__ inline float InverseScaleOf(uint32_t byte) {
  return __uint_as_float((254u - byte) << 23);
}
// Two codes, the first in the low byte; magnitudes of at most 448 after the division by the scale.
__device__ inline uint16_t Fp8Pair(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}

__device__ inline float WarpMax(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

}  // namespace fathom::kernels
