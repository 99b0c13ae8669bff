// Decode steps as graphs: padded, replayed, and from scratch memory that holds nothing. The bits
// are those of single launches; sequences that are not part of a step keep their cache.
#include <gtest/gtest.h>

#include "kernels/grouped_gemm/expert_plan.h"
#include "model/cuda_step.h"
#include "model/cuda_testing.h"

namespace fathom::model {
namespace {

constexpr int kMaxSeqs = 20, kMaxLength = 420;

TEST(DecodeBucket, IsOneOfFewSizes) {
  const std::vector<std::pair<int, int>> expected = {{1, 1},   {2, 2},   {3, 4},   {5, 8},
                                                     {8, 8},   {9, 12},  {13, 16}, {17, 24},
                                                     {24, 24}, {25, 30}, {30, 30}};
  for (const auto& [num_seqs, bucket] : expected) EXPECT_EQ(DecodeBucket(num_seqs, 30), bucket);
}

class CudaGraphTest : public testing::Test {
 protected:
  void SetUp() override {
    if (auto gpu = device::MakeCudaDevice(0); !gpu.ok()) GTEST_SKIP() << gpu.status().message();
  }

  std::unique_ptr<TestModel> Make(const CudaModelOptions& options) const {
    return tiny_.OnGpu(0, kMaxSeqs, kMaxLength, options);
  }

  // Sequences of several lengths, their prompts run alone.
  std::vector<TestSequence> Prefill(TestModel& model, int count) const {
    std::vector<TestSequence> sequences;
    for (int i = 0; i < count; ++i) {
      sequences.push_back(
          model.Add(RandomTokens(tiny_.config, kMaxLength, 100 + static_cast<uint32_t>(i))));
      TestSequence* const one[] = {&sequences.back()};
      const int prompt[] = {1 + (i * 61) % 390};
      model.Step(one, prompt);
    }
    return sequences;
  }

  static void Decode(TestModel& model, std::span<TestSequence> sequences, int num_steps) {
    std::vector<TestSequence*> pointers;
    for (TestSequence& s : sequences) pointers.push_back(&s);
    const std::vector<int> one(sequences.size(), 1);
    for (int i = 0; i < num_steps; ++i) model.Step(pointers, one);
  }

  static void ExpectSameLogits(std::span<const TestSequence> a, std::span<const TestSequence> b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].logits, b[i].logits) << "sequence " << i;
  }

  const TestSource tiny_ = OpenTinyModel();
};

TEST_F(CudaGraphTest, ReplaysGiveTheBitsOfSingleLaunches) {
  const auto graphs = Make({}), eager = Make({.enforce_eager = true});
  auto replayed = Prefill(*graphs, 17), launched = Prefill(*eager, 17);
  for (const size_t n : {1, 2, 3, 5, 8, 11, 17}) {
    Decode(*graphs, std::span(replayed).first(n), 3);
    Decode(*eager, std::span(launched).first(n), 3);
  }
  ExpectSameLogits(replayed, launched);
}

// So many that their experts are those of prompts.
TEST_F(CudaGraphTest, ReplaysOfManySequencesGiveTheBitsOfSingleLaunches) {
  constexpr int kSeqs = kernels::kLargeFp4Tokens + 7, kPrompt = 3;
  const TestSource wide = WideModel(1);
  const auto graphs = wide.OnGpu(0, kSeqs, 16),
             eager = wide.OnGpu(0, kSeqs, 16, {.enforce_eager = true});
  const auto run = [&](TestModel& model) {
    std::vector<TestSequence> sequences;
    for (uint32_t i = 0; i < kSeqs; ++i) {
      sequences.push_back(model.Add(RandomTokens(wide.config, 16, 300 + i)));
    }
    std::vector<TestSequence*> pointers;
    for (TestSequence& s : sequences) pointers.push_back(&s);
    model.Step(pointers, std::vector<int>(kSeqs, kPrompt));
    Decode(model, sequences, 3);
    return sequences;
  };
  ExpectSameLogits(run(*graphs), run(*eager));
}

// Behind 2,052 tokens entries are scored: up to 8 sequences' beside the query products.
TEST_F(CudaGraphTest, SelectsBesideProductsWhatIsSelectedBehindThem) {
  constexpr int kLength = 2100, kPrompt = 2050, kSteps = 12;
  const TestSource wide = WideModel();
  const auto graphs = wide.OnGpu(0, 3, kLength);
  const auto one_by_one = wide.OnGpu(0, 3, kLength, {.sync_operators = true});
  const auto run = [&](TestModel& model) {
    std::vector<TestSequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) {
      sequences.push_back(model.Add(RandomTokens(wide.config, kLength, 200 + i)));
      TestSequence* const one[] = {&sequences.back()};
      const int prompt[] = {kPrompt - 2 * static_cast<int>(i)};
      model.Step(one, prompt);
    }
    for (const size_t n : {1, 3}) Decode(model, std::span(sequences).first(n), kSteps);
    return sequences;
  };
  ExpectSameLogits(run(*graphs), run(*one_by_one));
}

TEST_F(CudaGraphTest, NothingIsReadThatTheStepDidNotWrite) {
  const auto clean = Make({}), poisoned = Make({.poison_scratch = true});
  auto expected = Prefill(*clean, 7), actual = Prefill(*poisoned, 7);
  for (const size_t n : {1, 3, 5, 7}) {
    Decode(*clean, std::span(expected).first(n), 2);
    Decode(*poisoned, std::span(actual).first(n), 2);
  }
  ExpectSameLogits(actual, expected);
}

TEST_F(CudaGraphTest, PaddingTouchesNobodysCache) {
  const auto model = Make({}), alone = Make({});
  auto sequences = Prefill(*model, 12), expected = Prefill(*alone, 12);
  Decode(*model, std::span(sequences).subspan(0, 3), 5);   // 4 with padding
  Decode(*model, std::span(sequences).subspan(3, 5), 5);   // 8
  Decode(*model, std::span(sequences).subspan(8, 4), 10);  // none
  Decode(*alone, std::span(expected).subspan(8, 4), 10);
  for (size_t i = 8; i < 12; ++i) EXPECT_EQ(sequences[i].logits, expected[i].logits) << i;
}

}  // namespace
}  // namespace fathom::model
