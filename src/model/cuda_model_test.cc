// The model on a GPU against the CPU on the built-in model's own text: log-probabilities of the
// likeliest tokens, whole, in chunks and in a batch; graphs against single launches bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "model/testing.h"

namespace fathom::model {
namespace {

constexpr int kLength = 700;

double LogProbability(const std::vector<float>& logits, size_t token) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(double{x} - max);
  return logits[token] - max - std::log(sum);
}
size_t Best(const std::vector<float>& logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

class CudaModelTest : public testing::Test {
 protected:
  void SetUp() override {
    auto gpu = device::MakeCudaDevice(0);
    if (!gpu.ok()) GTEST_SKIP() << gpu.status().message();
    const std::string folder = std::string(FATHOM_MODELS) + "/fathom-tiny";
    config_ = checkpoint::LoadModelConfig(folder).value();
    checkpoint_ = std::move(checkpoint::OpenCheckpoint(folder, config_).value());
    gpu_ = std::make_unique<TestModel>(config_, config::Numerics::kOfficial, 4, 4, kLength,
                                       kv_cache::IndexKeyDType::kFp4, checkpoint_.get(),
                                       std::move(*gpu));
    cpu_ = std::make_unique<TestModel>(config_, config::Numerics::kOfficial, 4, 4, kLength,
                                       kv_cache::IndexKeyDType::kFp4, checkpoint_.get());
  }

  // Text of the model's own: drawn from its distribution, token by token.
  TestSequence OnCpu(uint32_t seed) {
    TestSequence s = cpu_->Add(std::vector<int32_t>(kLength, config_.bos_token_id));
    TestSequence* const sequences[] = {&s};
    std::mt19937 random(seed);
    for (int i = 0; i < kLength; ++i) {
      const int one[] = {1};
      cpu_->Step(sequences, one);
      if (i + 1 == kLength) break;
      double left = static_cast<double>(random()) * 0x1p-32;
      size_t token = 0;
      const std::vector<float>& logits = s.logits.back();
      while (token + 1 < logits.size()) {
        left -= std::exp(LogProbability(logits, token));
        if (left < 0) break;
        ++token;
      }
      s.token_ids[static_cast<size_t>(i) + 1] = static_cast<int32_t>(token);
    }
    return s;
  }

  void ExpectClose(const TestSequence& expected, const TestSequence& actual, const char* what) {
    ASSERT_EQ(expected.logits.size(), actual.logits.size());
    std::vector<double> differences;
    for (size_t i = 0; i < expected.logits.size(); ++i) {
      const size_t best = Best(expected.logits[i]);
      differences.push_back(std::fabs(LogProbability(expected.logits[i], best) -
                                      LogProbability(actual.logits[i], best)));
    }
    std::vector<double> sorted = differences;
    std::sort(sorted.begin(), sorted.end());
    const double median = sorted[sorted.size() / 2], p99 = sorted[sorted.size() * 99 / 100];
    std::printf("%s: median %.5f, p90 %.5f, p99 %.5f, largest %.5f\n", what, median,
                sorted[sorted.size() * 9 / 10], p99, sorted.back());
    EXPECT_LE(median, 0.02) << what;
    EXPECT_LE(p99, 0.2) << what;
  }

  config::ModelConfig config_;
  std::unique_ptr<checkpoint::TensorSource> checkpoint_;
  std::unique_ptr<TestModel> gpu_, cpu_;
};

TEST_F(CudaModelTest, FollowsTheCpu) {
  const TestSequence expected = OnCpu(1);
  for (const int chunk : {kLength, 257, 64, 3, 1}) {
    if (chunk != kLength) {
      gpu_ = nullptr;
      gpu_ = std::make_unique<TestModel>(config_, config::Numerics::kOfficial, 4, 4, kLength,
                                         kv_cache::IndexKeyDType::kFp4, checkpoint_.get(),
                                         std::move(device::MakeCudaDevice(0).value()));
    }
    TestSequence actual = gpu_->Add(expected.token_ids);
    gpu_->RunInChunks(actual, chunk);
    ExpectClose(expected, actual, ("chunks of " + std::to_string(chunk)).c_str());
  }
}

TEST_F(CudaModelTest, AFaultNamesTheOperatorTheLayerAndTheShapes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        TestModel broken(config_, config::Numerics::kOfficial, 4, 4, kLength,
                         kv_cache::IndexKeyDType::kFp4, checkpoint_.get(),
                         std::move(*device::MakeCudaDevice(0)), {.sync_operators = true});
        TestSequence s = broken.Add(RandomTokens(config_, 300, 1));
        s.index = 1 << 20;  // blocks and pages far behind the pools' end
        broken.RunInChunks(s, 300);
      },
      "the GPU failed at the operator 'attention prologue' of layer 0, in a step of 300 tokens of "
      "1 sequences.*illegal memory access");
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
  const auto ids = RandomTokens(config_, 301, 4);
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
