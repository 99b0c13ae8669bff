// The CUDA norms against the CPU's, on a GPU when there is one. They sum in another order, so
// outputs may differ by one unit in the last place, and by few of them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "kernels/cuda_testing.h"
#include "kernels/norm/norm.h"

namespace fathom::kernels {
namespace {

template <typename T>
class NormCudaTest : public CudaTest {
 protected:
  void ExpectOnGpu(const device::Buffer& buffer, const std::vector<T>& expected) {
    const auto actual = Download<T>(buffer);
    ASSERT_EQ(actual.size(), expected.size());
    size_t different = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      const float a = ToFloat(actual[i]), e = ToFloat(expected[i]);
      different += a == e ? 0 : 1;
      ASSERT_LE(std::fabs(a - e), std::fabs(e) * (kIsOfficial<T> ? 0x1p-7f : 1e-5f)) << i;
    }
    if (!kIsOfficial<T>) return;
    EXPECT_LE(different * 1000, actual.size() + 999);
  }
};

using BothNumerics = testing::Types<BFloat16, float>;
TYPED_TEST_SUITE(NormCudaTest, BothNumerics);

TYPED_TEST(NormCudaTest, RmsNormMatchesTheCpu) {
  using T = TypeParam;
  for (const int64_t size : {1, 31, 128, 512, 4096, 7168}) {
    for (const int64_t rows : {1, 3, 130}) {
      const auto x = RandomActivations<T>(rows * size, 1);
      const auto weight = RandomActivations<BFloat16>(size, 2);
      std::vector<T> y(x.size());
      RmsNormParams<T> params{.x = x.data(),
                              .weight = weight.data(),
                              .y = y.data(),
                              .num_rows = rows,
                              .size = size,
                              .x_stride = size,
                              .y_stride = size,
                              .eps = 1e-6f};
      Launch(params, *this->cpu_stream_);
      const device::Buffer gpu_x = this->Upload(x), gpu_weight = this->Upload(weight);
      params.x = reinterpret_cast<const T*>(gpu_x.data());
      params.weight = reinterpret_cast<const BFloat16*>(gpu_weight.data());
      params.y = reinterpret_cast<T*>(gpu_x.data());
      Launch(params, *this->gpu_stream_);
      this->ExpectOnGpu(gpu_x, y);
    }
  }
}

TYPED_TEST(NormCudaTest, HeadNormMatchesTheCpu) {
  using T = TypeParam;
  for (const int64_t rows : {1, 64, 1000}) {
    auto q = RandomActivations<T>(rows * 512, 3);
    const device::Buffer gpu_q = this->Upload(q);
    HeadNormParams<T> params{.q = q.data(), .num_rows = rows, .size = 512, .eps = 1e-6f};
    Launch(params, *this->cpu_stream_);
    params.q = reinterpret_cast<T*>(gpu_q.data());
    Launch(params, *this->gpu_stream_);
    this->ExpectOnGpu(gpu_q, q);
  }
}

}  // namespace
}  // namespace fathom::kernels
