// The built-in model on several GPUs against one: log-probabilities on its own text, prompts in
// chunks of every way to add up over ranks and decodes as graphs; the same bits on all ranks; the
// same greedy text.
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "comm/cuda_testing.h"
#include "comm/memory_transport.h"
#include "model/own_text.h"

namespace fathom::model {
namespace {

constexpr int kMaxSeqs = 20, kMaxLength = 500;

struct Layout {
  const char* name;
  int num_ranks;
  Result<comm::CudaGroup> (*make)(std::span<const int> gpus, const comm::CudaGroupOptions&);
};

Result<comm::CudaGroup> MakeNccl(std::span<const int> gpus, const comm::CudaGroupOptions& options) {
  ASSIGN_OR_RETURN(const comm::NcclLibrary nccl, comm::LoadNccl());
  return comm::MakeNcclGroup(nccl, gpus, options);
}
Result<comm::CudaGroup> MakeHost(std::span<const int> gpus, const comm::CudaGroupOptions& options) {
  comm::CudaGroup group;
  for (auto& t : comm::MakeMemoryTransports(static_cast<int>(gpus.size()), options.timeout)) {
    ASSIGN_OR_RETURN(auto collectives, comm::MakeHostCollectives(std::move(t), options));
    group.push_back(std::move(collectives));
  }
  return group;
}

class CudaRanksTest : public testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    const int size = GetParam().num_ranks, count = device::CountGpus();
    if (count < size) GTEST_SKIP() << size << " GPUs are needed, there are " << count;
    const std::string folder = std::string(FATHOM_MODELS) + "/fathom-tiny";
    config_ = checkpoint::LoadModelConfig(folder).value();
    checkpoint_ = std::move(checkpoint::OpenCheckpoint(folder, config_).value());
    auto group = GetParam().make(comm::FirstGpus(size), {.hidden = config_.hidden_size,
                                                         .max_tokens = kMaxSeqs * kMaxLength,
                                                         .max_row_values = config_.vocab_size});
    if (group.status().code() == StatusCode::kNotFound) GTEST_SKIP() << group.status().message();
    ASSERT_TRUE(group.ok()) << group.status().message();
    alone_ = Make(0, {}, {});
    for (int r = 0; r < size; ++r) {
      const config::ParallelConfig parallel{.tensor_parallel_size = size};
      ranks_.push_back(Make(r, {.collectives = (*group)[static_cast<size_t>(r)]},
                            {parallel, PlaceOf(parallel, r), nullptr}));
    }
  }

  std::unique_ptr<TestModel> Make(int gpu, const CudaModelOptions& options,
                                  const ModelRank& rank) const {
    return std::make_unique<TestModel>(config_, config::Numerics::kOfficial, 4, kMaxSeqs,
                                       kMaxLength, kv_cache::IndexKeyDType::kFp4, checkpoint_.get(),
                                       std::move(device::MakeCudaDevice(gpu).value()), options,
                                       rank);
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

  // Prompts of several lengths, then `length` tokens each, the likeliest, all in one batch.
  static std::vector<TestSequence> Greedy(TestModel& model, int num_prompts, int length) {
    model.set_last_logits_only();
    std::vector<TestSequence> sequences;
    for (int i = 0; i < num_prompts; ++i) {
      sequences.push_back(
          model.Add(RandomTokens(model.config(), 3 + 11 * i, static_cast<uint32_t>(i) + 50)));
      Run(model, sequences.back(), {200});
    }
    std::vector<TestSequence*> pointers;
    for (TestSequence& s : sequences) pointers.push_back(&s);
    const std::vector<int> one(sequences.size(), 1);
    for (int i = 0; i < length; ++i) {
      for (TestSequence& s : sequences) {
        s.token_ids.push_back(static_cast<int32_t>(Best(s.logits.back())));
      }
      model.Step(pointers, one);
    }
    return sequences;
  }

  config::ModelConfig config_;
  std::unique_ptr<checkpoint::TensorSource> checkpoint_;
  std::unique_ptr<TestModel> alone_;
  std::vector<std::unique_ptr<TestModel>> ranks_;
};

TEST_P(CudaRanksTest, FollowOneGpu) {
  const std::vector<int> chunks = {300, 100, 17, 9, 1};
  const std::vector<int32_t> text = OwnText(*alone_, kMaxLength, 1).token_ids;
  TestSequence expected = alone_->Add(text);
  Run(*alone_, expected, chunks);
  std::vector<TestSequence> actual(ranks_.size());
  OnAll([&](size_t r) {
    actual[r] = ranks_[r]->Add(text);
    Run(*ranks_[r], actual[r], chunks);
  });
  for (size_t r = 0; r < ranks_.size(); ++r) {
    ExpectClose(expected, actual[r], ("rank " + std::to_string(r)).c_str());
    EXPECT_EQ(actual[r].logits, actual[0].logits) << "rank " << r;
  }
}

TEST_P(CudaRanksTest, WriteTheSameText) {
  constexpr int kPrompts = 20, kLength = 256;
  const auto expected = Greedy(*alone_, kPrompts, kLength);
  std::vector<std::vector<TestSequence>> actual(ranks_.size());
  OnAll([&](size_t r) { actual[r] = Greedy(*ranks_[r], kPrompts, kLength); });
  for (size_t r = 0; r < ranks_.size(); ++r) {
    int same = 0;
    for (size_t i = 0; i < kPrompts; ++i) {
      same += actual[r][i].token_ids == expected[i].token_ids ? 1 : 0;
      EXPECT_EQ(actual[r][i].token_ids, actual[0][i].token_ids) << "rank " << r << " prompt " << i;
    }
    EXPECT_GE(same, kPrompts - 1) << "rank " << r;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, CudaRanksTest,
                         testing::Values(Layout{"Peers2", 2, comm::MakePeerGroup},
                                         Layout{"Nccl2", 2, MakeNccl}, Layout{"Host2", 2, MakeHost},
                                         Layout{"Peers4", 4, comm::MakePeerGroup},
                                         Layout{"Nccl4", 4, MakeNccl},
                                         Layout{"Host4", 4, MakeHost}),
                         [](const auto& layout) { return layout.param.name; });

}  // namespace
}  // namespace fathom::model
