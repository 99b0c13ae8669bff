// The model on a GPU against the CPU on the built-in model's own text: log-probabilities of the
// likeliest tokens, whole, in chunks and in a batch; graphs against single launches bit for bit.
#include <gtest/gtest.h>

#include "model/cuda_testing.h"
#include "model/fp8_experts.h"
#include "model/own_text.h"

namespace fathom::model {
namespace {

constexpr int kLength = 700;

class CudaModelTest : public testing::Test {
 protected:
  void SetUp() override {
    if (auto gpu = device::MakeCudaDevice(0); !gpu.ok()) GTEST_SKIP() << gpu.status().message();
    gpu_ = tiny_.OnGpu(0, 4, kLength);
    cpu_ = std::make_unique<TestModel>(tiny_.config, config::Numerics::kOfficial, 4, 4, kLength,
                                       kv_cache::IndexKeyDType::kFp4, tiny_.weights.get());
  }

  TestSequence OnCpu(uint32_t seed) { return OwnText(*cpu_, kLength, seed); }

  const TestSource tiny_ = OpenTinyModel();
  std::unique_ptr<TestModel> gpu_, cpu_;
};

TEST_F(CudaModelTest, FollowsTheCpu) {
  const TestSequence expected = OnCpu(1);
  for (const int chunk : {kLength, 257, 64, 3, 1}) {
    if (chunk != kLength) {
      gpu_ = nullptr;
      gpu_ = tiny_.OnGpu(0, 4, kLength);
    }
    TestSequence actual = gpu_->Add(expected.token_ids);
    gpu_->RunInChunks(actual, chunk);
    ExpectClose(expected, actual, ("chunks of " + std::to_string(chunk)).c_str());
  }
}

TEST_F(CudaModelTest, FollowsTheCpuWithFp8Experts) {
  const TestSequence expected = OnCpu(1);  // model_test holds that these have the same bits there
  TestSource fp8{.config = tiny_.config, .weights = std::make_unique<Fp8Experts>(*tiny_.weights)};
  fp8.config.expert_dtype = config::ExpertDType::kFp8;
  for (const int chunk : {kLength, 64, 1}) {
    const auto gpu = fp8.OnGpu(0, 4, kLength);
    TestSequence actual = gpu->Add(expected.token_ids);
    gpu->RunInChunks(actual, chunk);
    ExpectClose(expected, actual, ("FP8 experts, chunks of " + std::to_string(chunk)).c_str());
  }
}

TEST_F(CudaModelTest, SequencesTogetherAsAlone) {
  const TestSequence first = OnCpu(2), second = OnCpu(3);
  TestSequence a = gpu_->Add(first.token_ids), b = gpu_->Add(second.token_ids);
  TestSequence* const both[] = {&a, &b};
  const int prompt[] = {300, 41};
  gpu_->Step(both, prompt);
  while (a.num_computed < kLength) {
    const int one[] = {1, 1};
    gpu_->Step(both, one);
  }
  TestSequence* const rest[] = {&b};
  const int count[] = {kLength - b.num_computed};
  gpu_->Step(rest, count);
  ExpectClose(first, a, "first of two");
  ExpectClose(second, b, "second of two");
}

TEST_F(CudaModelTest, ReportsTheExpertsThatRan) {
  struct Recorder final : ChoiceRecorder {
    void OnRouting(int, int, std::span<const int32_t> ids) override {
      expert_ids.insert(expert_ids.end(), ids.begin(), ids.end());
    }
    void OnIndex(int, int, std::span<const int32_t>) override {}
    std::vector<int32_t> expert_ids;  // layer by layer, token by token
  };
  gpu_->set_last_logits_only();
  const auto ids = RandomTokens(tiny_.config, 301, 4);
  TestSequence watched = gpu_->Add(ids), replayed = gpu_->Add(ids);
  for (const int count : {300, 1}) {  // the last is a graph, unless it is watched
    const int counts[] = {count};
    TestSequence* sequence[] = {&watched};
    Recorder recorder;
    gpu_->Step(sequence, counts, &recorder);
    EXPECT_EQ(gpu_->expert_ids(), recorder.expert_ids) << count;
    sequence[0] = &replayed;
    gpu_->Step(sequence, counts);
    EXPECT_EQ(gpu_->expert_ids(), recorder.expert_ids) << count;
  }
}

}  // namespace
}  // namespace fathom::model
