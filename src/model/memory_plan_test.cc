#include "model/memory_plan.h"

#include <gtest/gtest.h>

#include "checkpoint/summary.h"
#include "checkpoint/synthetic_checkpoint.h"
#include "kv_cache/pool_plan.h"
#include "model/device_ceilings.h"

namespace fathom::model {
namespace {

using config::ParallelConfig;

config::ModelConfig Preset(const char* name) {
  return checkpoint::ParseModelConfig(checkpoint::PresetConfigText(name).value(), name).value();
}

MemoryDemand OnH200(int64_t max_model_len) {
  MemoryDemand demand;
  demand.memory_bytes = H200Ceilings().memory_bytes;
  demand.limits = {.max_batched_tokens = 2048, .max_num_seqs = 64, .max_model_len = max_model_len};
  return demand;
}

MemoryPlan Plan(const config::ModelConfig& config, const ParallelConfig& parallel,
                const MemoryDemand& demand) {
  return PlanMemory(config, checkpoint::ShardSummary(config), parallel, demand).value();
}

int64_t BytesOf(const StageMemory& stage, const std::string& name) {
  for (const checkpoint::PartBytes& part : stage.weights) {
    if (part.name == name) return part.bytes;
  }
  return 0;
}

TEST(MemoryPlan, FlashNeedsTwoH200) {
  const config::ModelConfig flash = Preset("flash");
  const MemoryPlan one = Plan(flash, {}, OnH200(32768));
  EXPECT_FALSE(one.fits());
  // 156 GB of weights without the draft, and what a step and the KV cache need, in 135 GB.
  EXPECT_NEAR(static_cast<double>(one.missing_bytes) / 1e9, 24, 2);
  const MemoryPlan two = Plan(flash, {2, 1, 1, false}, OnH200(32768));
  EXPECT_TRUE(two.fits());
  EXPECT_EQ(two.missing_bytes, 0);
}

TEST(MemoryPlan, WeightsOfOneGpuAreTheCheckpointsWithoutDrafts) {
  const config::ModelConfig flash = Preset("flash");
  const MemoryPlan plan = Plan(flash, {}, OnH200(32768));
  int64_t expected = 0;
  for (const checkpoint::PartSummary& part : checkpoint::Summarize(flash).parts) {
    if (part.name != "draft") expected += part.bytes;
  }
  expected -= int64_t{3} * 129280 * 6 * 4;            // expert ids are 32 bits wide
  expected += int64_t{43} * 256 * (2 * 2048 + 4096);  // the largest scale of each row of an expert
  EXPECT_EQ(plan.stages[0].weight_bytes, expected);
}

// By hand: 256 experts of 3 * 2048 * 4096 FP4 values in 43 layers, a byte for 32 of scales, a byte
// for each of 8,192 rows; four ranks.
TEST(MemoryPlan, ExpertsAreSpreadOverAllRanksOfAStage) {
  const config::ModelConfig flash = Preset("flash");
  const int64_t values = int64_t{43} * 256 * 3 * 2048 * 4096;
  const int64_t whole = values / 2 + values / 32;
  for (const ParallelConfig& parallel :
       {ParallelConfig{1, 4, 1, true}, {2, 2, 1, true}, {4, 1, 1, true}}) {
    const int64_t rows = int64_t{43} * 64 * 8192;
    EXPECT_EQ(BytesOf(Plan(flash, parallel, OnH200(32768)).stages[0], "experts"), whole / 4 + rows);
  }
  const int64_t rows = int64_t{43} * 256 * (2 * 512 + 4096);  // w2's rows are all there, cut
  EXPECT_EQ(BytesOf(Plan(flash, {4, 1, 1, false}, OnH200(32768)).stages[0], "experts"),
            whole / 4 + rows);
}

// Of the shared expert likewise: 3 * 2048 * 4096 FP8 values in 43 layers.
TEST(MemoryPlan, BesideWholeExpertsTheSharedOneIsWholeOnEveryRank) {
  const config::ModelConfig flash = Preset("flash");
  const int64_t values = int64_t{43} * 3 * 2048 * 4096, whole = values + values / (128 * 128);
  const auto shared = [&](const ParallelConfig& parallel) {
    return BytesOf(Plan(flash, parallel, OnH200(32768)).stages[0], "shared_experts");
  };
  EXPECT_EQ(shared({4, 1, 1, false}), whole / 4);
  for (const ParallelConfig& parallel :
       {ParallelConfig{4, 1, 1, true}, {2, 2, 1, true}, {1, 4, 1, false}}) {
    EXPECT_EQ(shared(parallel), whole);
  }
  const auto experts = [&](const ParallelConfig& parallel) {
    return BytesOf(Plan(flash, parallel, OnH200(32768)).stages[0], "experts");
  };
  EXPECT_EQ(experts({2, 2, 1, false}), experts({2, 2, 1, true}));
}

TEST(MemoryPlan, WhatIsMissingMakesItFit) {
  const config::ModelConfig pro = Preset("pro");
  MemoryDemand demand = OnH200(32768);
  demand.utilization = 1;
  const MemoryPlan plan = Plan(pro, {4, 1, 1, false}, demand);
  ASSERT_GT(plan.missing_bytes, 0);
  demand.memory_bytes += static_cast<double>(plan.missing_bytes);
  EXPECT_TRUE(Plan(pro, {4, 1, 1, false}, demand).fits());
  demand.memory_bytes -= 16;
  EXPECT_FALSE(Plan(pro, {4, 1, 1, false}, demand).fits());
}

TEST(MemoryPlan, TheCacheIsReplicatedOverTensorRanksAndEachDataRanksOwn) {
  const config::ModelConfig flash = Preset("flash");
  const MemoryPlan tensor = Plan(flash, {2, 1, 1, false}, OnH200(1 << 20));
  const StageMemory& stage = tensor.stages[0];
  EXPECT_EQ(stage.layout.block_bytes, 899'840);  // all layers' 256 tokens, on both
  EXPECT_LE(stage.kv_bytes, stage.kv_budget_bytes);
  EXPECT_GT(stage.kv_bytes, stage.kv_budget_bytes * 99 / 100);
  EXPECT_EQ(tensor.NumRequests(8192), std::min<int64_t>(64, tensor.num_blocks / 32));
  EXPECT_EQ(tensor.NumRequests(1 << 20), tensor.num_blocks / 4096);
  EXPECT_EQ(tensor.NumRequests((1 << 20) + 1), 0);
}

TEST(MemoryPlan, StagesShareBlocksOfTheirOwnLayers) {
  const config::ModelConfig flash = Preset("flash");
  const MemoryPlan plan = Plan(flash, {1, 1, 2, false}, OnH200(1 << 20));
  ASSERT_EQ(plan.stages.size(), 2U);
  EXPECT_NEAR(
      static_cast<double>(plan.stages[0].layout.block_bytes + plan.stages[1].layout.block_bytes),
      899'840, 1024);
  EXPECT_EQ(plan.stages[0].pools, plan.stages[1].pools);
  EXPECT_GT(BytesOf(plan.stages[0], "embedding"), 0);
  EXPECT_EQ(BytesOf(plan.stages[0], "head"), 0);
  EXPECT_EQ(BytesOf(plan.stages[1], "embedding"), 0);
  EXPECT_GT(BytesOf(plan.stages[1], "head"), 0);
}

TEST(MemoryPlan, AContextIsShortenedOnlyWhereThatIsAskedFor) {
  const config::ModelConfig pro = Preset("pro");
  MemoryDemand demand = OnH200(1 << 20);
  demand.memory_bytes = 122.0 * (1 << 30);
  EXPECT_FALSE(Plan(pro, {8, 1, 1, false}, demand).fits());
  demand.auto_model_len = true;
  const MemoryPlan plan = Plan(pro, {8, 1, 1, false}, demand);
  EXPECT_TRUE(plan.fits());
  EXPECT_GT(plan.max_model_len, 0);
  EXPECT_LT(plan.max_model_len, 1 << 20);
  EXPECT_GE(plan.num_tokens(), plan.max_model_len);
}

TEST(MemoryPlan, AModelThatCannotBeSplitSoIsRefused) {
  const config::ModelConfig flash = Preset("flash");
  const auto plan =
      PlanMemory(flash, checkpoint::ShardSummary(flash), {1, 1, 44, false}, OnH200(4096));
  EXPECT_EQ(plan.status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace fathom::model
