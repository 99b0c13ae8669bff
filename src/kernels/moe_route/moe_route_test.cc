#include "kernels/moe_route/moe_route.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace fathom::kernels {
namespace {

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed Route(std::vector<float> logits, int num_experts, int k, const std::vector<float>& bias) {
  const auto device = device::MakeCpuDevice(1);
  const auto stream = std::move(device->MakeStream().value());
  const auto tokens = static_cast<int64_t>(logits.size()) / num_experts;
  Routed r{std::vector<int32_t>(static_cast<size_t>(tokens * k)),
           std::vector<float>(static_cast<size_t>(tokens * k))};
  Launch(MoeRouteParams{.logits = logits.data(),
                        .num_tokens = tokens,
                        .num_experts = num_experts,
                        .num_chosen = k,
                        .bias = bias.data(),
                        .scaling = 2.0f,
                        .expert_ids = r.ids.data(),
                        .weights = r.weights.data()},
         *stream);
  return r;
}

double Score(double logit) { return std::sqrt(std::log1p(std::exp(logit))); }

TEST(MoeRoute, TheBiasChoosesButDoesNotWeigh) {
  const Routed r = Route({1, 0, 2, -1}, 4, 2, {0, 5, 0, 0});
  EXPECT_EQ(r.ids, (std::vector<int32_t>{1, 2}));
  const double sum = Score(0) + Score(2);
  EXPECT_NEAR(r.weights[0], 2 * Score(0) / sum, 1e-6);
  EXPECT_NEAR(r.weights[1], 2 * Score(2) / sum, 1e-6);
}

TEST(MoeRoute, EqualScoresGoToTheLowerId) {
  EXPECT_EQ(Route({1, 1, 1, 1}, 4, 2, {0, 0, 0, 0}).ids, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(Route({0, 1, 0, 1, 1}, 5, 2, {0, 0, 0, 0, 0}).ids, (std::vector<int32_t>{1, 3}));
}

TEST(MoeRoute, LargeLogitsDoNotOverflow) {
  const Routed r = Route({500, -500, 0}, 3, 2, {0, 0, 0});
  EXPECT_EQ(r.ids, (std::vector<int32_t>{0, 2}));
  EXPECT_NEAR(r.weights[0], 2 * std::sqrt(500.0) / (std::sqrt(500.0) + Score(0)), 1e-5);
}

TEST(MoeRoute, NotANumberStillRoutesToDistinctExperts) {
  const Routed r = Route({NAN, NAN, NAN}, 3, 2, {0, 0, 0});
  EXPECT_EQ(r.ids, (std::vector<int32_t>{0, 1}));
}

TEST(MoeRoute, HashRoutingReadsTheTable) {
  const auto device = device::MakeCpuDevice(1);
  const auto stream = std::move(device->MakeStream().value());
  std::vector<float> logits{0, 1, 2, 0, 1, 2};
  const std::vector<int32_t> table{2, 0, 1, 2, 0, 1}, tokens{2, 0};
  std::vector<int32_t> ids(4);
  std::vector<float> weights(4);
  Launch(MoeRouteParams{.logits = logits.data(),
                        .num_tokens = 2,
                        .num_experts = 3,
                        .num_chosen = 2,
                        .tid2eid = table.data(),
                        .token_ids = tokens.data(),
                        .expert_ids = ids.data(),
                        .weights = weights.data()},
         *stream);
  EXPECT_EQ(ids, (std::vector<int32_t>{0, 1, 0, 2}));
  EXPECT_NEAR(weights[0], Score(0) / (Score(0) + Score(1)), 1e-6);
  EXPECT_NEAR(weights[3], Score(2) / (Score(0) + Score(2)), 1e-6);
}

}  // namespace
}  // namespace fathom::kernels
