// Every instruction set gives the bits of the plain loops, and these are right to FP32 rounding.
#include "kernels/simd/simd.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace fathom::kernels
