// The conversions are held to their definition: every code, and the midpoints between neighbours.
#include "base/float_types.h"

#include <gtest/gtest.h>

#include <limits>

namespace fathom {
namespace {

TEST(BFloat16, RoundsTiesToEven) {
  EXPECT_EQ(RoundToBFloat16(1.0f), 1.0f);
  EXPECT_EQ(RoundToBFloat16(1.0f + 0x1p-8f), 1.0f);
  EXPECT_EQ(RoundToBFloat16(1.0f + 0x1.8p-7f), 1.0f + 0x1p-6f);
  EXPECT_EQ(RoundToBFloat16(1.0f + 0x1.002p-8f), 1.0f + 0x1p-7f);
  EXPECT_TRUE(std::isnan(RoundToBFloat16(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Float8, EveryFiniteCodeRoundTrips) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    EXPECT_EQ(FloatToFloat8(Float8ToFloat(static_cast<uint8_t>(code))), code);
  }
}

TEST(Float8, MidpointsGoToTheEvenCode) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = Float8ToFloat(static_cast<uint8_t>(code));
    const float high = Float8ToFloat(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    const int even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(FloatToFloat8(middle), even) << code;
    EXPECT_EQ(FloatToFloat8(std::nextafter(middle, high)), code + 1) << code;
    EXPECT_EQ(FloatToFloat8(-std::nextafter(middle, low)), code | 0x80) << code;
  }
}

TEST(Float8, ClampsToTheLargestFiniteValue) {
  EXPECT_EQ(Float8ToFloat(FloatToFloat8(1e9f)), 448.0f);
  EXPECT_EQ(Float8ToFloat(FloatToFloat8(-465.0f)), -448.0f);
}

TEST(Float4, RoundsAsSpecified) {
  const float inputs[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 100.0f, 0.26f, 0.0f};
  const float expected[] = {0.0f, 1.0f, 1.0f, 2.0f, 2.0f, 4.0f, 4.0f, 6.0f, 0.5f, 0.0f};
  for (size_t i = 0; i < std::size(inputs); ++i) {
    EXPECT_EQ(Float4ToFloat(FloatToFloat4(inputs[i])), expected[i]) << inputs[i];
    EXPECT_EQ(Float4ToFloat(FloatToFloat4(-inputs[i])), -expected[i]) << inputs[i];
  }
}

TEST(Ue8m0, CeilsToAPowerOfTwo) {
  EXPECT_EQ(Ue8m0ToFloat(CeilToUe8m0(1.0f)), 1.0f);
  EXPECT_EQ(Ue8m0ToFloat(CeilToUe8m0(std::nextafter(1.0f, 2.0f))), 2.0f);
  EXPECT_EQ(Ue8m0ToFloat(CeilToUe8m0(0.3f)), 0.5f);
  EXPECT_EQ(Ue8m0ToFloat(0), 0x1p-127f);
}

}  // namespace
}  // namespace fathom
