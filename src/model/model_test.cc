// The model end to end: the same bits whole, in chunks, batched, on any number of threads, and
// after rollbacks.
#include "model/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "model/fp8_experts.h"
#include "model/testing.h"

namespace fathom::model {
namespace {

using config::Numerics;

class ModelTest : public testing::TestWithParam<Numerics> {
 protected:
  static constexpr int kLength = 600;
};

// Index of the first row that differs, or -1.
int FirstDifference(const TestSequence& a, const TestSequence& b) {
  if (a.logits.size() != b.logits.size()) return 0;
  for (size_t i = 0; i < a.logits.size(); ++i) {
    if (a.logits[i] != b.logits[i]) return static_cast<int>(i);
  }
  return -1;
}

TEST_P(ModelTest, ChunksOfAnySizeGiveTheSameBits) {
  TestModel model(SmallConfig(), GetParam(), 2);
  const auto ids = RandomTokens(model.config(), kLength, 1);
  TestSequence whole = model.Add(ids);
  model.RunInChunks(whole, kLength);
  for (const float x : whole.logits.back()) ASSERT_TRUE(std::isfinite(x));
  for (const int chunk : {1, 3, 64, 257}) {
    TestSequence chunked = whole;
    chunked.index = 1;
    chunked.num_computed = 0;
    chunked.logits.clear();
    model.RunInChunks(chunked, chunk);
    EXPECT_EQ(FirstDifference(whole, chunked), -1) << "chunk " << chunk;
  }
}

TEST_P(ModelTest, ABatchGivesEverySequenceTheBitsItHasAlone) {
  TestModel model(SmallConfig(), GetParam(), 2);
  const int lengths[] = {kLength, 1, 130, 257};
  std::vector<TestSequence> alone, batched;
  for (int i = 0; i < 4; ++i) {
    alone.push_back(
        model.Add(RandomTokens(model.config(), lengths[i], 10 + static_cast<uint32_t>(i))));
    model.RunInChunks(alone.back(), 100);
  }
  // Together, in steps that mix prefills of several sizes with single tokens.
  batched = alone;
  for (TestSequence& s : batched) {
    s.num_computed = 0;
    s.logits.clear();
  }
  const int steps[] = {37, 5, 1, 90};
  for (int step = 0; step < 200; ++step) {
    std::vector<TestSequence*> running;
    std::vector<int> counts;
    for (size_t i = 0; i < 4; ++i) {
      const int left = lengths[i] - batched[i].num_computed;
      if (left == 0) continue;
      running.push_back(&batched[i]);
      counts.push_back(std::min(left, steps[(i + static_cast<size_t>(step)) % 4]));
    }
    if (running.empty()) break;
    model.Step(running, counts);
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(FirstDifference(alone[i], batched[i]), -1) << i;
}

TEST_P(ModelTest, ThreadsDoNotChangeTheBits) {
  const auto ids = RandomTokens(SmallConfig(), 200, 3);
  std::vector<TestSequence> results;
  for (const int threads : {1, 2, 5}) {
    TestModel model(SmallConfig(), GetParam(), threads);
    results.push_back(model.Add(ids));
    model.RunInChunks(results.back(), 64);
    EXPECT_EQ(FirstDifference(results.front(), results.back()), -1) << threads;
  }
}

TEST_P(ModelTest, ARollbackLeavesNoTrace) {
  TestModel model(SmallConfig(), GetParam(), 2);
  const auto ids = RandomTokens(model.config(), 300, 4);
  TestSequence expected = model.Add(ids);
  model.RunInChunks(expected, 300);
  // At every position around the boundaries of 4, 64, 128 and 256, up to the longest rollback.
  TestSequence drafted = model.Add(ids);
  while (drafted.num_computed < 290) {
    const int rejected = 1 + drafted.num_computed % kv_cache::kMaxRollbackTokens;
    TestSequence* const sequences[] = {&drafted};
    const int drafts[] = {rejected};
    for (int i = 0; i < rejected; ++i)
      drafted.token_ids[static_cast<size_t>(drafted.num_computed) + static_cast<size_t>(i)] = 7;
    model.Step(sequences, drafts);
    model.Rollback(drafted, rejected);
    drafted.token_ids = ids;
    const int next[] = {std::min(2, 290 - drafted.num_computed)};
    model.Step(sequences, next);
  }
  expected.logits.resize(290);
  EXPECT_EQ(FirstDifference(expected, drafted), -1);
}

TEST_P(ModelTest, RecordsTheChoices) {
  struct Recorder final : ChoiceRecorder {
    void OnRouting(int layer, int, std::span<const int32_t> ids) override {
      routed.insert(layer);
      expert_ids.insert(expert_ids.end(), ids.begin(), ids.end());
      EXPECT_TRUE(std::is_sorted(ids.begin(), ids.end()));
      EXPECT_EQ(ids.size(), 3u);
    }
    void OnIndex(int layer, int row, std::span<const int32_t> entries) override {
      indexed.insert(layer);
      EXPECT_EQ(entries.size(), static_cast<size_t>(std::min(16, (row + 1) / 4)));
      EXPECT_TRUE(std::is_sorted(entries.begin(), entries.end()));
      for (const int32_t j : entries) EXPECT_LT(j, (row + 1) / 4);
      skipped |= !entries.empty() && entries.back() >= static_cast<int32_t>(entries.size());
    }
    std::set<int> routed, indexed;
    std::vector<int32_t> expert_ids;  // layer by layer, token by token
    bool skipped = false;             // some token left an entry out
  } recorder;
  TestModel model(SmallConfig(), GetParam(), 2);
  TestSequence sequence = model.Add(RandomTokens(model.config(), 120, 5));
  TestSequence* const sequences[] = {&sequence};
  const int counts[] = {120};
  model.Step(sequences, counts, &recorder);
  EXPECT_EQ(recorder.routed, (std::set<int>{0, 1, 2, 3, 4}));
  EXPECT_EQ(model.expert_ids(), recorder.expert_ids);
  EXPECT_EQ(recorder.indexed, (std::set<int>{1, 3}));
  EXPECT_TRUE(recorder.skipped);
}

INSTANTIATE_TEST_SUITE_P(BothNumerics, ModelTest,
                         testing::Values(Numerics::kOfficial, Numerics::kFp32),
                         [](const auto& param_info) {
                           return param_info.param == Numerics::kOfficial ? "Official" : "Fp32";
                         });

TEST(Model, OfficialNumericsStayCloseToFp32) {
  TestModel official(SmallConfig(), Numerics::kOfficial, 2);
  TestModel fp32(SmallConfig(), Numerics::kFp32, 2);
  const auto ids = RandomTokens(official.config(), 100, 6);
  TestSequence a = official.Add(ids), b = fp32.Add(ids);
  official.RunInChunks(a, 100);
  fp32.RunInChunks(b, 100);
  double difference = 0, magnitude = 0;
  for (size_t i = 0; i < a.logits.size(); ++i) {
    for (size_t j = 0; j < a.logits[i].size(); ++j) {
      difference += std::pow(a.logits[i][j] - b.logits[i][j], 2);
      magnitude += std::pow(b.logits[i][j], 2);
    }
  }
  EXPECT_GT(difference, 0);
  EXPECT_LT(std::sqrt(difference / magnitude), 0.3);
}

TEST(Model, Fp8IndexKeysRunInChunksToo) {
  TestModel model(SmallConfig(), Numerics::kOfficial, 2, 2, 600, kv_cache::IndexKeyDType::kFp8);
  const auto ids = RandomTokens(model.config(), 300, 8);
  TestSequence whole = model.Add(ids), chunked = model.Add(ids);
  model.RunInChunks(whole, 300);
  model.RunInChunks(chunked, 7);
  EXPECT_EQ(FirstDifference(whole, chunked), -1);
}

TEST(Model, ExpertsOfTheSameValuesAsFp8HaveTheBitsOfFp4) {
  const std::string folder = std::string(FATHOM_MODELS) + "/fathom-tiny";
  config::ModelConfig config = checkpoint::LoadModelConfig(folder).value();
  const auto fp4 = std::move(checkpoint::OpenCheckpoint(folder, config).value());
  const auto tokens = RandomTokens(config, 150, 1);
  const auto logits_of = [&](const checkpoint::TensorSource& weights) {
    TestModel model(config, config::Numerics::kOfficial, 2, 1, 150, kv_cache::IndexKeyDType::kFp4,
                    &weights);
    TestSequence s = model.Add(tokens);
    model.RunInChunks(s, 100);
    return s.logits;
  };
  const auto expected = logits_of(*fp4);
  config.expert_dtype = config::ExpertDType::kFp8;
  EXPECT_EQ(logits_of(Fp8Experts(*fp4)), expected);
}

TEST(Model, RefusesSizesTheKernelsDoNotRun) {
  config::ModelConfig config = SmallConfig();
  config.hc_mult = 2;
  auto device = device::MakeCpuDevice(1);
  const auto model =
      MakeDeepSeekV4(config, Numerics::kOfficial, kv_cache::IndexKeyDType::kFp4, nullptr,
                     {.max_batched_tokens = 1, .max_num_seqs = 1, .max_model_len = 1}, *device);
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.status().code(), StatusCode::kBadModel);
  EXPECT_EQ(model.status().message(), "hc_mult is 2: this build runs 4");
}

}  // namespace
}  // namespace fathom::model
