#include "runtime/philox.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fathom::runtime {
namespace {

using Words = std::array<uint32_t, 4>;

TEST(Philox, GivesThePublishedVectors) {
  // Random123, kat_vectors, philox4x32 10.
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, IsUniformAlongSeedsAndAlongTokens) {
  for (const bool along_seeds : {false, true}) {
    constexpr int kDraws = 100000;
    std::array<int, 100> counts{};
    for (uint64_t i = 0; i < kDraws; ++i) {
      const double u = along_seeds ? UniformAt(i, 3) : UniformAt(42, i);
      ASSERT_GE(u, 0.0);
      ASSERT_LT(u, 1.0);
      ++counts[static_cast<size_t>(u * 100)];
    }
    double chi_square = 0;
    for (const int count : counts) chi_square += std::pow(count - 1000.0, 2) / 1000.0;
    EXPECT_LT(chi_square, 180);  // 99 degrees of freedom: p = 1e-6
  }
}

}  // namespace
}  // namespace fathom::runtime
