#include "kernels/quantize/quantize.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

// Every finite BF16 value of magnitude at most 448, in blocks whose scale is 1 (they hold a 448).
TEST(Quantize, ActivationsTakeTheValueOfTheNearestCode) {
  std::vector<BFloat16> x;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    BFloat16 value;
    value.bits = static_cast<uint16_t>(bits);
    if (!(std::fabs(ToFloat(value)) <= 448)) continue;
    if (x.size() % kActivationBlock == 0) x.emplace_back(448.0f);
    x.push_back(value);
  }
  std::vector<BFloat16> y(x.size());
  QuantizeRow(x.data(), static_cast<int64_t>(x.size()), y.data());
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(ToFloat(y[i]), Float8ToFloat(FloatToFloat8(ToFloat(x[i])))) << ToFloat(x[i]);
  }
}

TEST(Quantize, TheScaleIsThePowerOfTwoAboveTheLargestOver448) {
  std::vector<uint8_t> codes(64);
  const auto scale_of = [&](float largest) {
    std::vector<float> x(64, 0.0f);
    x[17] = -largest;
    return Ue8m0ToFloat(QuantizeFp8(x.data(), 64, codes.data()));
  };
  EXPECT_EQ(scale_of(448.0f), 1.0f);
  EXPECT_EQ(scale_of(450.0f), 2.0f);
  EXPECT_EQ(scale_of(224.0f), 0.5f);
  EXPECT_EQ(scale_of(1.0f), 0x1p-8f);
  EXPECT_EQ(scale_of(0.0f), 0x1p-22f);  // the floor of 1e-4
  EXPECT_EQ(Float8ToFloat(codes[17]), 0.0f);
}

TEST(Quantize, QuantizingQuantizedValuesChangesNothing) {
  const auto x = RandomActivations<BFloat16>(1024, 1, 7.0f);
  std::vector<BFloat16> once(x.size()), twice(x.size());
  QuantizeRow(x.data(), 1000, once.data());  // the last block is short
  QuantizeRow(once.data(), 1000, twice.data());
  for (size_t i = 0; i < 1000; ++i) ASSERT_EQ(once[i].bits, twice[i].bits) << i;
}

TEST(Quantize, Fp4KeepsTheNearestCodeAndTheSignOfZero) {
  std::vector<float> x(32, 0.0f);
  const float in[] = {6, -6, 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, -0.0f, -0.2f};
  const float out[] = {6, -6, 0.0f, 1.0f, 1.0f, 2.0f, 2.0f, 4.0f, 4.0f, -0.0f, -0.0f};
  std::copy(std::begin(in), std::end(in), x.begin());
  uint8_t codes[16];
  EXPECT_EQ(Ue8m0ToFloat(QuantizeFp4(x.data(), 32, codes)), 1.0f);
  for (size_t i = 0; i < std::size(in); ++i) {
    const float value = Float4ToFloat(i % 2 == 0 ? codes[i / 2] & 0xf : codes[i / 2] >> 4);
    EXPECT_EQ(value, out[i]) << in[i];
    EXPECT_EQ(std::signbit(value), std::signbit(out[i])) << in[i];
  }
}

TEST(Quantize, AllZerosIsFine) {
  const std::vector<float> x(32, 0.0f);
  uint8_t codes[16];
  EXPECT_GE(QuantizeFp4(x.data(), 32, codes), 1);
  for (const uint8_t c : codes) EXPECT_EQ(c, 0);
}

}  // namespace
}  // namespace fathom::kernels
