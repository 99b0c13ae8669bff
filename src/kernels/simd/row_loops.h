// Loops over rows in plain C++ for the tables of simd.h: each source file that includes this one
// has the compiler put them on the vectors of its own instruction set. Internal linkage, and no
// call that could be linked from elsewhere.
#pragma once

#include <cstdint>

#include "base/float_types.h"

namespace fathom::kernels {
namespace {

#define FATHOM_ROW_INLINE inline __attribute__((always_inline))

FATHOM_ROW_INLINE uint32_t BitsOf(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}
FATHOM_ROW_INLINE float FloatOf(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}
FATHOM_ROW_INLINE float Magnitude(float x) { return FloatOf(BitsOf(x) & 0x7fffffffu); }

// BFloat16::Round.
FATHOM_ROW_INLINE uint32_t BFloat16Bits(float x) {
  const uint32_t u = BitsOf(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 | 0x40u) : rounded;
}

void FloatToBFloat16(const float* in, BFloat16* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i].bits = static_cast<uint16_t>(BFloat16Bits(in[i]));
}

void RoundToBFloat16Row(const float* in, float* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = FloatOf(BFloat16Bits(in[i]) << 16);
}

float MaxMagnitude(const float* x, int64_t size) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    for (int64_t l = 0; l < 16; ++l) {
      const float a = Magnitude(x[i + l]);
      lanes[l] = lanes[l] < a ? a : lanes[l];
    }
  }
  float max = 0;
  for (; i < size; ++i) max = max < Magnitude(x[i]) ? Magnitude(x[i]) : max;
  for (const float lane : lanes) max = max < lane ? lane : max;
  return max;
}

// The bits of the nearest e4m3 value's magnitude, at most 448.
FATHOM_ROW_INLINE uint32_t NearestFp8Magnitude(float x) {
  const float a = Magnitude(x);
  const uint32_t m = BitsOf(a > 448.0f ? 448.0f : a);
  const uint32_t normal = (m + 0x7ffffu + ((m >> 20) & 1u)) & 0xfff00000u;
  const uint32_t subnormal = BitsOf((FloatOf(m) + 0x1p14f) - 0x1p14f);
  return m < 0x3c800000u ? subnormal : normal;  // 2^-6
}

void RoundToFp8(const float* x, float scale, float* y, int64_t size) {
  const float inverse = 1.0f / scale;  // exact
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t sign = BitsOf(x[i]) & 0x80000000u;
    y[i] = FloatOf(NearestFp8Magnitude(x[i] * inverse) | sign) * scale;
  }
}

void Fp8Codes(const float* x, float scale, uint8_t* codes, int64_t size) {
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t sign = BitsOf(x[i]) >> 24 & 0x80u;
    const uint32_t m = NearestFp8Magnitude(x[i] * inverse);
    const uint32_t normal = (m >> 20) - (120u << 3);
    const uint32_t subnormal = BitsOf(FloatOf(m) + 0x1p14f) & 0xfu;
    codes[i] = static_cast<uint8_t>(sign | (m < 0x3c800000u ? subnormal : normal));
  }
}

// FloatToFloat4 of x / scale.
FATHOM_ROW_INLINE uint32_t Fp4Code(float x, float inverse) {
  const float a = Magnitude(x) * inverse;
  const uint32_t code = (a > 0.25f ? 1u : 0u) + (a >= 0.75f ? 1u : 0u) + (a > 1.25f ? 1u : 0u) +
                        (a >= 1.75f ? 1u : 0u) + (a > 2.5f ? 1u : 0u) + (a >= 3.5f ? 1u : 0u) +
                        (a > 5.0f ? 1u : 0u);
  return code | (BitsOf(x) >> 28 & 0x8u);
}

void Fp4Codes(const float* x, float scale, uint8_t* codes, int64_t size) {
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < size / 2; ++i) {
    codes[i] =
        static_cast<uint8_t>(Fp4Code(x[2 * i], inverse) | Fp4Code(x[2 * i + 1], inverse) << 4);
  }
}

}  // namespace
}  // namespace fathom::kernels
