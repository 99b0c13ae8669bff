#include "runtime/scorer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "runtime/testing/fake_model.h"

namespace fathom::runtime {
namespace {

constexpr int kVocab = 32;

// Logits that depend on every token so far.
void HashOfAll(std::span<const int32_t> token_ids, int64_t, std::span<float> logits) {
  uint64_t h = 1;
  for (const int32_t id : token_ids) h = (h ^ static_cast<uint64_t>(id)) * 0x100000001b3u;
  for (float& x : logits) {
    h = h * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<float>(h >> 40) * 0x1p-24f;
  }
}

struct Collector final : ScoreVisitor {
  void OnStep(std::span<const TokenPlace> rows) override { num_rows += rows.size(); }
  void OnLogits(const TokenPlace& place, std::span<const float> logits) override {
    auto& rows = logits_of[place.sequence_idx];
    EXPECT_EQ(place.position, static_cast<int64_t>(rows.size()));
    rows.emplace_back(logits.begin(), logits.end());
  }
  std::map<size_t, std::vector<std::vector<float>>> logits_of;
  size_t num_rows = 0;
};

std::vector<std::vector<int32_t>> RandomSequences() {
  std::mt19937 random(3);
  std::vector<std::vector<int32_t>> sequences;
  for (const size_t length : {1, 600, 64, 257, 300}) {
    std::vector<int32_t> tokens(length);
    for (int32_t& id : tokens) id = static_cast<int32_t>(random() % kVocab);
    sequences.push_back(std::move(tokens));
  }
  return sequences;
}

ScorerOptions Options(int chunk, int num_seqs) {
  return {.vocab_size = kVocab,
          .chunk_tokens = chunk,
          .num_seqs = num_seqs,
          .max_model_len = 700,
          .limits = {.max_batched_tokens = 4096, .max_num_seqs = 8, .max_model_len = 700}};
}

TEST(Scorer, GivesTheSameLogitsInAnyChunksAndBatches) {
  auto device = device::MakeCpuDevice(1);
  FakeModel model(kVocab, HashOfAll);
  const auto sequences = RandomSequences();
  for (const auto& [chunk, num_seqs] : {std::pair{700, 1}, {1, 1}, {64, 3}, {257, 5}, {3, 2}}) {
    auto scorer = Scorer::Make(Options(chunk, num_seqs), FakeLayout(), model, *device);
    ASSERT_TRUE(scorer.ok()) << scorer.status().message();
    Collector collector;
    ASSERT_TRUE((*scorer)->Run(sequences, collector, nullptr).ok());
    EXPECT_EQ(collector.num_rows, 1u + 600 + 64 + 257 + 300);
    for (size_t s = 0; s < sequences.size(); ++s) {
      ASSERT_EQ(collector.logits_of[s].size(), sequences[s].size());
      for (size_t p = 0; p < sequences[s].size(); ++p) {
        std::vector<float> expected(kVocab);
        HashOfAll(std::span(sequences[s]).first(p + 1), 0, expected);
        ASSERT_EQ(collector.logits_of[s][p], expected) << s << " " << p << " chunk " << chunk;
      }
    }
  }
}

TEST(Scorer, RunsFewerSequencesAtOnceWhenMemoryIsShort) {
  auto device = device::MakeCpuDevice(1);
  FakeModel model(kVocab, HashOfAll);
  ScorerOptions options = Options(64, 4);
  const auto layout = FakeLayout();
  // Three blocks: one sequence of 700, and no two of the long ones.
  options.kv_cache_bytes =
      3 * layout.block_bytes + 30 * layout.window_page_bytes + 4 * layout.state.slot_bytes;
  auto scorer = Scorer::Make(options, layout, model, *device);
  ASSERT_TRUE(scorer.ok()) << scorer.status().message();
  Collector collector;
  const auto sequences = RandomSequences();
  ASSERT_TRUE((*scorer)->Run(sequences, collector, nullptr).ok());
  for (size_t s = 0; s < sequences.size(); ++s) {
    EXPECT_EQ(collector.logits_of[s].size(), sequences[s].size());
  }
}

TEST(Scorer, RefusesWhatItCannotRunAndSaysWhich) {
  auto device = device::MakeCpuDevice(1);
  FakeModel model(kVocab, HashOfAll);
  EXPECT_THAT(Scorer::Make(Options(4096, 2), FakeLayout(), model, *device).status().message(),
              testing::HasSubstr("chunks of 4096 tokens of 2 sequences"));
  auto scorer = Scorer::Make(Options(16, 1), FakeLayout(), model, *device);
  ASSERT_TRUE(scorer.ok());
  Collector collector;
  const auto message = [&](std::vector<std::vector<int32_t>> sequences) {
    return (*scorer)->Run(sequences, collector, nullptr).message();
  };
  EXPECT_THAT(message({{1}, {}}), testing::HasSubstr("sequence 1 has 0 tokens"));
  EXPECT_THAT(message({std::vector<int32_t>(701)}), testing::HasSubstr("1 to 700"));
  EXPECT_THAT(message({{1, 32}}), testing::HasSubstr("token id 32"));
  EXPECT_EQ(collector.num_rows, 0u);
}

}  // namespace
}  // namespace fathom::runtime
