// The built-in model, and four layers as wide as Flash's, on GPUs that are data ranks and have some
// of the experts each, against the model on one GPU: the same bits for every prompt, whatever the
// others do, and for decodes, which are graphs.
#include "comm/cuda_expert_ranks.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "comm/cuda_testing.h"
#include "model/cuda_testing.h"

namespace fathom::model {
namespace {

constexpr int kMaxSeqs = 8, kMaxLength = 700;

// A rank's part of a step: so many tokens of each of its first sequences.
using Chunk = std::vector<int>;

struct Layout {
  const char* name;
  int num_ranks;
  TestSource (*source)();
};

class CudaExpertRanksTest : public testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    const int size = GetParam().num_ranks, count = device::CountGpus();
    if (count < size) GTEST_SKIP() << size << " GPUs are needed, there are " << count;
    auto group = comm::MakeCudaExpertRanks(comm::FirstGpus(size),
                                           {.hidden = source_.config.hidden_size,
                                            .num_chosen = source_.config.num_experts_per_token,
                                            .max_tokens = kMaxSeqs * kMaxLength});
    ASSERT_TRUE(group.ok()) << group.status().message();
    const config::ParallelConfig parallel{.data_parallel_size = size,
                                          .enable_expert_parallel = true};
    for (int r = 0; r < size; ++r) {
      alone_.push_back(source_.OnGpu(r, kMaxSeqs, kMaxLength));
      ranks_.push_back(source_.OnGpu(r, kMaxSeqs, kMaxLength,
                                     {.expert_ranks = (*group)[static_cast<size_t>(r)]},
                                     {parallel, PlaceOf(parallel, r), nullptr}));
    }
  }

  std::vector<TestSequence> Sequences(TestModel& model, size_t rank) const {
    std::vector<TestSequence> sequences;
    for (int i = 0; i < kMaxSeqs; ++i) {
      sequences.push_back(
          model.Add(RandomTokens(source_.config, kMaxLength,
                                 static_cast<uint32_t>(rank) * 100u + static_cast<uint32_t>(i))));
    }
    return sequences;
  }

  // steps[i][r]: what rank r runs in step i. All logits of each rank.
  std::vector<std::vector<TestSequence>> RunAll(const std::vector<std::vector<Chunk>>& steps,
                                                bool decode, bool alone) {
    auto& models = alone ? alone_ : ranks_;
    auto& sequences = alone ? of_alone_ : of_ranks_;
    if (sequences.empty()) {
      for (size_t r = 0; r < models.size(); ++r) sequences.push_back(Sequences(*models[r], r));
    }
    std::vector<std::thread> threads;
    for (size_t r = 0; r < models.size(); ++r) {
      threads.emplace_back([&, r] {
        for (const std::vector<Chunk>& step : steps) {
          std::vector<int32_t> tokens;
          for (const Chunk& c : step) tokens.push_back(std::accumulate(c.begin(), c.end(), 0));
          if (alone && tokens[r] == 0) continue;
          std::vector<TestSequence*> own;
          for (size_t i = 0; i < step[r].size(); ++i) own.push_back(&sequences[r][i]);
          models[r]->Step(own, step[r], nullptr,
                          alone ? std::span<const int32_t>() : std::span<const int32_t>(tokens),
                          decode);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return sequences;
  }

  void ExpectSame(const std::vector<std::vector<Chunk>>& steps, bool decode) {
    const auto expected = RunAll(steps, decode, true), actual = RunAll(steps, decode, false);
    for (size_t r = 0; r < expected.size(); ++r) {
      for (size_t i = 0; i < expected[r].size(); ++i) {
        EXPECT_EQ(actual[r][i].logits, expected[r][i].logits) << "rank " << r << ", sequence " << i;
      }
    }
  }

  // The same for ranks beyond the second as for the first two in turn.
  std::vector<Chunk> Step(const Chunk& even, const Chunk& odd) const {
    std::vector<Chunk> step;
    for (int r = 0; r < GetParam().num_ranks; ++r) step.push_back(r % 2 == 0 ? even : odd);
    return step;
  }

  const TestSource source_ = GetParam().source();
  std::vector<std::unique_ptr<TestModel>> alone_, ranks_;
  std::vector<std::vector<TestSequence>> of_alone_, of_ranks_;
};

TEST_P(CudaExpertRanksTest, GiveTheBitsOfOneGpu) {
  const Chunk none, all(kMaxSeqs, 9), one(1, 1), four(4, 1), eight(8, 1);
  ExpectSame({Step({300}, {17}), Step({100, 30}, none), Step(none, {2, 2, 2}), Step({3}, {600}),
              Step(all, all)},
             false);
  ExpectSame({Step(four, four), Step(eight, eight), Step(one, one), Step(four, none),
              Step(none, eight), Step(four, four), Step(eight, eight)},
             true);
}

TestSource Wide() { return WideModel(); }

INSTANTIATE_TEST_SUITE_P(Layouts, CudaExpertRanksTest,
                         testing::Values(Layout{"BuiltIn2", 2, OpenTinyModel},
                                         Layout{"BuiltIn4", 4, OpenTinyModel},
                                         Layout{"Wide2", 2, Wide}, Layout{"Wide4", 4, Wide}),
                         [](const auto& layout) { return layout.param.name; });

}  // namespace
}  // namespace fathom::model
