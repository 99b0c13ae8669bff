#include "kv_cache/pool_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fathom::kv_cache {
namespace {

KvLayout SmallLayout() {
  KvLayout layout;
  layout.block_bytes = 1000;
  layout.window_page_bytes = 100;
  layout.state.slot_bytes = 10;
  return layout;
}

TEST(PoolPlan, BuysEverySequencesWindowFirstAndHistoryWithTheRest) {
  const PoolDemand demand{.max_num_seqs = 4, .max_num_batched_tokens = 128, .max_model_len = 1024};
  const int64_t fixed = 4 * 10 + (4 * 5 + 2) * 100;
  const auto sizes = PlanPools(SmallLayout(), demand, fixed + 7 * 1000 + 999);
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(*sizes, (PoolSizes{.num_blocks = 7, .num_window_pages = 22, .num_state_slots = 4}));
  EXPECT_EQ(PoolBytes(SmallLayout(), *sizes), fixed + 7000);
}

TEST(PoolPlan, WindowPagesSufficeForAnySplitOfAStep) {
  for (int num_seqs = 1; num_seqs <= 40; ++num_seqs) {
    for (int tokens = num_seqs; tokens <= 700; tokens += 7) {
      const PoolDemand demand{
          .max_num_seqs = num_seqs, .max_num_batched_tokens = tokens, .max_model_len = 256};
      const auto sizes = PlanPools(SmallLayout(), demand, int64_t{1} << 40);
      ASSERT_TRUE(sizes.ok());
      // One sequence takes all that the others' single tokens leave.
      const int64_t worst =
          (num_seqs - 1) * MaxWindowPages(128, 1) + MaxWindowPages(128, tokens - (num_seqs - 1));
      EXPECT_GE(sizes->num_window_pages, worst);
    }
  }
}

TEST(PoolPlan, NeverBuysMoreThanAllContextsTogether) {
  const PoolDemand demand{.max_num_seqs = 2, .max_num_batched_tokens = 64, .max_model_len = 1000};
  const auto sizes = PlanPools(SmallLayout(), demand, int64_t{1} << 40);
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes->num_blocks, 8);
  EXPECT_EQ(PoolBytes(SmallLayout(), *sizes), MaxUsefulBytes(SmallLayout(), demand));
}

TEST(PoolPlan, AContextThatDoesNotFitSaysWhatWouldAndWhatToDo) {
  const PoolDemand demand{.max_num_seqs = 1, .max_num_batched_tokens = 64, .max_model_len = 100000};
  const int64_t budget = 610 + 3 * 1000;
  const auto sizes = PlanPools(SmallLayout(), demand, budget);
  ASSERT_FALSE(sizes.ok());
  EXPECT_EQ(sizes.status().code(), StatusCode::kOutOfMemory);
  EXPECT_THAT(sizes.status().message(), testing::HasSubstr("holds 768 tokens"));
  EXPECT_THAT(sizes.status().message(), testing::HasSubstr("the context of 100000"));
  EXPECT_THAT(sizes.status().message(), testing::HasSubstr("--kv-cache-memory"));
  EXPECT_EQ(LongestSequence(SmallLayout(), demand, budget), 768);
  EXPECT_EQ(LongestSequence(SmallLayout(), demand, 100), 0);
}

TEST(PoolPlan, MemoryIsToldByKind) {
  KvLayout layout = SmallLayout();
  layout.snapshot.bytes = 1 << 20;
  layout.block_bytes = 3 << 20;
  const PoolSizes sizes{
      .num_blocks = 5, .num_window_pages = 2, .num_state_slots = 1, .num_snapshots = 4};
  EXPECT_EQ(DescribePools(layout, sizes),
            "20 MiB: 15 for history blocks, 1 for window pages, 1 for the states of sequences, 4 "
            "for snapshots");
}

TEST(PoolPlan, TheLongestSequenceFitsBesideWhatThePrefixCacheGets) {
  KvLayout layout = SmallLayout();
  layout.snapshot.bytes = 50;
  PoolDemand demand{.max_num_seqs = 4,
                    .max_num_batched_tokens = 128,
                    .max_model_len = 1 << 20,
                    .prefix_cache = true};
  for (const int64_t budget : {20'000, 80'000, 1'000'000}) {
    demand.max_model_len = 1 << 20;
    demand.max_model_len = LongestSequence(layout, demand, budget);
    ASSERT_GT(demand.max_model_len, 0);
    const auto sizes = PlanPools(layout, demand, budget);
    ASSERT_TRUE(sizes.ok()) << sizes.status().message();
    EXPECT_GE(sizes->num_blocks * int64_t{kBlockTokens}, demand.max_model_len);
    EXPECT_GT(sizes->num_state_slots, 4) << "the prefix cache got its share";
  }
  demand.max_model_len = 700;
  EXPECT_EQ(LongestSequence(layout, demand, 1'000'000), 700);
}

TEST(PoolPlan, APrefixCacheGetsAnEighthOfTheRestForStates) {
  KvLayout layout = SmallLayout();
  layout.snapshot.bytes = 50;
  const PoolDemand demand{.max_num_seqs = 4,
                          .max_num_batched_tokens = 128,
                          .max_model_len = 8192,
                          .prefix_cache = true};
  const int64_t fixed = 4 * 10 + (4 * 5 + 2) * 100;
  const auto sizes = PlanPools(layout, demand, fixed + 80 * 1000);
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes->num_state_slots, 4 + 4);
  EXPECT_EQ(sizes->num_snapshots, 24);
  EXPECT_EQ(sizes->num_window_pages, 22 + 4 * 4 + 24 * 2);
  EXPECT_GE(sizes->num_blocks, 70);
  EXPECT_LE(PoolBytes(layout, *sizes), fixed + 80 * 1000);
  EXPECT_LE(PoolBytes(layout, *sizes), MaxUsefulBytes(layout, demand));
  // A context of max_model_len goes before them.
  const auto tight = PlanPools(layout, demand, fixed + 32 * 1000);
  ASSERT_TRUE(tight.ok());
  EXPECT_EQ(tight->num_blocks, 32);
  EXPECT_EQ(tight->num_snapshots, 0);
  // What it leaves is theirs.
  const auto less_tight = PlanPools(layout, demand, fixed + 33 * 1000);
  ASSERT_TRUE(less_tight.ok());
  EXPECT_EQ(less_tight->num_blocks, 32);
  EXPECT_GT(less_tight->num_snapshots, 0);
}

TEST(PoolPlan, HostMemoryHasRoomForBothKinds) {
  KvLayout layout = SmallLayout();
  layout.snapshot.bytes = 50;
  EXPECT_EQ(PlanHostSlots(layout, 128, 0).num_blocks, 0);
  EXPECT_EQ(PlanHostSlots(layout, 128, 10).num_blocks, 1);
  const HostSlots slots = PlanHostSlots(layout, 128, 100000);
  EXPECT_EQ(slots.num_blocks, 80);
  EXPECT_EQ(slots.num_snapshots, 80);
}

TEST(PoolPlan, AModelWithoutHistoryBytesHoldsAnyContext) {
  KvLayout layout = SmallLayout();
  layout.block_bytes = 0;
  const PoolDemand demand{
      .max_num_seqs = 2, .max_num_batched_tokens = 64, .max_model_len = 1 << 20};
  const auto sizes = PlanPools(layout, demand, 10000);
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes->num_blocks, 2 * 4096);
}

}  // namespace
}  // namespace fathom::kv_cache
