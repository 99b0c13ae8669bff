// BF16, FP8 e4m3fn, FP4 e2m1 and ue8m0 as storage types, with their exact conversions. The rounding
// rules are those of the model's specification: nearest even; FP8 and FP4 clamp, never NaN or
// infinity.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace fathom {

struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) : bits(Round(value)) {}
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }

  // Nearest even; a NaN stays one.
  static uint16_t Round(float value) {
    const auto u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
};
static_assert(sizeof(BFloat16) == 2);

inline float RoundToBFloat16(float value) { return static_cast<float>(BFloat16(value)); }

// e4m3fn: codes 0x7f and 0xff are NaN; the largest finite value is 448.
inline float Float8ToFloat(uint8_t code) {
  const uint32_t sign = uint32_t{code} >> 7 << 31;
  const uint32_t exponent = (code >> 3) & 0xfu;
  const uint32_t mantissa = code & 0x7u;
  if (exponent == 0xfu && mantissa == 0x7u) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0) {  // subnormal: mantissa * 2^-9
    return std::bit_cast<float>(sign |
                                std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-9f));
  }
  return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

// Nearest even of a finite value, clamped to +-448; subnormals kept.
inline uint8_t FloatToFloat8(float value) {
  const auto u = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>(u >> 24 & 0x80u);
  const float magnitude = std::fmin(std::fabs(value), 448.0f);
  if (magnitude < 0x1p-6f) {  // subnormal: adding 2^14 rounds to a multiple of 2^-9
    const float shifted = magnitude + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) & 0xfu));
  }
  uint32_t m = std::bit_cast<uint32_t>(magnitude);
  m += 0x7ffffu + ((m >> 20) & 1u);
  return static_cast<uint8_t>(sign | (((m >> 23) - 120u) << 3) | ((m >> 20) & 0x7u));
}

// e2m1: codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign.
inline float Float4ToFloat(uint8_t code) {
  constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float magnitude = kValues[code & 0x7u];
  return (code & 0x8u) != 0 ? -magnitude : magnitude;
}

// Nearest even (0.25 -> 0, 0.75 -> 1, 2.5 -> 2, 5 -> 4), clamped to +-6.
inline uint8_t FloatToFloat4(float value) {
  const float a = std::fabs(value);
  const uint8_t sign = std::signbit(value) ? 8 : 0;
  uint8_t code = 7;
  if (a <= 0.25f) {
    code = 0;
  } else if (a < 0.75f) {
    code = 1;
  } else if (a <= 1.25f) {
    code = 2;
  } else if (a < 1.75f) {
    code = 3;
  } else if (a <= 2.5f) {
    code = 4;
  } else if (a < 3.5f) {
    code = 5;
  } else if (a <= 5.0f) {
    code = 6;
  }
  return static_cast<uint8_t>(sign | code);
}

// ue8m0: 2^(byte - 127). 255 is invalid in a file and never written; byte 0 is the subnormal
// 2^-127.
inline float Ue8m0ToFloat(uint8_t byte) {
  return std::bit_cast<float>(byte == 0 ? 0x00400000u : uint32_t{byte} << 23);
}

// The byte of 2^ceil(log2(value)) for a positive normal value.
inline uint8_t CeilToUe8m0(float value) {
  const auto u = std::bit_cast<uint32_t>(value);
  return static_cast<uint8_t>((u >> 23) + ((u & 0x7fffffu) != 0 ? 1u : 0u));
}

}  // namespace fathom
