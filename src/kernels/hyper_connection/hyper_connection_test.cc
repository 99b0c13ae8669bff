#include "kernels/hyper_connection/hyper_connection.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

class HyperConnectionTest : public testing::Test {
 protected:
  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(2);
  std::unique_ptr<device::Stream> stream_ = std::move(device_->MakeStream().value());
  const HyperConnectionConstants constants_{1e-6f, 1e-6f, 20};
};

TEST_F(HyperConnectionTest, TheMixingMatrixIsNearlyDoublyStochastic) {
  const int64_t tokens = 5, hidden = 48;
  const auto streams = RandomActivations<float>(tokens * 4 * hidden, 1);
  const auto mixes = RandomFloats(tokens * kNumMixes, 2);
  const std::vector<float> scale{1, 1, 1}, base(24, 0.0f);
  const std::vector<BFloat16> norm(hidden, BFloat16(1.0f));
  std::vector<float> y(tokens * hidden), post(tokens * 4), comb(tokens * 16);
  Launch(HyperConnectionPreParams<float>{.streams = streams.data(),
                                         .num_tokens = tokens,
                                         .hidden = hidden,
                                         .mixes = mixes.data(),
                                         .scale = scale.data(),
                                         .base = base.data(),
                                         .norm_weight = norm.data(),
                                         .constants = constants_,
                                         .y = y.data(),
                                         .post = post.data(),
                                         .comb = comb.data()},
         *stream_);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int a = 0; a < 4; ++a) {
      double row = 0, column = 0;
      for (int b = 0; b < 4; ++b) {
        row += comb[t * 16 + a * 4 + b];
        column += comb[t * 16 + b * 4 + a];
      }
      EXPECT_NEAR(row, 1, 1e-3);
      EXPECT_NEAR(column, 1, 1e-5);
      EXPECT_GT(post[t * 4 + a], 0);
      EXPECT_LT(post[t * 4 + a], 2);
    }
    double squares = 0;
    for (int64_t i = 0; i < hidden; ++i) squares += std::pow(y[t * hidden + i], 2);
    EXPECT_NEAR(squares / hidden, 1, 1e-4) << "the input of the sub-layer is normed";
  }
}

TEST_F(HyperConnectionTest, PostMixesByColumn) {
  // C sends stream 0 to stream 3 and nothing else; post adds y to stream 1 only.
  std::vector<float> streams{1, 2, 10, 20, 100, 200, 1000, 2000};
  const std::vector<float> y{5, 6}, post{0, 1, 0, 0};
  std::vector<float> comb(16);
  comb[0 * 4 + 3] = 1;
  Launch(HyperConnectionPostParams<float>{.streams = streams.data(),
                                          .num_tokens = 1,
                                          .hidden = 2,
                                          .y = y.data(),
                                          .post = post.data(),
                                          .comb = comb.data()},
         *stream_);
  EXPECT_EQ(streams, (std::vector<float>{0, 0, 5, 6, 0, 0, 1, 2}));
}

TEST_F(HyperConnectionTest, HeadWeighsTheStreamsBySigmoids) {
  const std::vector<float> streams{1, 10, 100, 1000}, scale{1}, base{50, -50, 50, -50};
  const std::vector<float> mixes(4, 0.0f);
  std::vector<float> y(1);
  Launch(HyperConnectionHeadParams<float>{.streams = streams.data(),
                                          .num_tokens = 1,
                                          .hidden = 1,
                                          .mixes = mixes.data(),
                                          .scale = scale.data(),
                                          .base = base.data(),
                                          .constants = constants_,
                                          .y = y.data()},
         *stream_);
  EXPECT_NEAR(y[0], 101, 0.002);  // hc_eps of every stream is in
}

}  // namespace
}  // namespace fathom::kernels
