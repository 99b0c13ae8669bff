// What the kernels' tests share: random values that are the same everywhere, and random weight
// matrices with their values. Tests only.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/activation.h"
#include "kernels/weight_matrix.h"

namespace fathom::kernels {

// Close to normal, mean 0, deviation 1.
inline std::vector<float> RandomFloats(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> out(static_cast<size_t>(size));
  for (float& x : out) {
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(random() >> 8) * 0x1p-24f;
    x = sum;
  }
  return out;
}

template <typename T>
std::vector<T> RandomActivations(int64_t size, uint32_t seed, float scale = 1.0f) {
  std::vector<T> out;
  for (const float x : RandomFloats(size, seed)) out.push_back(FromFloat<T>(x * scale));
  return out;
}

template <typename T>
std::vector<float> Floats(std::span<const T> values) {
  std::vector<float> out;
  for (const T x : values) out.push_back(ToFloat(x));
  return out;
}
template <typename T>
std::vector<float> Floats(const std::vector<T>& values) {
  return Floats(std::span<const T>(values));
}

struct TestMatrix {
  WeightMatrix view;
  std::vector<float> values;  // [rows, cols], what the codes mean
  std::vector<std::byte> data;
  std::vector<uint8_t> scales;
};

// Values of deviation near 1; quantized ones use several scales.
inline TestMatrix RandomMatrix(WeightDType dtype, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  TestMatrix m;
  m.values = RandomFloats(rows * cols, seed);
  const auto put = [&m](const auto& value) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    for (size_t i = 0; i < sizeof(value); ++i) m.data.push_back(bytes[i]);
  };
  const int64_t scale_rows = dtype == WeightDType::kFp8 ? (rows + 127) / 128 : rows;
  const int64_t scale_cols = dtype == WeightDType::kFp8 ? (cols + 127) / 128 : cols / 32;
  if (dtype == WeightDType::kFp8 || dtype == WeightDType::kFp4) {
    for (int64_t i = 0; i < scale_rows * scale_cols; ++i) {
      m.scales.push_back(static_cast<uint8_t>(125 + random() % 4));
    }
  }
  for (int64_t i = 0; i < rows * cols; ++i) {
    float& value = m.values[static_cast<size_t>(i)];
    const int64_t row = i / cols, col = i % cols;
    if (dtype == WeightDType::kF32) {
      put(value);
    } else if (dtype == WeightDType::kBF16) {
      put(BFloat16(value));
      value = RoundToBFloat16(value);
    } else if (dtype == WeightDType::kFp8) {
      const uint8_t code = FloatToFloat8(value);
      put(code);
      value = Float8ToFloat(code) *
              Ue8m0ToFloat(m.scales[static_cast<size_t>(row / 128 * scale_cols + col / 128)]);
    } else {
      const uint8_t code = FloatToFloat4(value);
      if (i % 2 == 0) {
        put(code);
      } else {
        m.data.back() |= static_cast<std::byte>(code << 4);
      }
      value = Float4ToFloat(code) *
              Ue8m0ToFloat(m.scales[static_cast<size_t>(row * scale_cols + col / 32)]);
    }
  }
  m.view = {dtype, rows, cols, m.data.data(), m.scales.data()};
  return m;
}

}  // namespace fathom::kernels
