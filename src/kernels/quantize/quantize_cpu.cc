#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/quantize/quantize.h"

namespace fathom::kernels {
namespace {

constexpr float kFp8Floor = 1e-4f;
constexpr float kFp8Inverse = 1.0f / 448.0f;
constexpr float kFp4Floor = 6 * 0x1p-126f;
constexpr float kFp4Inverse = 1.0f / 6.0f;

float MaxMagnitude(const float* x, int64_t size, float floor) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    for (int64_t l = 0; l < 16; ++l) lanes[l] = std::max(lanes[l], std::fabs(x[i + l]));
  }
  for (; i < size; ++i) lanes[0] = std::max(lanes[0], std::fabs(x[i]));
  return std::max(floor, *std::max_element(lanes, lanes + 16));
}

// The value of the nearest e4m3 code; |x| <= 448. Without branches, so that it runs on vectors.
float NearestFp8Value(float x) {
  const auto u = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) & 0xfff00000u;
  const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
  const auto subnormal = std::bit_cast<uint32_t>(shifted - 0x1p14f);
  const uint32_t rounded = magnitude < 0x3c800000u ? subnormal : normal;  // 2^-6
  return std::bit_cast<float>(rounded | (u & 0x80000000u));
}

}  // namespace

uint8_t QuantizeFp8(const float* x, int size, uint8_t* codes) {
  const uint8_t scale = CeilToUe8m0(MaxMagnitude(x, size, kFp8Floor) * kFp8Inverse);
  const float s = Ue8m0ToFloat(scale);
  for (int i = 0; i < size; ++i) codes[i] = FloatToFloat8(x[i] / s);
  return scale;
}

uint8_t QuantizeFp4(const float* x, int size, uint8_t* codes) {
  const uint8_t scale = CeilToUe8m0(MaxMagnitude(x, size, kFp4Floor) * kFp4Inverse);
  const float s = Ue8m0ToFloat(scale);
  for (int i = 0; i < size; i += 2) {
    const uint8_t low = FloatToFloat4(x[i] / s);
    const uint8_t high = FloatToFloat4(x[i + 1] / s);
    codes[i / 2] = static_cast<uint8_t>(low | high << 4);
  }
  return scale;
}

template <typename T>
void QuantizeRow(const T* x, int64_t size, T* y) {
  float block[kActivationBlock];
  for (int64_t begin = 0; begin < size; begin += kActivationBlock) {
    const int64_t n = std::min<int64_t>(kActivationBlock, size - begin);
    for (int64_t i = 0; i < n; ++i) block[i] = ToFloat(x[begin + i]);
    const float a = MaxMagnitude(block, n, kFp8Floor);
    const float s = Ue8m0ToFloat(CeilToUe8m0(a * kFp8Inverse));
    const float inverse = 1.0f / s;  // exact
    for (int64_t i = 0; i < n; ++i) {
      y[begin + i] =
          FromFloat<T>(NearestFp8Value(std::clamp(block[i] * inverse, -448.0f, 448.0f)) * s);
    }
  }
}

template <typename T>
void Launch(const QuantizeParams<T>& p, device::Stream& stream) {
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(p.size, 1));
  stream.thread_pool().ParallelFor(p.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      QuantizeRow(p.x + row * p.x_stride, p.size, p.y + row * p.y_stride);
    }
  });
}

template void QuantizeRow(const BFloat16*, int64_t, BFloat16*);
template void Launch(const QuantizeParams<BFloat16>&, device::Stream&);

}  // namespace fathom::kernels
