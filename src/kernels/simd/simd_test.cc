// Every instruction set gives the bits of the plain loops, and these are right to FP32 rounding.
#include "kernels/simd/simd.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

std::vector<float> RunDotBlockWith(const SimdOps& ops, const TestMatrix& w,
                                   const std::vector<float>& x, int m, int64_t first_row, int n,
                                   bool with_panel) {
  std::vector<float> panel(static_cast<size_t>(n * w.view.cols));
  std::vector<float> y(static_cast<size_t>(m * n));
  ops.dot_block({.x = x.data(),
                 .x_stride = w.view.cols,
                 .m = m,
                 .w = w.view,
                 .first_row = first_row,
                 .n = n,
                 .panel = with_panel ? panel.data() : nullptr,
                 .y = y.data(),
                 .y_stride = n});
  return y;
}

class DotBlockTest : public testing::TestWithParam<WeightDType> {};

TEST_P(DotBlockTest, EveryInstructionSetGivesTheBitsOfTheReference) {
  const bool quantized = GetParam() == WeightDType::kFp8 || GetParam() == WeightDType::kFp4;
  for (const int64_t cols : {16, 32, 96, 128, 160, 416, 1, 7, 15, 17, 33, 131}) {
    if (quantized && cols % 32 != 0) continue;
    const TestMatrix w = RandomMatrix(GetParam(), 150, cols, 7);
    for (const int m : {1, 2, 3, 4, 5, 9}) {
      const std::vector<float> x = RandomFloats(m * cols, 3);
      for (const int n : {1, 3, 4, 11}) {
        for (const int64_t first_row : {0, 1, 126, 139}) {
          const auto expected = RunDotBlockWith(ScalarOps(), w, x, m, first_row, n, false);
          for (const SimdOps* ops : UsableSimdOps()) {
            for (const bool with_panel : {false, true}) {
              ASSERT_EQ(RunDotBlockWith(*ops, w, x, m, first_row, n, with_panel), expected)
                  << ops->name << " m " << m << " n " << n << " k " << cols;
            }
          }
        }
      }
    }
  }
}

TEST_P(DotBlockTest, TheReferenceIsTheSumInDoublePrecision) {
  const int64_t cols = 1024;
  const TestMatrix w = RandomMatrix(GetParam(), 130, cols, 5);
  const std::vector<float> x = RandomFloats(cols, 6);
  const auto y = RunDotBlockWith(ScalarOps(), w, x, 1, 0, 130, false);
  for (int j = 0; j < 130; ++j) {
    double sum = 0, magnitude = 0;
    for (int64_t k = 0; k < cols; ++k) {
      const double product = static_cast<double>(x[k]) * w.values[j * cols + k];
      sum += product;
      magnitude += std::fabs(product);
    }
    // 64 additions a lane and 4 in the tree, each with a relative error of 2^-24.
    EXPECT_NEAR(y[j], sum, 68 * 0x1p-24 * magnitude) << j;
  }
}

INSTANTIATE_TEST_SUITE_P(AllDTypes, DotBlockTest,
                         testing::Values(WeightDType::kF32, WeightDType::kBF16, WeightDType::kFp8,
                                         WeightDType::kFp4));

TEST(Simd, WeightedSumGivesTheBitsOfTheReference) {
  for (const WeightDType dtype : {WeightDType::kF32, WeightDType::kBF16}) {
    for (const int m : {1, 2, 4, 7}) {
      for (const int n : {0, 1, 5, 64}) {
        for (const int size : {16, 48, 64, 512}) {
          const auto p = RandomFloats(m * 64, 1);
          const TestMatrix v = RandomMatrix(dtype, n, size, 2);
          const auto start = RandomFloats(m * size, 3);
          std::vector<std::vector<float>> results;
          for (const SimdOps* ops : UsableSimdOps()) {
            results.push_back(start);
            ops->weighted_sum({.p = p.data(),
                               .p_stride = 64,
                               .m = m,
                               .v = v.view,
                               .o = results.back().data(),
                               .o_stride = size});
            EXPECT_EQ(results.back(), results.front()) << ops->name;
          }
          double expected = start[0];
          for (int j = 0; j < n; ++j) expected += static_cast<double>(p[j]) * v.values[j * size];
          EXPECT_NEAR(results.front()[0], expected, 1e-5);
        }
      }
    }
  }
}

TEST(Simd, EveryFp8CodeWidensExactly) {
  std::vector<uint8_t> codes;
  for (int c = 0; c < 256; ++c) codes.push_back((c & 0x7f) == 0x7f ? 0 : static_cast<uint8_t>(c));
  for (const SimdOps* ops : UsableSimdOps()) {
    std::vector<float> out(256);
    ops->fp8_to_float(codes.data(), 0x1p-3f, out.data(), 256);
    for (size_t i = 0; i < 256; ++i)
      EXPECT_EQ(out[i], Float8ToFloat(codes[i]) * 0x1p-3f) << ops->name;
  }
}

TEST(Simd, EveryFp4CodeWidensExactly) {
  std::vector<uint8_t> codes(128);
  for (int i = 0; i < 128; ++i)
    codes[static_cast<size_t>(i)] = static_cast<uint8_t>(i * 2 + i / 64);
  for (const SimdOps* ops : UsableSimdOps()) {
    std::vector<float> out(256);
    ops->fp4_to_float(codes.data(), 4.0f, out.data(), 256);
    for (size_t i = 0; i < 256; ++i) {
      const uint8_t code = i % 2 == 0 ? codes[i / 2] & 0xf : codes[i / 2] >> 4;
      EXPECT_EQ(out[i], Float4ToFloat(code) * 4.0f) << ops->name << ' ' << i;
    }
  }
}

TEST(Simd, BFloat16WidensExactlyAtAnyLength) {
  for (const int64_t size : {1, 15, 16, 17, 100}) {
    std::vector<BFloat16> in;
    for (const float x : RandomFloats(size, 9)) in.emplace_back(x);
    for (const SimdOps* ops : UsableSimdOps()) {
      std::vector<float> out(static_cast<size_t>(size));
      ops->bf16_to_float(in.data(), out.data(), size);
      for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(out[i], static_cast<float>(in[i]));
    }
  }
}

TEST(Simd, DotOfOneVectorIsCanonical) {
  for (const int64_t size : {1, 16, 40, 512}) {
    const auto a = RandomFloats(size, 1), b = RandomFloats(size, 2);
    const float expected = ScalarOps().dot(a.data(), b.data(), size);
    for (const SimdOps* ops : UsableSimdOps())
      EXPECT_EQ(ops->dot(a.data(), b.data(), size), expected);
  }
}

// Values of every magnitude and sign, zeros and subnormals included; `step` is odd.
std::vector<float> FloatsOfAllMagnitudes(uint32_t step) {
  std::vector<float> out;
  for (uint64_t u = 0; u < uint64_t{1} << 32; u += step) {
    const auto x = std::bit_cast<float>(static_cast<uint32_t>(u));
    if (std::isfinite(x)) out.push_back(x);
  }
  return out;
}

TEST(Simd, ExpIsTheNearestFloatOrTheOneBesideItInEveryInstructionSet) {
  std::vector<float> x = FloatsOfAllMagnitudes(12347);
  for (const float special : {-INFINITY, INFINITY, 0.0f, -0.0f, 88.72284f, -103.97208f}) {
    x.push_back(special);
  }
  std::vector<std::vector<float>> results;
  for (const SimdOps* ops : UsableSimdOps()) {
    results.emplace_back(x.size());
    ops->exp(x.data(), results.back().data(), static_cast<int64_t>(x.size()));
    EXPECT_EQ(results.back(), results.front()) << ops->name;
  }
  for (size_t i = 0; i < x.size(); ++i) {
    const auto expected = static_cast<float>(std::exp(static_cast<double>(x[i])));
    const float y = results.front()[i];
    EXPECT_TRUE(y == expected || std::nextafter(y, expected) == expected) << x[i];
  }
}

TEST(Simd, ExpOfNotANumberIsNotANumber) {
  for (const SimdOps* ops : UsableSimdOps()) {
    float x[3] = {1.0f, NAN, 2.0f};
    ops->exp(x, x, 3);
    EXPECT_TRUE(std::isnan(x[1]));
    EXPECT_FALSE(std::isnan(x[0]) || std::isnan(x[2]));
  }
}

TEST(Simd, RoundingAndCodesAreThoseOfTheStorageTypes) {
  const std::vector<float> x = FloatsOfAllMagnitudes(65539 * 13);
  const auto size = static_cast<int64_t>(x.size()) / 2 * 2;
  for (const SimdOps* ops : UsableSimdOps()) {
    for (const float scale : {1.0f, 0x1p-20f, 0x1p9f}) {
      std::vector<float> bf16(x.size()), fp8(x.size());
      std::vector<BFloat16> narrow(x.size());
      std::vector<uint8_t> codes(x.size()), pairs(x.size());
      ops->round_to_bf16(x.data(), bf16.data(), size);
      ops->float_to_bf16(x.data(), narrow.data(), size);
      ops->round_to_fp8(x.data(), scale, fp8.data(), size);
      ops->fp8_codes(x.data(), scale, codes.data(), size);
      ops->fp4_codes(x.data(), scale, pairs.data(), size);
      for (size_t i = 0; i < static_cast<size_t>(size); ++i) {
        const uint8_t code = FloatToFloat8(x[i] / scale);
        ASSERT_EQ(bf16[i], RoundToBFloat16(x[i]));
        ASSERT_EQ(narrow[i].bits, BFloat16(x[i]).bits);
        ASSERT_EQ(codes[i], code) << x[i];
        ASSERT_EQ(fp8[i], Float8ToFloat(code) * scale) << x[i];
        const int shift = i % 2 == 0 ? 0 : 4;
        ASSERT_EQ(pairs[i / 2] >> shift & 0xf, FloatToFloat4(x[i] / scale)) << x[i];
      }
    }
  }
}

TEST(Simd, MaxMagnitudeLooksAtEveryValue) {
  for (const SimdOps* ops : UsableSimdOps()) {
    for (const int64_t size : {1, 15, 16, 33, 128}) {
      for (int64_t at = 0; at < size; ++at) {
        std::vector<float> x(static_cast<size_t>(size), 0.5f);
        x[static_cast<size_t>(at)] = -2.0f;
        ASSERT_EQ(ops->max_magnitude(x.data(), size), 2.0f) << ops->name << ' ' << at;
      }
    }
  }
}

}  // namespace
}  // namespace fathom::kernels
