// Rounding and quantization of single values on the device, bit for bit as base/float_types.h and
// quantize.h do them. Device code only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace fathom::kernels {

// b(): the value that BF16 holds.
__device__ __forceinline__ float RoundBf16(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}
// Two values as packed BF16, the first in the low half.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ float2 UnpackBf16(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ uint4 PackEight(const float (&v)[8]) {
  return {PackBf16(v[0], v[1]), PackBf16(v[2], v[3]), PackBf16(v[4], v[5]), PackBf16(v[6], v[7])};
}
__device__ __forceinline__ void UnpackEight(const uint4& eight, float (&v)[8]) {
  const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = UnpackBf16(pairs[i]);
    v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
  }
}

// The ue8m0 byte of 2^ceil(log2(x)) for a positive normal x, 2^(byte - 127), and 2^(127 - byte) for
// bytes 1..253.
__device__ __forceinline__ uint32_t CeilUe8m0(float x) {
  const uint32_t u = __float_as_uint(x);
  return (u >> 23) + ((u & 0x7fffffu) != 0 ? 1u : 0u);
}
__device__ __forceinline__ float Ue8m0Value(uint32_t byte) {
  return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}
__device__ __forceinline__ float Ue8m0Inverse(uint32_t byte) {
  return __uint_as_float((254u - byte) << 23);
}

// The scale of a block whose largest magnitude is `max`.
__device__ __forceinline__ uint32_t Fp8Scale(float max) {
  return CeilUe8m0(__fmul_rn(fmaxf(max, 1e-4f), 1.0f / 448.0f));
}
__device__ __forceinline__ uint32_t Fp4Scale(float max) {
  return CeilUe8m0(__fmul_rn(fmaxf(max, 6 * 0x1p-126f), 1.0f / 6.0f));
}

// Two e4m3 codes, the first in the low byte; nearest even, clamped.
__device__ __forceinline__ uint32_t Fp8Codes(float low, float high) {
  return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, __NV_E4M3);
}
// Likewise four.
__device__ __forceinline__ uint32_t Fp8Codes(float a, float b, float c, float d) {
  return Fp8Codes(a, b) | Fp8Codes(c, d) << 16;
}
// The eight FP4 magnitudes times `unit`.
__device__ __forceinline__ uint2 Fp4CodesAsFp8(float unit) {
  return {Fp8Codes(0, 0.5f * unit, unit, 1.5f * unit),
          Fp8Codes(2 * unit, 3 * unit, 4 * unit, 6 * unit)};
}

// The e2m1 code; nearest even, clamped.
__device__ __forceinline__ uint32_t Fp4Code(float x) {
  const float a = fabsf(x);
  const uint32_t magnitude = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                             (a >= 3.5f) + (a > 5.0f);
  return magnitude | (__float_as_uint(x) >> 28 & 8u);
}

// Over the lanes of a warp in aligned groups of `kLanes`; the result is on every lane.
template <int kLanes = 32>
__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}
template <int kLanes = 32>
__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

__device__ __forceinline__ float2 Add(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ float4 Add(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

}  // namespace fathom::kernels
