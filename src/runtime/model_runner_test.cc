// ModelRunner over a scripted model: batches by hand, as a scheduler would make them.
#include "runtime/model_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>

#include "kv_cache/block_pool.h"
#include "runtime/testing/fake_model.h"
#include "runtime/worker.h"

namespace fathom::runtime {
namespace {

using testing::ElementsAre;

constexpr int kVocab = 50;
constexpr kv_cache::PoolSizes kPools = {
    .num_blocks = 16, .num_window_pages = 32, .num_state_slots = 4};

// The next token is the last plus one.
void CountUp(std::span<const int32_t> token_ids, int64_t, std::span<float> logits) {
  std::fill(logits.begin(), logits.end(), 0.0f);
  logits[static_cast<size_t>((token_ids.back() + 1) % kVocab)] = 10.0f;
}

// A CPU whose steps end with an error, as a GPU's do once it is broken.
class BrokenDevice final : public device::Device {
 public:
  class BrokenEvent final : public device::Event {
    Status Record(device::Stream&) override { return OkStatus(); }
    Status Wait() override { return DeviceError("an illegal memory access was encountered"); }
  };

  device::DeviceKind kind() const override { return cpu_->kind(); }
  std::string name() const override { return cpu_->name(); }
  Result<device::Buffer> Allocate(int64_t bytes) override { return cpu_->Allocate(bytes); }
  Result<device::Buffer> AllocateHost(int64_t bytes) override { return cpu_->AllocateHost(bytes); }
  Result<std::unique_ptr<device::Stream>> MakeStream() override { return cpu_->MakeStream(); }
  Result<std::unique_ptr<device::Event>> MakeEvent() override {
    return std::unique_ptr<device::Event>(std::make_unique<BrokenEvent>());
  }
  int64_t total_memory_bytes() const override { return cpu_->total_memory_bytes(); }
  int64_t free_memory_bytes() const override { return cpu_->free_memory_bytes(); }

 private:
  const std::unique_ptr<device::Device> cpu_ = device::MakeCpuDevice(1);
};

class ModelRunnerTest : public testing::Test {
 protected:
  void Start(FakeModel::Script script) {
    model_ = std::make_unique<FakeModel>(kVocab, std::move(script));
    auto cache = KvCache::Make(FakeLayout(), kPools, *device_);
    ASSERT_TRUE(cache.ok());
    auto runner = ModelRunner::Make({.vocab_size = kVocab,
                                     .max_logits_rows = 64,
                                     .eos_token_ids = {1},
                                     .num_layers = kFakeLayers,
                                     .num_experts_per_token = kFakeExpertsPerToken},
                                    *model_, std::move(*cache), *device_);
    ASSERT_TRUE(runner.ok());
    runner_ = std::move(*runner);
  }

  // Plans the tokens [begin, end) of a sequence; end of tokens: sample.
  request::ScheduledSequence Plan(const request::Request& request, const std::vector<int32_t>& all,
                                  size_t begin, size_t end, request::BlockTable& table) {
    if (begin == 0) {
      EXPECT_TRUE(pool_.Admit(static_cast<int64_t>(all.size()), table));
    }
    pool_.ReleaseUnreachable(table, static_cast<int64_t>(begin));
    pool_.Extend(table, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin));
    return {.request_id = request.id,
            .request = &request,
            .token_ids = std::span(all).subspan(begin, end - begin),
            .all_token_ids = all,
            .num_computed_tokens = static_cast<int32_t>(begin),
            .sample = end == all.size(),
            .block_table = table};
  }

  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(2);
  std::unique_ptr<FakeModel> model_;
  std::unique_ptr<ModelRunner> runner_;
  kv_cache::BlockPool pool_{kPools, 128};
};

TEST_F(ModelRunnerTest, SamplesAfterTheLastChunkOnly) {
  Start(CountUp);
  request::Request request;
  request.sampling.temperature = 0;
  for (int i = 0; i < 600; ++i) request.prompt_token_ids.push_back(i % 40);
  request::BlockTable table;
  for (const auto& [begin, end] : {std::pair<size_t, size_t>{0, 257}, {257, 258}, {258, 600}}) {
    const request::ScheduledBatch batch{
        .step = begin, .sequences = {Plan(request, request.prompt_token_ids, begin, end, table)}};
    const auto result = runner_->Run(batch);
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(result->step, begin);
    if (end == 600) {
      EXPECT_THAT(result->sequences[0].sampled_token_ids, ElementsAre(40));
    } else {
      EXPECT_TRUE(result->sequences[0].sampled_token_ids.empty());
    }
  }
}

TEST_F(ModelRunnerTest, ADeviceThatBreaksIsReportedWithTheStepsShapes) {
  device_ = std::make_unique<BrokenDevice>();
  Start(CountUp);
  std::vector<request::Request> requests(2);
  std::vector<request::BlockTable> tables(2);
  request::ScheduledBatch batch;
  for (size_t i = 0; i < 2; ++i) {
    requests[i].id = i + 1;
    requests[i].prompt_token_ids.assign(30 * (i + 1), 5);
    batch.sequences.push_back(Plan(requests[i], requests[i].prompt_token_ids, 0,
                                   requests[i].prompt_token_ids.size(), tables[i]));
  }
  const auto result = runner_->Run(batch);
  EXPECT_EQ(result.status().code(), StatusCode::kDevice);
  EXPECT_THAT(result.status().message(),
              testing::AllOf(testing::HasSubstr("90 tokens of 2 sequences, the longest of 60"),
                             testing::HasSubstr("illegal memory access")));
}

TEST_F(ModelRunnerTest, GivesEverySequenceOfABatchItsOwnRow) {
  Start(CountUp);
  std::vector<request::Request> requests(3);
  std::vector<request::BlockTable> tables(3);
  request::ScheduledBatch batch;
  for (size_t i = 0; i < 3; ++i) {
    requests[i].id = i + 7;
    requests[i].sampling.temperature = 0;
    requests[i].prompt_token_ids.assign(30 * (i + 1), static_cast<int32_t>(10 * i));
    // The middle one stops inside its prompt.
    batch.sequences.push_back(Plan(requests[i], requests[i].prompt_token_ids, 0,
                                   i == 1 ? 20 : requests[i].prompt_token_ids.size(), tables[i]));
  }
  const auto result = runner_->Run(batch);
  ASSERT_TRUE(result.ok());
  EXPECT_THAT(result->sequences[0].sampled_token_ids, ElementsAre(1));
  EXPECT_TRUE(result->sequences[1].sampled_token_ids.empty());
  EXPECT_THAT(result->sequences[2].sampled_token_ids, ElementsAre(21));
  EXPECT_EQ(result->sequences[2].request_id, 9u);
}

TEST_F(ModelRunnerTest, ReportsPromptLogprobsOfEveryTokenButTheFirst) {
  Start(CountUp);
  request::Request request;
  request.prompt_token_ids = {3, 4, 9, 10};
  request.sampling.num_prompt_logprobs = 2;
  request.sampling.temperature = 0;
  request::BlockTable table;
  std::vector<request::TokenLogprobs> all;
  for (const auto& [begin, end] : {std::pair<size_t, size_t>{0, 2}, {2, 4}}) {
    const request::ScheduledBatch batch{
        .sequences = {Plan(request, request.prompt_token_ids, begin, end, table)}};
    auto result = runner_->Run(batch);
    ASSERT_TRUE(result.ok());
    for (auto& l : result->sequences[0].prompt_logprobs) all.push_back(std::move(l));
    if (end == 4) {
      EXPECT_THAT(result->sequences[0].sampled_token_ids, ElementsAre(11));
    }
  }
  ASSERT_EQ(all.size(), 3u);
  const double log_sum = std::log(std::exp(10.0) + kVocab - 1);
  EXPECT_EQ(all[0].chosen.token_id, 4);
  EXPECT_NEAR(all[0].chosen.logprob, 10 - log_sum, 1e-5);
  EXPECT_EQ(all[1].chosen.token_id, 9);
  EXPECT_NEAR(all[1].chosen.logprob, 0 - log_sum, 1e-5);
  EXPECT_EQ(all[1].top[0].token_id, 5);
  EXPECT_EQ(all[2].chosen.token_id, 10);
  EXPECT_EQ(all[2].top.size(), 2u);
}

TEST_F(ModelRunnerTest, ReportsTheExpertsOfASequenceThatAsks) {
  Start(CountUp);
  std::vector<request::Request> requests(2);
  std::vector<request::BlockTable> tables(2);
  request::ScheduledBatch batch;
  for (size_t i = 0; i < 2; ++i) {
    requests[i].id = i;
    requests[i].prompt_token_ids = {5, 6 + static_cast<int32_t>(i)};
    batch.sequences.push_back(Plan(requests[i], requests[i].prompt_token_ids, 0, 2, tables[i]));
  }
  requests[1].routed_experts_start = 0;
  const auto result = runner_->Run(batch);
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result->sequences[0].routed_experts.empty());
  EXPECT_THAT(result->sequences[1].routed_experts,
              ElementsAre(30, 31, 32, 33, 34, 35, 42, 43, 44, 45, 46, 47));
}

TEST_F(ModelRunnerTest, PromptLogitsThatAreNotFiniteFailTheRequest) {
  Start([](std::span<const int32_t> token_ids, int64_t num_prompt, std::span<float> logits) {
    CountUp(token_ids, num_prompt, logits);
    if (token_ids.size() == 2) logits[7] = NAN;
  });
  request::Request request;
  request.prompt_token_ids = {3, 4, 9, 10};
  request.sampling.num_prompt_logprobs = 0;
  request::BlockTable table;
  const request::ScheduledBatch batch{
      .sequences = {Plan(request, request.prompt_token_ids, 0, 4, table)}};
  const auto result = runner_->Run(batch);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->sequences[0].status.code(), StatusCode::kInternal);
}

TEST_F(ModelRunnerTest, AWorkerTurnsAnExceptionIntoAStatus) {
  Start([](std::span<const int32_t>, int64_t, std::span<float>) {
    throw std::runtime_error("layer 3 fell over");
  });
  request::Request request;
  request.prompt_token_ids = {3};
  request::BlockTable table;
  const request::ScheduledBatch batch{
      .sequences = {Plan(request, request.prompt_token_ids, 0, 1, table)}};
  std::promise<Status> told;
  Worker worker(std::move(runner_), nullptr, [&told](const Result<request::StepResult>& result) {
    told.set_value(result.status());
  });
  worker.Start(batch);
  worker.Collect();
  EXPECT_THAT(told.get_future().get().message(), testing::HasSubstr("layer 3 fell over"));
}

}  // namespace
}  // namespace fathom::runtime
