#include "kernels/gemm/gemm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

class GemmTest : public testing::Test {
 protected:
  template <typename X, typename Y>
  std::vector<Y> Multiply(const std::vector<X>& x, const WeightMatrix& w, int threads,
                          int groups = 1) {
    const auto device = device::MakeCpuDevice(threads);
    const auto stream = std::move(device->MakeStream().value());
    const int64_t size = w.cols * groups;
    const auto m = static_cast<int64_t>(x.size()) / size;
    std::vector<Y> y(static_cast<size_t>(m * w.rows));
    Launch(GemmParams<X, Y>{.x = x.data(),
                            .x_stride = size,
                            .m = m,
                            .w = w,
                            .groups = groups,
                            .y = y.data(),
                            .y_stride = w.rows},
           *stream);
    return y;
  }
};

TEST_F(GemmTest, EveryDTypeIsTheProductInDoublePrecision) {
  for (const WeightDType dtype :
       {WeightDType::kF32, WeightDType::kBF16, WeightDType::kFp8, WeightDType::kFp4}) {
    for (const int64_t rows : {1, 24, 129, 300}) {
      const int64_t cols = 256;
      const TestMatrix w = RandomMatrix(dtype, rows, cols, 1);
      for (const int64_t m : {1, 4, 65}) {
        const auto x = RandomActivations<BFloat16>(m * cols, 2);
        const auto y = Multiply<BFloat16, float>(x, w.view, 2);
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < rows; ++j) {
            double sum = 0, magnitude = 0;
            for (int64_t k = 0; k < cols; ++k) {
              const double product = double{ToFloat(x[i * cols + k])} * w.values[j * cols + k];
              sum += product;
              magnitude += std::fabs(product);
            }
            ASSERT_NEAR(y[i * rows + j], sum, 20 * 0x1p-24 * magnitude) << i << ' ' << j;
          }
        }
      }
    }
  }
}

TEST_F(GemmTest, ARowDoesNotDependOnTheBatchOrTheThreads) {
  const int64_t cols = 416;
  for (const WeightDType dtype : {WeightDType::kBF16, WeightDType::kFp8, WeightDType::kFp4}) {
    const TestMatrix w = RandomMatrix(dtype, 200, cols, 3);
    const auto x = RandomActivations<BFloat16>(70 * cols, 4);
    const auto all = Multiply<BFloat16, BFloat16>(x, w.view, 3);
    for (const int64_t row : {0, 1, 63, 64, 69}) {
      const std::vector<BFloat16> one(x.begin() + row * cols, x.begin() + (row + 1) * cols);
      const auto y = Multiply<BFloat16, BFloat16>(one, w.view, 1);
      for (int64_t j = 0; j < 200; ++j) ASSERT_EQ(y[j].bits, all[row * 200 + j].bits) << row;
    }
  }
}

TEST_F(GemmTest, GroupsReadTheirOwnColumns) {
  const int64_t cols = 64;
  const TestMatrix w = RandomMatrix(WeightDType::kFp8, 6 * 20, cols, 5);
  const auto x = RandomActivations<float>(5 * 6 * cols, 6);
  const auto y = Multiply<float, float>(x, w.view, 2, 6);
  for (int64_t i = 0; i < 5; ++i) {
    for (int64_t j = 0; j < 120; ++j) {
      const auto begin = x.begin() + (i * 6 + j / 20) * cols;
      const auto alone = Multiply<float, float>(std::vector<float>(begin, begin + cols), w.view, 1);
      ASSERT_EQ(y[i * 120 + j], alone[j]) << i << ' ' << j;
    }
  }
}

TEST_F(GemmTest, NoRowsIsNoWork) {
  const TestMatrix w = RandomMatrix(WeightDType::kBF16, 4, 16, 7);
  EXPECT_TRUE((Multiply<BFloat16, float>({}, w.view, 1).empty()));
}

}  // namespace
}  // namespace fathom::kernels
