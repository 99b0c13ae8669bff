#include "scheduler/session_clocks.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace fathom::scheduler {
namespace {

TEST(SessionClocks, RequestsOfOneKeyShareASessionAndThoseWithoutHaveOneEach) {
  SessionClocks clocks;
  EXPECT_EQ(clocks.Join("a"), clocks.Join("a"));
  EXPECT_NE(clocks.Join("a"), clocks.Join("b"));
  EXPECT_NE(clocks.Join(""), clocks.Join(""));
  EXPECT_EQ(clocks.num_live(), 4);
}

TEST(SessionClocks, VirtualTimeIsAnEqualSplitOfTheStepsThatWereRun) {
  SessionClocks clocks;
  clocks.Advance(1);
  EXPECT_EQ(clocks.virtual_seconds(), 1);
  const auto a = clocks.Join("a");
  const auto b = clocks.Join("b");
  EXPECT_EQ(a->virtual_seconds, 1);
  clocks.Advance(1);
  EXPECT_EQ(clocks.virtual_seconds(), 1.5);
  clocks.Leave(*b);
  clocks.Advance(1);
  EXPECT_EQ(clocks.virtual_seconds(), 2.5);
}

TEST(SessionClocks, WhoComesBackKeepsWhatItHadTooMuchAndNothingOfWhatItHadTooLittle) {
  SessionClocks clocks;
  const auto greedy = clocks.Join("greedy");
  greedy->virtual_seconds = 30;
  const auto modest = clocks.Join("modest");
  clocks.Leave(*greedy);
  clocks.Leave(*modest);
  clocks.Advance(10);
  EXPECT_EQ(clocks.Join("greedy")->virtual_seconds, 30);
  EXPECT_EQ(clocks.Join("modest")->virtual_seconds, 10);
}

TEST(SessionClocks, ALiveSessionIsOwedASecondAtMost) {
  SessionClocks clocks;
  clocks.Join("a");
  clocks.Advance(0.5);
  EXPECT_EQ(clocks.Join("a")->virtual_seconds, 0);
  clocks.Advance(1000);
  EXPECT_EQ(clocks.Join("a")->virtual_seconds, clocks.virtual_seconds() - 1);
}

TEST(SessionClocks, ForgetsIdleSessionsThatTimeHasCaughtUpWith) {
  SessionClocks clocks;
  const auto ahead = clocks.Join("ahead");
  ahead->virtual_seconds = 1e9;
  clocks.Leave(*ahead);
  for (int i = 0; i < 10000; ++i) {
    clocks.Leave(*clocks.Join(fmt::format("session {}", i)));
    clocks.Advance(0.1);
  }
  EXPECT_LE(clocks.num_remembered(), 64u);
  EXPECT_EQ(clocks.Join("ahead"), ahead);
}

}  // namespace
}  // namespace fathom::scheduler
