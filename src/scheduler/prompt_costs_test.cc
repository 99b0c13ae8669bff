#include "scheduler/prompt_costs.h"

#include <gtest/gtest.h>

namespace fathom::scheduler {
namespace {

TEST(PromptCosts, IsProportionalUntilTwoSizesWereSeen) {
  PromptCosts costs;
  EXPECT_GT(costs.Seconds(1), 0) << "a guess";
  costs.Add(1000, 0.1);
  EXPECT_DOUBLE_EQ(costs.Seconds(1000), 0.1);
  EXPECT_DOUBLE_EQ(costs.Seconds(10), 0.001);
  EXPECT_DOUBLE_EQ(costs.Seconds(4000), 0.4);
  EXPECT_EQ(costs.TokensWithin(0.01, 8192), 100);
}

TEST(PromptCosts, DrawsLinesBetweenSizesAndBeyondTheLast) {
  PromptCosts costs;
  costs.Add(100, 0.08);
  costs.Add(1000, 0.10);
  EXPECT_DOUBLE_EQ(costs.Seconds(50), 0.04);
  EXPECT_DOUBLE_EQ(costs.Seconds(550), 0.09);
  EXPECT_NEAR(costs.Seconds(8000), 0.10 + 7000 * 0.02 / 900, 1e-9);
  EXPECT_NEAR(costs.Seconds(16'000), 2 * costs.Seconds(8000), 1e-9) << "too far to know";
  EXPECT_EQ(costs.TokensWithin(0.095, 8192), 775);
  EXPECT_EQ(costs.TokensWithin(1, 8192), 8192);
  EXPECT_EQ(costs.TokensWithin(1e-9, 8192), 1);
  EXPECT_EQ(costs.TokensWithin(1, 1), 1);
}

TEST(PromptCosts, SaysFromWhereOnTokensAreCheap) {
  PromptCosts costs;
  costs.Add(1, 0.08);
  costs.Add(8001, 0.08 + 8000 * 4e-5);
  EXPECT_NEAR(costs.SecondsPerToken(8000), 5e-5, 1e-7);
  EXPECT_NEAR(costs.TokensFrom(6e-5, 8192), 4000, 20);
  EXPECT_EQ(costs.TokensFrom(1e-5, 8192), 8192);
  EXPECT_EQ(costs.TokensFrom(1, 8192), 1);
  EXPECT_EQ(costs.TokensFrom(1e-5, 1), 1);
}

TEST(PromptCosts, TwoSizesThatAreCloseSayNothingOfLargerOnes) {
  PromptCosts costs;
  costs.Add(60, 0.0062);
  costs.Add(70, 0.0068);
  EXPECT_NEAR(costs.Seconds(7000), 0.68, 1e-9);
}

TEST(PromptCosts, FollowsWhatStepsTakeButNoSingleStall) {
  PromptCosts costs;
  costs.Add(1000, 0.1);
  costs.Add(1000, 60);
  EXPECT_LE(costs.Seconds(1000), 0.15 + 1e-9);
  for (int i = 0; i < 40; ++i) costs.Add(1000, 0.2);
  EXPECT_NEAR(costs.Seconds(1000), 0.2, 1e-3);
}

TEST(PromptCosts, ForgetsASizeThatWasNotSeenForLong) {
  PromptCosts costs;
  costs.Add(10, 0.08);
  for (int i = 0; i < 300; ++i) costs.Add(1000, 0.1);
  EXPECT_DOUBLE_EQ(costs.Seconds(10), 0.001);
}

}  // namespace
}  // namespace fathom::scheduler
