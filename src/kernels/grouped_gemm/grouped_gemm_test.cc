// The experts against loops in double precision; a token's result does not depend on the others.
#include "kernels/grouped_gemm/grouped_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

constexpr int kHidden = 64, kIntermediate = 96, kExperts = 5, kChosen = 2;

class ExpertsTest : public testing::Test {
 protected:
  ExpertsTest() {
    for (uint32_t e = 0; e <= kExperts; ++e) {
      w1_.push_back(RandomMatrix(WeightDType::kFp4, kIntermediate, kHidden, 3 * e));
      w3_.push_back(RandomMatrix(WeightDType::kFp4, kIntermediate, kHidden, 3 * e + 1));
      w2_.push_back(RandomMatrix(WeightDType::kFp4, kHidden, kIntermediate, 3 * e + 2));
    }
    for (size_t e = 0; e <= kExperts; ++e)
      matrices_.push_back({w1_[e].view, w2_[e].view, w3_[e].view});
  }

  std::vector<float> Run(const std::vector<float>& x, const std::vector<int32_t>& ids,
                         const std::vector<float>& weights, int64_t max_tokens,
                         bool shared = true) {
    const auto device = device::MakeCpuDevice(2);
    const auto stream = std::move(device->MakeStream().value());
    const auto tokens = static_cast<int64_t>(x.size()) / kHidden;
    const auto pairs = static_cast<size_t>(max_tokens * (kChosen + 1));
    std::vector<float> y(x.size()), t(pairs * kIntermediate), pair_y(pairs * kHidden),
        pair_weight(pairs);
    std::vector<int32_t> pair_token(pairs), pair_of(pairs), first_pair(kExperts + 2);
    Launch(ExpertParams<float>{.x = x.data(),
                               .num_tokens = tokens,
                               .hidden = kHidden,
                               .experts = {matrices_.data(), kExperts},
                               .shared = shared ? &matrices_[kExperts] : nullptr,
                               .num_chosen = kChosen,
                               .expert_ids = ids.data(),
                               .weights = weights.data(),
                               .swiglu_limit = 1.5f,
                               .y = y.data(),
                               .workspace = {.max_tokens = max_tokens,
                                             .max_intermediate = kIntermediate,
                                             .t = t.data(),
                                             .y = pair_y.data(),
                                             .pair_token = pair_token.data(),
                                             .pair_of = pair_of.data(),
                                             .first_pair = first_pair.data(),
                                             .pair_weight = pair_weight.data()}},
           *stream);
    return y;
  }

  std::vector<double> Expert(size_t e, const float* x, double weight) const {
    std::vector<double> out(kHidden);
    for (int i = 0; i < kIntermediate; ++i) {
      double gate = 0, up = 0;
      for (int k = 0; k < kHidden; ++k) {
        gate += double{x[k]} * w1_[e].values[i * kHidden + k];
        up += double{x[k]} * w3_[e].values[i * kHidden + k];
      }
      gate = std::min(gate, 1.5);
      const double t = weight * gate / (1 + std::exp(-gate)) * std::clamp(up, -1.5, 1.5);
      for (int h = 0; h < kHidden; ++h) out[h] += t * w2_[e].values[h * kIntermediate + i];
    }
    return out;
  }

  std::vector<TestMatrix> w1_, w2_, w3_;
  std::vector<ExpertMatrices> matrices_;
};

TEST_F(ExpertsTest, SumsTheChosenAndTheShared) {
  const auto x = RandomFloats(3 * kHidden, 1);
  const std::vector<int32_t> ids{0, 4, 0, 2, 3, 4};
  const std::vector<float> weights{0.5f, 1.0f, 0.25f, 1.5f, 0.75f, 0.1f};
  const auto y = Run(x, ids, weights, 8), alone = Run(x, ids, weights, 8, false);
  for (size_t t = 0; t < 3; ++t) {
    const auto a = Expert(static_cast<size_t>(ids[2 * t]), x.data() + t * kHidden, weights[2 * t]);
    const auto b =
        Expert(static_cast<size_t>(ids[2 * t + 1]), x.data() + t * kHidden, weights[2 * t + 1]);
    const auto shared = Expert(kExperts, x.data() + t * kHidden, 1);
    for (size_t i = 0; i < kHidden; ++i) {
      EXPECT_NEAR(y[t * kHidden + i], a[i] + b[i] + shared[i], 1e-3);
      EXPECT_NEAR(alone[t * kHidden + i], a[i] + b[i], 1e-3);
    }
  }
}

TEST_F(ExpertsTest, PiecesAndNeighboursDoNotChangeAToken) {
  const int tokens = 37;
  const auto x = RandomFloats(tokens * kHidden, 2), weights = RandomFloats(tokens * kChosen, 3);
  std::vector<int32_t> ids;
  for (int t = 0; t < tokens; ++t) {
    const int first = t % (kExperts - 1);
    ids.insert(ids.end(), {first, first + 1 + t % (kExperts - 1 - first)});
  }
  const auto whole = Run(x, ids, weights, 64);
  EXPECT_EQ(Run(x, ids, weights, 10), whole);
  for (const int t : {0, 20, 36}) {
    const auto one = Run({x.begin() + t * kHidden, x.begin() + (t + 1) * kHidden},
                         {ids.begin() + 2 * t, ids.begin() + 2 * t + 2},
                         {weights.begin() + 2 * t, weights.begin() + 2 * t + 2}, 1);
    EXPECT_TRUE(std::equal(one.begin(), one.end(), whole.begin() + t * kHidden)) << t;
  }
}

}  // namespace
}  // namespace fathom::kernels
