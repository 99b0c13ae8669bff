#include "runtime/logprobs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace fathom::runtime {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Logprobs, AreOfTheSoftmaxWithTheBestFirst) {
  const std::vector<float> logits = {1, 3, 2, -kInfinity, 3};
  const double sum = std::exp(-2.0) + 1 + std::exp(-1.0) + 1;
  const auto out = ComputeLogprobs(logits, 2, 3);
  EXPECT_EQ(out.chosen.token_id, 2);
  EXPECT_FLOAT_EQ(out.chosen.logprob, static_cast<float>(-1 - std::log(sum)));
  EXPECT_EQ(out.rank, 3);
  ASSERT_EQ(out.top.size(), 3u);
  EXPECT_EQ(out.top[0].token_id, 1);  // of equals the lower id
  EXPECT_EQ(out.top[1].token_id, 4);
  EXPECT_EQ(out.top[2].token_id, 2);
  EXPECT_EQ(ComputeLogprobs(logits, 4, 0).rank, 2);
  EXPECT_EQ(ComputeLogprobs(logits, 1, 0).rank, 1);
}

TEST(Logprobs, OfAnImpossibleTokenIsTheFloor) {
  const std::vector<float> logits = {0, -kInfinity};
  const auto out = ComputeLogprobs(logits, 1, 2);
  EXPECT_EQ(out.chosen.logprob, -9999.0f);
  EXPECT_EQ(out.top[1].logprob, -9999.0f);
}

TEST(Logprobs, MoreThanTheVocabularyGivesTheVocabulary) {
  const std::vector<float> logits = {0, 1, 2};
  EXPECT_EQ(ComputeLogprobs(logits, 0, 20).top.size(), 3u);
}

TEST(Logprobs, SurviveLogitsThatOverflowASum) {
  const std::vector<float> logits = {3e38f, 3e38f, -3e38f};
  EXPECT_FLOAT_EQ(ComputeLogprobs(logits, 0, 0).chosen.logprob, -std::log(2.0f));
}

TEST(Logprobs, ARowWithNanOrInfinityIsNoDistribution) {
  EXPECT_TRUE(CheckLogits(std::vector<float>{0, -kInfinity}).ok());
  EXPECT_FALSE(CheckLogits(std::vector<float>{0, NAN}).ok());
  EXPECT_FALSE(CheckLogits(std::vector<float>{0, kInfinity}).ok());
  EXPECT_FALSE(CheckLogits(std::vector<float>{-kInfinity, -kInfinity}).ok());
}

}  // namespace
}  // namespace fathom::runtime
