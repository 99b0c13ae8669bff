// An engine that has started asks its GPU for nothing more, neither memory nor pinned memory,
// streams or events, whatever requests come: planned ahead or not, sampled on the device or on the
// host, with prefixes that go to host memory and come back. Without a GPU: all logits are 0.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/make_engine.h"
#include "engine/testing.h"
#include "model/cuda_testing.h"
#include "model/deepseek_v4_cuda.h"
#include "model/no_gpu.h"

namespace fathom::engine {
namespace {

constexpr model::ModelLimits kLimits{
    .max_batched_tokens = 512, .max_num_seqs = 12, .max_model_len = 1024};

class AllocationsTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    const auto dtype = kv_cache::IndexKeyDType::kFp4;
    auto model =
        model::MakeDeepSeekV4Cuda(config_, dtype, *checkpoint::MakeSyntheticSource(config_, 1),
                                  /*dummy=*/true, kLimits, *gpu_);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::move(*model);
    EngineOptions options = OptionsFor(config_, kLimits);
    options.kv_cache_bytes = int64_t{40} << 20;
    options.kv.host_bytes = int64_t{96} << 20;
    options.async_scheduling = GetParam();
    const auto layout = kv_cache::MakeKvLayout(config_, config::Numerics::kOfficial, dtype);
    auto engine =
        MakeEngine(options, {{.model = model_.get(), .device = gpu_.get(), .layout = layout}},
                   metrics_, clock_);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
  }

  // Of every kind; 40 different prompts.
  std::shared_ptr<CollectingSink> Submit(int i) {
    request::Request request;
    request.id = engine_->NextRequestId();
    const int length = 1 + i % 40 * 17;
    request.prompt_token_ids = model::RandomTokens(config_, length, static_cast<uint32_t>(i) % 40);
    request::SamplingParams& sampling = request.sampling;
    sampling.max_tokens = 1 + i * 2;
    sampling.ignore_eos = true;
    sampling.temperature = i % 4 == 0 ? 0 : 1;
    if (i % 4 == 1) sampling.num_logprobs = 5;
    if (i % 4 == 2) sampling.num_logprobs = 30;  // more than the device reports
    if (i % 5 == 1) sampling.repetition_penalty = 1.2;
    if (i % 5 == 2) sampling.num_prompt_logprobs = 2;
    if (i % 5 == 3) request.routed_experts_start = 0;
    if (i % 5 == 4) sampling.allowed_token_ids = {0, 1, 2};
    request.arrival = clock_.Now();
    auto sink = std::make_shared<CollectingSink>();
    EXPECT_TRUE(engine_->Submit(std::move(request), sink).ok());
    return sink;
  }

  const config::ModelConfig config_ = model::OpenTinyModel().config;
  SystemClock clock_;
  MetricsRegistry metrics_;
  std::unique_ptr<device::Device> gpu_ = std::move(device::MakeCudaDevice(0).value());
  std::unique_ptr<model::DeepSeekV4> model_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(AllocationsTest, NoRequestNeedsAny) {
  EXPECT_THAT(model::TakeResourceCalls(), testing::Contains("cudaMalloc"));
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int i = 0; i < 120; ++i) {
    sinks.push_back(Submit(i));
    if (i % 40 < 39) continue;
    for (const auto& sink : sinks) EXPECT_EQ(sink->Wait().error.message(), "");
  }
  engine_->Drain(std::chrono::seconds(5));
  EXPECT_THAT(model::TakeResourceCalls(), testing::IsEmpty());
  EXPECT_THAT(metrics_.ExposeText(),
              testing::ContainsRegex("prefix_cache_hits_by_tier[^\n]*tier=\"host\"} [1-9]"));
}

INSTANTIATE_TEST_SUITE_P(Planned, AllocationsTest, testing::Bool(),
                         [](const auto& ahead) { return ahead.param ? "Ahead" : "InTurn"; });

}  // namespace
}  // namespace fathom::engine
