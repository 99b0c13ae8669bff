// Several GPUs have the bits of one, whatever carries what they exchange: the built-in model, and
// four layers as wide as Flash's; prompts in chunks of every way to exchange, whole and with their
// tokens shared out, decodes as graphs.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "comm/cuda_testing.h"
#include "kernels/grouped_gemm/expert_plan.h"
#include "model/cuda_testing.h"
#include "model/own_text.h"

namespace fathom::model {
namespace {

constexpr int kMaxSeqs = 20, kMaxLength = 500;
constexpr int kSharedLength = 3000;  // of tokens that are shared out, past the first scored ones

struct Layout {
  const char* name;
  int num_ranks;
  Result<comm::CudaGroup> (*make)(std::span<const int> gpus, const comm::CudaGroupOptions&);
};

Result<comm::CudaGroup> MakeNccl(std::span<const int> gpus, const comm::CudaGroupOptions& options) {
  ASSIGN_OR_RETURN(const comm::NcclLibrary nccl, comm::LoadNccl());
  return comm::MakeNcclGroup(nccl, gpus, options);
}

class CudaRanksTest : public testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    const int size = GetParam().num_ranks, count = device::CountGpus();
    if (count < size) GTEST_SKIP() << size << " GPUs are needed, there are " << count;
  }

  void MakeModels(TestSource source, int max_seqs, int max_length = kMaxLength) {
    source_ = std::move(source);
    const int size = GetParam().num_ranks;
    const ModelLimits limits = TestModel::Limits(max_seqs, max_length);
    auto group = GetParam().make(comm::FirstGpus(size), GroupOptions(source_.config, limits, size));
    if (group.status().code() == StatusCode::kNotFound) GTEST_SKIP() << group.status().message();
    ASSERT_TRUE(group.ok()) << group.status().message();
    alone_ = source_.OnGpu(0, max_seqs, max_length);
    for (int r = 0; r < size; ++r) {
      const config::ParallelConfig parallel{.tensor_parallel_size = size};
      ranks_.push_back(
          source_.OnGpu(r, max_seqs, max_length,
                        {.poison_scratch = true, .collectives = (*group)[static_cast<size_t>(r)]},
                        {parallel, PlaceOf(parallel, r), nullptr}));
    }
  }

  void OnAll(const std::function<void(size_t)>& run) {
    std::vector<std::thread> threads;
    for (size_t r = 0; r < ranks_.size(); ++r) threads.emplace_back(run, r);
    for (std::thread& thread : threads) thread.join();
  }

  // In chunks of these sizes, the last one again and again.
  static void Run(TestModel& model, TestSequence& s, std::vector<int> chunks) {
    for (size_t i = 0; s.num_computed < static_cast<int>(s.token_ids.size()); ++i) {
      TestSequence* const sequence[] = {&s};
      const int count[] = {std::min(chunks[std::min(i, chunks.size() - 1)],
                                    static_cast<int>(s.token_ids.size()) - s.num_computed)};
      model.Step(sequence, count);
    }
  }

  static std::vector<TestSequence> Prompts(TestModel& model, int num_prompts) {
    std::vector<TestSequence> prompts;
    for (int i = 0; i < num_prompts; ++i) {
      prompts.push_back(
          model.Add(RandomTokens(model.config(), 3 + 11 * i, static_cast<uint32_t>(i) + 50)));
    }
    return prompts;
  }

  // Runs the prompts, then writes `length` tokens each, the likeliest, all in one batch.
  static void Write(TestModel& model, std::vector<TestSequence>& sequences, int length) {
    model.set_last_logits_only();
    std::vector<TestSequence*> pointers;
    for (TestSequence& s : sequences) {
      Run(model, s, {200});
      pointers.push_back(&s);
    }
    const std::vector<int> one(sequences.size(), 1);
    for (int i = 0; i < length; ++i) {
      for (TestSequence& s : sequences) {
        s.token_ids.push_back(static_cast<int32_t>(Best(s.logits.back())));
      }
      model.Step(pointers, one);
    }
  }
  static std::vector<TestSequence> Greedy(TestModel& model, int num_prompts, int length) {
    std::vector<TestSequence> sequences = Prompts(model, num_prompts);
    Write(model, sequences, length);
    return sequences;
  }

  // Runs a text in chunks on one GPU and on all ranks: the same logits after every token.
  void ExpectTheBitsOfOne(const std::vector<int32_t>& text, const std::vector<int>& chunks) {
    TestSequence expected = alone_->Add(text);
    Run(*alone_, expected, chunks);
    std::vector<TestSequence> actual(ranks_.size());
    OnAll([&](size_t r) {
      actual[r] = ranks_[r]->Add(text);
      Run(*ranks_[r], actual[r], chunks);
    });
    for (size_t r = 0; r < ranks_.size(); ++r) {
      size_t different = 0, first = text.size();
      for (size_t t = 0; t < text.size(); ++t) {
        if (actual[r].logits[t] == expected.logits[t]) continue;
        first = std::min(first, t);
        ++different;
      }
      EXPECT_EQ(different, 0u) << "rank " << r << ", first token " << first;
    }
  }

  // Steps of several sequences, steps[i][s] tokens of the s-th: prompts of any length beside each
  // other and beside single tokens. Only a step's last tokens have logits.
  void ExpectTheBatchesOfOne(const std::vector<std::vector<int>>& steps) {
    const auto run = [&](TestModel& model) {
      model.set_last_logits_only();
      std::vector<TestSequence> sequences;
      for (size_t s = 0; s < steps[0].size(); ++s) {
        int length = 0;
        for (const std::vector<int>& step : steps) length += step[s];
        sequences.push_back(
            model.Add(RandomTokens(source_.config, length, static_cast<uint32_t>(s) + 9)));
      }
      std::vector<TestSequence*> pointers;
      for (TestSequence& s : sequences) pointers.push_back(&s);
      std::vector<int32_t> ids;
      for (const std::vector<int>& step : steps) {
        model.Step(pointers, step);
        ids.insert(ids.end(), model.expert_ids().begin(), model.expert_ids().end());
      }
      return std::pair(std::move(sequences), std::move(ids));
    };
    const auto [expected, expected_ids] = run(*alone_);
    std::vector<std::pair<std::vector<TestSequence>, std::vector<int32_t>>> actual(ranks_.size());
    OnAll([&](size_t r) { actual[r] = run(*ranks_[r]); });
    for (size_t r = 0; r < ranks_.size(); ++r) {
      EXPECT_EQ(actual[r].second, expected_ids) << "rank " << r;
      for (size_t s = 0; s < expected.size(); ++s) {
        EXPECT_EQ(actual[r].first[s].logits, expected[s].logits) << "rank " << r << ", " << s;
      }
    }
  }

  // Prompts and greedy tokens in one batch.
  void ExpectTheTextOfOne(int num_prompts, int length) {
    const auto expected = Greedy(*alone_, num_prompts, length);
    std::vector<std::vector<TestSequence>> actual(ranks_.size());
    OnAll([&](size_t r) { actual[r] = Greedy(*ranks_[r], num_prompts, length); });
    for (size_t r = 0; r < ranks_.size(); ++r) {
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(actual[r][i].token_ids, expected[i].token_ids)
            << "rank " << r << " prompt " << i << " of " << num_prompts;
        EXPECT_EQ(actual[r][i].logits.back(), expected[i].logits.back())
            << "rank " << r << " prompt " << i << " of " << num_prompts;
      }
    }
  }

  TestSource source_;
  std::unique_ptr<TestModel> alone_;
  std::vector<std::unique_ptr<TestModel>> ranks_;
};

TEST_P(CudaRanksTest, TheBuiltInModelHasTheBitsOfOneGpu) {
  MakeModels(OpenTinyModel(), kMaxSeqs);
  if (ranks_.empty()) return;
  ExpectTheBitsOfOne(OwnText(*alone_, kMaxLength, 1).token_ids, {300, 100, 17, 9, 1});
}

TEST_P(CudaRanksTest, TheBuiltInModelWritesTheTextOfOneGpu) {
  MakeModels(OpenTinyModel(), kMaxSeqs);
  if (ranks_.empty()) return;
  ExpectTheTextOfOne(20, 256);
}

TEST_P(CudaRanksTest, LayersAsWideAsFlashHaveTheBitsOfOneGpu) {
  MakeModels(WideModel(), 4);
  if (ranks_.empty()) return;
  ExpectTheBitsOfOne(RandomTokens(source_.config, kMaxLength, 1), {300, 100, 17, 9, 1});
}

TEST_P(CudaRanksTest, LayersAsWideAsFlashWriteTheTextOfOneGpu) {
  MakeModels(WideModel(), 40);
  if (ranks_.empty()) return;
  for (const int num_prompts : {2, 4, 12, 22}) ExpectTheTextOfOne(num_prompts, 8);
}

// Kernels run beside each other, at other times in every run: of 12 sequences the query products'
// blocks beside those of attention.
TEST_P(CudaRanksTest, TheSameStepsHaveTheSameBitsEveryTime) {
  MakeModels(WideModel(1), 12);
  if (ranks_.empty()) return;
  const int rounds = 40, length = 8;
  std::vector<TestSequence> expected = Prompts(*alone_, 12);
  Write(*alone_, expected, length);
  OnAll([&](size_t r) {
    const std::vector<TestSequence> prompts = Prompts(*ranks_[r], 12);
    for (int round = 0; round < rounds; ++round) {
      std::vector<TestSequence> actual = prompts;
      Write(*ranks_[r], actual, length);
      for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_EQ(actual[i].logits, expected[i].logits)
            << "rank " << r << " prompt " << i << " round " << round;
      }
    }
  });
}

// On two ranks from 256 tokens on, on four from 512. Behind 2,052 tokens selections are scored.
TEST_P(CudaRanksTest, SharedOutPromptsHaveTheBitsOfOneGpu) {
  MakeModels(WideModel(), 1, kSharedLength);
  if (ranks_.empty()) return;
  ExpectTheBitsOfOne(RandomTokens(source_.config, kSharedLength, 2),
                     {1000, 600, 511, 640, 129, 100, 17, 1});
}

TEST_P(CudaRanksTest, SharedOutPromptsOfTheBuiltInModelHaveTheBitsOfOneGpu) {
  MakeModels(OpenTinyModel(), 2, kSharedLength);
  if (ranks_.empty()) return;
  const auto text = OwnText(*alone_, kMaxLength, 1).token_ids;
  std::vector<int32_t> repeated;
  while (repeated.size() + text.size() <= size_t{kSharedLength}) {
    repeated.insert(repeated.end(), text.begin(), text.end());
  }
  ExpectTheBitsOfOne(repeated, {256, 257, 255, 1024, 513, 512, 100, 1});
}

TEST_P(CudaRanksTest, SharedOutBatchesHaveTheBitsOfOneGpu) {
  MakeModels(WideModel(), 5, 1000);
  if (ranks_.empty()) return;
  // A share ends in the middle of a prompt, and holds whole ones.
  ExpectTheBatchesOfOne(
      {{301, 77, 450, 1, 2}, {1, 1, 500, 1, 5}, {1, 1, 1, 1, 1}, {130, 127, 1, 128, 600}});
}

// Whose experts are those of prompts.
TEST_P(CudaRanksTest, DecodesOfManySequencesHaveTheBitsOfOneGpu) {
  constexpr int kSeqs = kernels::kLargeFp4Tokens + 7;
  MakeModels(WideModel(1), kSeqs, 16);
  if (ranks_.empty()) return;
  const std::vector<int> prompts(kSeqs, 3), decode(kSeqs, 1);
  ExpectTheBatchesOfOne({prompts, decode, decode});
}

// Ranks that write to each other's memory.
class CudaRanksOfPeersTest : public CudaRanksTest {};

// Single tokens, of whose entries ranks score a part each, as graphs.
TEST_P(CudaRanksOfPeersTest, LongContextsHaveTheBitsOfOneGpu) {
  constexpr int kChunk = 4096, kChunks = 52, kDecodes = 8, kLength = kChunk * kChunks + kDecodes;
  MakeModels(WideModel(), 1, kLength);
  const auto text = RandomTokens(source_.config, kLength, 5);
  std::vector<int> chunks(kChunks, kChunk);
  chunks.push_back(1);
  const auto run = [&](TestModel& model) {
    model.set_last_logits_only();
    TestSequence s = model.Add(text);
    Run(model, s, chunks);
    return std::move(s.logits);
  };
  const auto expected = run(*alone_);
  std::vector<std::vector<std::vector<float>>> actual(ranks_.size());
  OnAll([&](size_t r) { actual[r] = run(*ranks_[r]); });
  for (size_t r = 0; r < ranks_.size(); ++r) EXPECT_TRUE(actual[r] == expected) << "rank " << r;
}

constexpr Layout kPeers2{"Peers2", 2, comm::MakePeerGroup},
    kPeers4{"Peers4", 4, comm::MakePeerGroup};
INSTANTIATE_TEST_SUITE_P(Layouts, CudaRanksTest,
                         testing::Values(kPeers2, Layout{"Nccl2", 2, MakeNccl},
                                         Layout{"Host2", 2, comm::MakeHostGroup}, kPeers4,
                                         Layout{"Nccl4", 4, MakeNccl},
                                         Layout{"Host4", 4, comm::MakeHostGroup}),
                         [](const auto& layout) { return layout.param.name; });
INSTANTIATE_TEST_SUITE_P(Layouts, CudaRanksOfPeersTest, testing::Values(kPeers2, kPeers4),
                         [](const auto& layout) { return layout.param.name; });

}  // namespace
}  // namespace fathom::model
