// Norms against the formula in double precision, at sizes around the sixteen lanes.
#include "kernels/norm/norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

template <typename T>
class NormTest : public testing::Test {
 protected:
  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(2);
  std::unique_ptr<device::Stream> stream_ = std::move(device_->MakeStream().value());
};

using BothNumerics = testing::Types<BFloat16, float>;
TYPED_TEST_SUITE(NormTest, BothNumerics);

// Half a unit in the last place of T, relative, and what FP32 arithmetic on `size` terms adds.
template <typename T>
double RelativeError(int64_t size) {
  return (kIsOfficial<T> ? 0x1p-8 : 0x1p-23) + static_cast<double>(size) * 0x1p-24;
}

TYPED_TEST(NormTest, RmsNormIsTheFormula) {
  using T = TypeParam;
  for (const int64_t size : {1, 15, 16, 17, 128, 1000}) {
    const auto x = RandomActivations<T>(3 * size, 1);
    const auto weight = RandomActivations<BFloat16>(size, 2);
    std::vector<T> y(x.size());
    Launch(RmsNormParams<T>{.x = x.data(),
                            .weight = weight.data(),
                            .y = y.data(),
                            .num_rows = 3,
                            .size = size,
                            .x_stride = size,
                            .y_stride = size,
                            .eps = 1e-6f},
           *this->stream_);
    for (int64_t row = 0; row < 3; ++row) {
      double squares = 0;
      for (int64_t i = 0; i < size; ++i) squares += std::pow(ToFloat(x[row * size + i]), 2);
      const double scale = 1 / std::sqrt(squares / static_cast<double>(size) + 1e-6);
      for (int64_t i = 0; i < size; ++i) {
        const double expected = ToFloat(x[row * size + i]) * scale * ToFloat(weight[i]);
        EXPECT_NEAR(ToFloat(y[row * size + i]), expected,
                    std::fabs(expected) * RelativeError<T>(size) + 1e-30)
            << size;
      }
    }
  }
}

TYPED_TEST(NormTest, RmsNormRunsInPlaceOnStridedRows) {
  using T = TypeParam;
  const auto x = RandomActivations<T>(2 * 40, 3);
  const std::vector<BFloat16> weight(32, BFloat16(1.0f));
  std::vector<T> separate(x.size()), in_place = x;
  RmsNormParams<T> params{.x = x.data(),
                          .weight = weight.data(),
                          .y = separate.data(),
                          .num_rows = 2,
                          .size = 32,
                          .x_stride = 40,
                          .y_stride = 40,
                          .eps = 1e-6f};
  Launch(params, *this->stream_);
  params.x = params.y = in_place.data();
  Launch(params, *this->stream_);
  for (size_t i = 0; i < 80; ++i) {
    const T expected = i % 40 < 32 ? separate[i] : x[i];
    EXPECT_EQ(ToFloat(in_place[i]), ToFloat(expected)) << i;
  }
}

TYPED_TEST(NormTest, HeadNormIsTheFormula) {
  using T = TypeParam;
  auto q = RandomActivations<T>(4 * 512, 4);
  const auto x = q;
  Launch(HeadNormParams<T>{.q = q.data(), .num_rows = 4, .size = 512, .eps = 1e-6f},
         *this->stream_);
  for (int64_t row = 0; row < 4; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < 512; ++i)
      squares += Round<T>(ToFloat(x[row * 512 + i]) * ToFloat(x[row * 512 + i]));
    const float mean = Round<T>(static_cast<float>(squares / 512));
    const float scale = Round<T>(static_cast<float>(1 / std::sqrt(double{Round<T>(mean + 1e-6f)})));
    for (int64_t i = 0; i < 512; ++i) {
      const float expected = Round<T>(ToFloat(x[row * 512 + i]) * scale);
      EXPECT_NEAR(ToFloat(q[row * 512 + i]), expected, std::fabs(expected) * 1e-6);
    }
  }
}

TYPED_TEST(NormTest, ARowOfZerosStaysZero) {
  using T = TypeParam;
  std::vector<T> q(512);
  Launch(HeadNormParams<T>{.q = q.data(), .num_rows = 1, .size = 512, .eps = 1e-6f},
         *this->stream_);
  for (const T x : q) EXPECT_EQ(ToFloat(x), 0.0f);
}

}  // namespace
}  // namespace fathom::kernels
