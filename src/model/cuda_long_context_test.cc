// Single tokens behind a long prompt, in layers as wide as Flash's: graphs have the bits of
// operator by operator, and from the cache that the prompt left the CPU chooses the same entries
// and words.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>

#include "model/cuda_testing.h"

namespace fathom::model {
namespace {

constexpr int kDecodes = 4, kChunk = 4096;

struct Choices final : ChoiceRecorder {
  bool wants_streams() const override { return false; }
  void OnRouting(int, int, std::span<const int32_t>) override {}
  void OnIndex(int, int, std::span<const int32_t> ids) override {
    entries.emplace_back(ids.begin(), ids.end());
  }
  std::vector<std::vector<int32_t>> entries;  // of each token
};

class CudaLongContextTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (auto gpu = device::MakeCudaDevice(0); !gpu.ok()) GTEST_SKIP() << gpu.status().message();
  }

  // A layer that selects entries, and one that attends to all of its own.
  static TestSource TwoLayers() {
    TestSource source = WideModel(2);
    source.config.compress_ratios = {4, 128};
    return source;
  }

  // The last tokens of a sequence that stands before them, one by one.
  static TestSequence Decode(TestModel& model, TestSequence s, ChoiceRecorder* recorder) {
    s.logits.clear();
    TestSequence* const sequences[] = {&s};
    const int one[] = {1};
    for (int i = 0; i < kDecodes; ++i) model.Step(sequences, one, recorder);
    return s;
  }

  // What index queries are rounded from, sums of BF16 values in another order, differs by some
  // 0.003 of its size, and a step of FP4 is a quarter of it: one code in 80 is another, and scores
  // differ by a 36th of their spread. Of 67,500 entries a twelfth of the chosen ones lie that near
  // to the last one's score, and two in five of these change places: 3%. Twice as many may.
  static void ExpectSameEntries(const Choices& expected, const Choices& actual) {
    ASSERT_EQ(expected.entries.size(), size_t{kDecodes});
    ASSERT_EQ(actual.entries.size(), size_t{kDecodes});
    size_t chosen = 0, same = 0;
    for (size_t i = 0; i < size_t{kDecodes}; ++i) {
      std::vector<int32_t> both;
      std::set_intersection(expected.entries[i].begin(), expected.entries[i].end(),
                            actual.entries[i].begin(), actual.entries[i].end(),
                            std::back_inserter(both));
      chosen += expected.entries[i].size();
      same += both.size();
    }
    EXPECT_LE((chosen - same) * 16, chosen) << same << " of " << chosen;
  }
};

TEST_P(CudaLongContextTest, TokensChooseAsTheCpu) {
  const int length = GetParam(), max_length = length + kDecodes;
  const TestSource source = TwoLayers();
  const auto gpu = source.OnGpu(0, 1, max_length);
  TestModel cpu(source.config, config::Numerics::kOfficial, 4, 1, max_length);
  const auto ids = RandomTokens(source.config, max_length, 1);
  gpu->set_last_logits_only();
  TestSequence prompt = gpu->Add(ids), on_cpu = cpu.Add(ids);
  while (prompt.num_computed < length) {
    TestSequence* const sequences[] = {&prompt};
    const int counts[] = {std::min(kChunk, length - prompt.num_computed)};
    gpu->Step(sequences, counts);
  }
  cpu.CopyCache(*gpu, prompt, on_cpu);
  Choices chosen, expected_chosen;
  const TestSequence replayed = Decode(*gpu, prompt, nullptr);
  const TestSequence watched = Decode(*gpu, prompt, &chosen);  // the same tokens once more
  Decode(cpu, on_cpu, &expected_chosen);
  EXPECT_TRUE(replayed.logits == watched.logits);
  ExpectSameEntries(expected_chosen, chosen);
}

// Beyond 16,384 tokens and beyond 262,144 other kernels run than before.
INSTANTIATE_TEST_SUITE_P(Lengths, CudaLongContextTest, testing::Values(20000, 140000, 270000),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace fathom::model
