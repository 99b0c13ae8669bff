#include "kernels/rope/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

using config::LayerKind;

TEST(Rope, PlainFrequenciesFallFromOne) {
  const auto f = RopeFrequencies(config::ModelConfig(), LayerKind::kWindow);
  ASSERT_EQ(f.size(), 32u);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(f[i], std::pow(10000.0, -2.0 * static_cast<double>(i) / 64), 1e-7 * f[i]) << i;
  }
}

// With the published values the ramp runs from 15 to 25.
TEST(Rope, YarnKeepsFastPairsAndSlowsSlowOnes) {
  const auto f = RopeFrequencies(config::ModelConfig(), LayerKind::kC128);
  for (size_t i = 0; i < 32; ++i) {
    const double plain = std::pow(160000.0, -2.0 * static_cast<double>(i) / 64);
    const double g = std::min(std::max((static_cast<double>(i) - 15) / 10, 0.0), 1.0);
    EXPECT_NEAR(f[i], plain / 16 * g + plain * (1 - g), 2e-7 * plain) << i;
  }
}

TEST(Rope, PositionZeroChangesNothingAndTheInverseUndoes) {
  const auto device = device::MakeCpuDevice(2);
  const auto stream = std::move(device->MakeStream().value());
  const std::vector<int32_t> positions{0, 1, 127, 128, 1000000};
  const auto frequencies = RopeFrequencies(config::ModelConfig(), LayerKind::kC4);
  std::vector<float> angles(5 * 64);
  Launch(RopeAnglesParams{.positions = positions.data(),
                          .num_tokens = 5,
                          .frequencies = frequencies,
                          .angles = angles.data()},
         *stream);
  const auto x = RandomFloats(5 * 2 * 96, 1);
  auto y = x;
  RopeParams<float> params{.x = y.data(),
                           .num_tokens = 5,
                           .num_heads = 2,
                           .head_dim = 96,
                           .rope_dim = 64,
                           .angles = angles.data()};
  Launch(params, *stream);
  for (size_t i = 0; i < 192; ++i) EXPECT_EQ(y[i], x[i]);
  for (size_t i = 192; i < y.size(); ++i) {
    if (i % 96 >= 32) continue;
    EXPECT_EQ(y[i], x[i]) << "not rotated: " << i;
  }
  EXPECT_NE(y[192 + 32], x[192 + 32]);
  params.inverse = true;
  Launch(params, *stream);
  for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], x[i], 1e-5);
}

TEST(Rope, AnglesAreThoseOfTheFp32Product) {
  const float f = 0.12345678f;
  float out[2];
  RopeAngles(999999, {&f, 1}, out);
  const double angle = 999999.0f * f;
  EXPECT_EQ(out[0], static_cast<float>(std::cos(angle)));
  EXPECT_EQ(out[1], static_cast<float>(std::sin(angle)));
}

}  // namespace
}  // namespace fathom::kernels
