#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "kernels/simd/exp_constants.h"
#include "kernels/simd/row_loops.h"
#include "kernels/simd/simd.h"

namespace fathom::kernels {
namespace {

constexpr int kLanes = 16;

float ReduceLanes(std::array<float, kLanes>& lanes) {
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return lanes[0];
}

float WeightValue(const WeightMatrix& w, int64_t row, int64_t col) {
  const int64_t i = row * w.cols + col;
  switch (w.dtype) {
    case WeightDType::kF32:
      return reinterpret_cast<const float*>(w.data)[i];
    case WeightDType::kBF16:
      return static_cast<float>(reinterpret_cast<const BFloat16*>(w.data)[i]);
    case WeightDType::kFp8: {
      const uint8_t scale = w.scales[row / 128 * ((w.cols + 127) / 128) + col / 128];
      return Float8ToFloat(static_cast<uint8_t>(w.data[i])) * Ue8m0ToFloat(scale);
    }
    case WeightDType::kFp4:
      break;
  }
  const auto codes = static_cast<uint8_t>(w.data[i / 2]);
  const uint8_t code = i % 2 == 0 ? codes & 0xfu : codes >> 4;
  return Float4ToFloat(code) * Ue8m0ToFloat(w.scales[row * (w.cols / 32) + col / 32]);
}

float Dot(const float* a, const float* b, int64_t size) {
  std::array<float, kLanes> lanes{};
  for (int64_t k = 0; k < size; ++k) {
    float& lane = lanes[static_cast<size_t>(k % kLanes)];
    lane = std::fma(a[k], b[k], lane);
  }
  return ReduceLanes(lanes);
}

void RunDotBlock(const DotBlock& b) {
  for (int j = 0; j < b.n; ++j) {
    for (int i = 0; i < b.m; ++i) {
      std::array<float, kLanes> lanes{};
      for (int64_t k = 0; k < b.w.cols; ++k) {
        float& lane = lanes[static_cast<size_t>(k % kLanes)];
        lane = std::fma(b.x[i * b.x_stride + k], WeightValue(b.w, b.first_row + j, k), lane);
      }
      b.y[i * b.y_stride + j] = ReduceLanes(lanes);
    }
  }
}

void RunWeightedSum(const WeightedSum& s) {
  for (int i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < s.v.rows; ++j) {
      for (int64_t c = 0; c < s.v.cols; ++c) {
        float& o = s.o[i * s.o_stride + c];
        o = std::fma(s.p[i * s.p_stride + j], WeightValue(s.v, j, c), o);
      }
    }
  }
}

void BFloat16ToFloat(const BFloat16* in, float* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = static_cast<float>(in[i]);
}

void Fp8ToFloat(const uint8_t* codes, float scale, float* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = Float8ToFloat(codes[i]) * scale;
}

void Fp4ToFloat(const uint8_t* codes, float scale, float* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const uint8_t code = i % 2 == 0 ? codes[i / 2] & 0xfu : codes[i / 2] >> 4;
    out[i] = Float4ToFloat(code) * scale;
  }
}

float ExpOf(float x) {
  if (std::isnan(x)) return x;
  if (x > kExpOverflow) return std::numeric_limits<float>::infinity();
  if (x < kExpUnderflow) return 0.0f;
  const double shifted = std::fma(kExpScale, static_cast<double>(x), kExpShift);
  const auto k = std::bit_cast<uint64_t>(shifted);
  const double r = std::fma(kExpScale, static_cast<double>(x), -(shifted - kExpShift));
  const double high = std::fma(kExpC0, r, kExpC1);
  const double low = std::fma(kExpC2, r, 1.0);
  const auto power = std::bit_cast<double>(kExpTable[k % 32] + (k << 47));
  return static_cast<float>(std::fma(high, r * r, low) * power);
}

void Exp(const float* in, float* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = ExpOf(in[i]);
}

}  // namespace

const SimdOps& ScalarOps() {
  static constexpr SimdOps ops{"scalar",        RunDotBlock,
                               RunWeightedSum,  Dot,
                               BFloat16ToFloat, Fp8ToFloat,
                               Fp4ToFloat,      Exp,
                               FloatToBFloat16, RoundToBFloat16Row,
                               MaxMagnitude,    RoundToFp8,
                               Fp8Codes,        Fp4Codes};
  return ops;
}

}  // namespace fathom::kernels
