// The built-in model, and four layers as wide as Flash's, in pipeline stages, on as many GPUs as
// there are, against the model on one: the same bits, in prompts and in decodes that are graphs.
#include "model/cuda_stages.h"

#include <gtest/gtest.h>

#include <thread>

#include "comm/memory_transport.h"
#include "comm/transport.h"
#include "device/cuda/multi_gpu.h"
#include "model/cuda_testing.h"

namespace fathom::model {
namespace {

constexpr int kMaxSeqs = 8, kMaxLength = 400;

// Ranks that are not of one process.
class FarTransport final : public comm::Transport {
 public:
  explicit FarTransport(comm::Transport& near) : near_(near) {}
  int rank() const override { return near_.rank(); }
  int size() const override { return near_.size(); }
  bool SharesMemoryWith(int) const override { return false; }
  Status Exchange(std::span<const comm::Outgoing> outgoing,
                  std::span<const comm::Incoming> incoming) override {
    return near_.Exchange(outgoing, incoming);
  }
  void Abort(const Status& reason) override { near_.Abort(reason); }

 private:
  comm::Transport& near_;
};

struct Stages {
  const char* name;
  int count;
  bool is_one_process = true;
  bool is_wide = false;
};

class CudaStagesTest : public testing::TestWithParam<Stages> {
 protected:
  void SetUp() override {
    const int num_gpus = device::CountGpus();
    if (num_gpus == 0) GTEST_SKIP() << "no GPU";
    const int count = GetParam().count;
    near_ = comm::MakeMemoryTransports(count, std::chrono::seconds(20));
    for (const auto& transport : near_) {
      far_.push_back(std::make_unique<FarTransport>(*transport));
    }
    alone_ = source_.OnGpu(0, kMaxSeqs, kMaxLength);
    const config::ParallelConfig parallel{.pipeline_parallel_size = count};
    for (int r = 0; r < count; ++r) {
      const auto i = static_cast<size_t>(r);
      comm::Transport* const transport = GetParam().is_one_process ? near_[i].get() : far_[i].get();
      stages_.push_back(source_.OnGpu(r % num_gpus, kMaxSeqs, kMaxLength, {},
                                      {parallel, PlaceOf(parallel, r), transport}));
    }
  }

  // Prompts in chunks, then decodes of all of them together.
  static std::vector<std::vector<float>> Run(TestModel& model) {
    std::vector<TestSequence> sequences;
    for (int i = 0; i < kMaxSeqs; ++i) {
      const int length = 30 + 40 * i, prompt = length - 12;
      TestSequence& s = sequences.emplace_back(
          model.Add(RandomTokens(model.config(), length, static_cast<uint32_t>(i))));
      while (s.num_computed < prompt) {
        TestSequence* const one[] = {&s};
        const int count[] = {std::min(133, prompt - s.num_computed)};
        model.Step(one, count);
      }
    }
    std::vector<TestSequence*> all;
    for (TestSequence& s : sequences) all.push_back(&s);
    const std::vector<int> one(all.size(), 1);
    for (int i = 0; i < 12; ++i) model.Step(all, one);
    std::vector<std::vector<float>> logits;
    for (TestSequence& s : sequences) {
      for (auto& row : s.logits) logits.push_back(std::move(row));
    }
    return logits;
  }

  const TestSource source_ = GetParam().is_wide ? WideModel() : OpenTinyModel();
  std::vector<std::unique_ptr<comm::Transport>> near_, far_;
  std::unique_ptr<TestModel> alone_;
  std::vector<std::unique_ptr<TestModel>> stages_;
};

TEST_P(CudaStagesTest, HaveTheBitsOfOneGpu) {
  const auto expected = Run(*alone_);
  std::vector<std::vector<std::vector<float>>> actual(stages_.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < stages_.size(); ++r) {
    threads.emplace_back([&, r] { actual[r] = Run(*stages_[r]); });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(actual.back().size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(actual.back()[i], expected[i]) << i;
}

INSTANTIATE_TEST_SUITE_P(Layouts, CudaStagesTest,
                         testing::Values(Stages{"Two", 2}, Stages{"Four", 4},
                                         Stages{"ThreeOfSeveralProcesses", 3, false},
                                         Stages{"TwoWide", 2, true, true},
                                         Stages{"ThreeWideOfSeveralProcesses", 3, false, true}),
                         [](const auto& stages) { return stages.param.name; });

}  // namespace
}  // namespace fathom::model
