// The engine over the real model with synthetic weights: a request's tokens do not depend on who
// runs beside it, on how its prompt is cut, or on whether it was preempted.
#include <gtest/gtest.h>

#include "engine/make_engine.h"
#include "engine/testing.h"
#include "model/testing.h"
#include "model/weights.h"

namespace fathom::engine {
namespace {

using config::Numerics;
using kv_cache::IndexKeyDType;

struct Setting {
  int max_num_seqs;
  int max_batched_tokens;
  int num_blocks;
  bool last_is_first = false;  // who comes later has priority over those that run by then
};

class EngineModelTest : public testing::TestWithParam<Numerics> {
 protected:
  void SetUp() override {
    index_dtype_ = GetParam() == Numerics::kFp32 ? IndexKeyDType::kFp32 : IndexKeyDType::kFp4;
    const auto source = checkpoint::MakeSyntheticSource(config_, 11);
    auto weights = model::LoadWeights(config_, *source, *device_);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    weights_ = *weights;
  }

  // Every prompt's tokens, all submitted at once; greedy and sampled take turns.
  std::vector<std::vector<int32_t>> Generate(const Setting& setting) {
    const model::ModelLimits limits{.max_batched_tokens = setting.max_batched_tokens,
                                    .max_num_seqs = setting.max_num_seqs,
                                    .max_model_len = 512};
    auto model =
        model::MakeDeepSeekV4(config_, GetParam(), index_dtype_, weights_, limits, *device_);
    EXPECT_TRUE(model.ok()) << model.status().message();
    const auto layout = kv_cache::MakeKvLayout(config_, GetParam(), index_dtype_);
    const int num_pages = 5 * setting.max_num_seqs + setting.max_batched_tokens / 64;
    MetricsRegistry metrics;
    const SystemClock clock;
    const EngineOptions options{.model_name = "small",
                                .vocab_size = config_.vocab_size,
                                .sliding_window = config_.sliding_window,
                                .eos_token_ids = {config_.eos_token_id},
                                .limits = limits,
                                .kv_cache_bytes = setting.num_blocks * layout.block_bytes +
                                                  num_pages * layout.window_page_bytes +
                                                  setting.max_num_seqs * layout.state.slot_bytes,
                                .max_queue = 16,
                                .decode_floor = setting.last_is_first ? 0 : 0.7};
    auto engine = MakeEngine(options, layout, **model, *device_, metrics, clock);
    EXPECT_TRUE(engine.ok()) << engine.status().message();

    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (const int length : {1, 7, 50, 245, 250}) {
      request::Request request;
      request.id = (*engine)->NextRequestId();
      request.prompt_token_ids =
          model::RandomTokens(config_, length, static_cast<uint32_t>(length));
      request.sampling.temperature = length % 2;
      request.sampling.top_p = 0.9;
      request.sampling.seed = static_cast<uint64_t>(length);
      request.sampling.max_tokens = 24;
      request.sampling.ignore_eos = true;
      if (setting.last_is_first) request.priority = -length;
      request.arrival = clock.Now();
      sinks.push_back(std::make_shared<CollectingSink>());
      const Status status = (*engine)->Submit(std::move(request), sinks.back());
      EXPECT_TRUE(status.ok()) << status.message();
      if (setting.last_is_first) sinks.back()->WaitForTokens(1);
    }
    std::vector<std::vector<int32_t>> outputs;
    for (auto& sink : sinks) {
      const auto last = sink->Wait();
      EXPECT_EQ(last.finish_reason, request::FinishReason::kLength) << last.error.message();
      outputs.push_back(sink->token_ids());
    }
    engine->reset();
    num_preemptions_ +=
        metrics.AddCounter("vllm:num_preemptions", "", {{"model_name", "small"}}).value();
    return outputs;
  }

  const config::ModelConfig config_ = model::SmallConfig();
  IndexKeyDType index_dtype_ = IndexKeyDType::kFp4;
  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(2);
  std::shared_ptr<const model::Weights> weights_;
  uint64_t num_preemptions_ = 0;
};

TEST_P(EngineModelTest, GivesTheSameTokensAloneBatchedChunkedAndPreempted) {
  const auto alone = Generate({1, 512, 16});
  for (const auto& tokens : alone) EXPECT_EQ(tokens.size(), 24u);
  EXPECT_EQ(Generate({5, 1024, 16}), alone) << "batched";
  EXPECT_EQ(Generate({5, 37, 16}), alone) << "chunked";
  EXPECT_EQ(num_preemptions_, 0u);
  EXPECT_EQ(Generate({2, 300, 5, true}), alone) << "preempted";
  EXPECT_GT(num_preemptions_, 0u) << "the last setting no longer preempts";
}

INSTANTIATE_TEST_SUITE_P(Numerics, EngineModelTest,
                         testing::Values(Numerics::kOfficial, Numerics::kFp32),
                         [](const auto& param_info) {
                           return param_info.param == Numerics::kFp32 ? "Fp32" : "Official";
                         });

}  // namespace
}  // namespace fathom::engine
