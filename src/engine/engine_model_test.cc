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
  bool async = false;  // a step is planned while the one before runs; nobody asks for experts
};

struct Answer {
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;           // of each, to the last bit
  std::vector<uint16_t> routed_experts;  // when asked for
  bool operator==(const Answer&) const = default;
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

  void Start(const Setting& setting) {
    engine_.reset();
    const model::ModelLimits limits{.max_batched_tokens = setting.max_batched_tokens,
                                    .max_num_seqs = setting.max_num_seqs,
                                    .max_model_len = 512};
    auto model =
        model::MakeDeepSeekV4(config_, GetParam(), index_dtype_, weights_, limits, *device_);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::move(*model);
    const auto layout = kv_cache::MakeKvLayout(config_, GetParam(), index_dtype_);
    const int num_pages = 5 * setting.max_num_seqs + setting.max_batched_tokens / 64;
    EngineOptions options = OptionsFor(config_, limits);
    options.model_name = "small";
    options.kv_cache_bytes = setting.num_blocks * layout.block_bytes +
                             num_pages * layout.window_page_bytes +
                             setting.max_num_seqs * layout.state.slot_bytes;
    options.max_queue = 16;
    options.decode_floor = setting.last_is_first ? 0 : 0.7;
    options.async_scheduling = setting.async;
    auto engine =
        MakeEngine(options, {{.model = model_.get(), .device = device_.get(), .layout = layout}},
                   metrics_, clock_);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
  }

  std::shared_ptr<CollectingSink> Submit(std::vector<int32_t> prompt, int priority = 0,
                                         std::optional<int32_t> experts_start = std::nullopt) {
    request::Request request;
    request.id = engine_->NextRequestId();
    const size_t length = prompt.size();
    request.prompt_token_ids = std::move(prompt);
    request.sampling.temperature = static_cast<double>(length % 2);
    request.sampling.top_p = 0.9;
    request.sampling.seed = length;
    request.sampling.max_tokens = 24;
    request.sampling.ignore_eos = true;
    request.sampling.num_logprobs = 1;
    request.priority = priority;
    request.routed_experts_start = experts_start;
    request.arrival = clock_.Now();
    auto sink = std::make_shared<CollectingSink>();
    const Status status = engine_->Submit(std::move(request), sink);
    EXPECT_TRUE(status.ok()) << status.message();
    return sink;
  }

  static Answer Wait(CollectingSink& sink) {
    const auto last = sink.Wait();
    EXPECT_EQ(last.finish_reason, request::FinishReason::kLength) << last.error.message();
    Answer answer{
        .token_ids = sink.token_ids(), .logprobs = {}, .routed_experts = sink.routed_experts()};
    for (const auto& token : sink.logprobs()) answer.logprobs.push_back(token.chosen.logprob);
    return answer;
  }

  // Every prompt's answer, all submitted at once; greedy and sampled take turns.
  std::vector<Answer> Generate(const Setting& setting) {
    Start(setting);
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (const int length : {1, 7, 50, 245, 250}) {
      sinks.push_back(Submit(model::RandomTokens(config_, length, static_cast<uint32_t>(length)),
                             setting.last_is_first ? -length : 0,
                             setting.async ? std::nullopt : std::optional(0)));
      if (setting.last_is_first) sinks.back()->WaitForTokens(1);
    }
    std::vector<Answer> answers;
    for (auto& sink : sinks) answers.push_back(Wait(*sink));
    engine_.reset();
    return answers;
  }

  uint64_t NumPreemptions() {
    return metrics_.AddCounter("vllm:num_preemptions", "", {{"model_name", "small"}}).value();
  }

  const config::ModelConfig config_ = model::SmallConfig();
  IndexKeyDType index_dtype_ = IndexKeyDType::kFp4;
  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(2);
  std::shared_ptr<const model::Weights> weights_;
  MetricsRegistry metrics_;
  const SystemClock clock_;
  std::unique_ptr<model::DeepSeekV4> model_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(EngineModelTest, GivesTheSameTokensAloneBatchedChunkedAndPreempted) {
  const auto alone = Generate({1, 512, 16});
  for (const auto& answer : alone) EXPECT_EQ(answer.token_ids.size(), 24u);
  EXPECT_EQ(Generate({5, 1024, 16}), alone) << "batched";
  EXPECT_EQ(Generate({5, 37, 16}), alone) << "chunked";
  EXPECT_EQ(NumPreemptions(), 0u);
  EXPECT_EQ(Generate({2, 300, 5, true}), alone) << "preempted";
  EXPECT_GT(NumPreemptions(), 0u) << "the last setting no longer preempts";
}

TEST_P(EngineModelTest, GivesTheSameTokensWhenStepsArePlannedAhead) {
  const auto alone = Generate({.max_num_seqs = 1, .max_batched_tokens = 512, .num_blocks = 16});
  for (Setting setting : {Setting{1, 512, 16}, {5, 1024, 16}, {5, 37, 16}, {2, 300, 5, true}}) {
    setting.async = true;
    const auto answers = Generate(setting);
    ASSERT_EQ(answers.size(), alone.size());
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_EQ(answers[i].token_ids, alone[i].token_ids);
      EXPECT_EQ(answers[i].logprobs, alone[i].logprobs);
    }
  }
  EXPECT_GT(NumPreemptions(), 0u) << "the last setting no longer preempts";
}

TEST_P(EngineModelTest, ReportsTheExpertsOfEveryTokenThatWasRun) {
  Start({2, 100, 16});
  const auto prompt = model::RandomTokens(config_, 250, 250);
  const Answer answer = Wait(*Submit(prompt, 0, 0));
  std::vector<int32_t> ids = prompt;
  ids.insert(ids.end(), answer.token_ids.begin(), answer.token_ids.end() - 1);
  model::TestModel model(config_, GetParam(), 2, 1, 512, index_dtype_,
                         checkpoint::MakeSyntheticSource(config_, 11).get());
  model::TestSequence whole = model.Add(ids);
  model.RunInChunks(whole, static_cast<int>(ids.size()));
  const auto k = static_cast<size_t>(config_.num_experts_per_token);
  std::vector<uint16_t> expected;
  for (size_t t = 0; t < ids.size(); ++t) {
    for (size_t layer = 0; layer < static_cast<size_t>(config_.num_layers); ++layer) {
      const auto first =
          model.expert_ids().begin() + static_cast<std::ptrdiff_t>((layer * ids.size() + t) * k);
      expected.insert(expected.end(), first, first + static_cast<std::ptrdiff_t>(k));
    }
  }
  EXPECT_EQ(answer.routed_experts, expected);

  // Again, from the middle of the prompt on: what was cached before is not run.
  const auto sink = Submit(prompt, 0, 200);
  const auto row = static_cast<std::ptrdiff_t>(expected.size() / ids.size());
  EXPECT_EQ(Wait(*sink).routed_experts,
            std::vector<uint16_t>(expected.begin() + 200 * row, expected.end()));
  EXPECT_EQ(sink->Wait().num_cached_tokens, 0);
  // A turn that goes on from there takes all of it from the cache.
  ids.push_back(answer.token_ids.back());
  ids.push_back(7);
  const auto next = Submit(ids, 0, static_cast<int32_t>(ids.size()) - 1);
  EXPECT_EQ(Wait(*next).routed_experts.size(), static_cast<size_t>(24 * row));
  EXPECT_EQ(next->Wait().num_cached_tokens, static_cast<int>(ids.size()) - 2);
}

// Two conversations of four turns at once, each going on from its last answer.
TEST_P(EngineModelTest, GivesTheSameTokensWhenThePromptIsCached) {
  const Setting setting{4, 512, 24};
  Start(setting);
  std::vector<std::vector<int32_t>> prompts = {model::RandomTokens(config_, 250, 1),
                                               model::RandomTokens(config_, 70, 2)};
  std::vector<std::vector<int32_t>> asked;
  std::vector<Answer> answers;
  for (uint32_t turn = 0; turn < 4; ++turn) {
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (const auto& prompt : prompts) sinks.push_back(Submit(prompt));
    for (size_t i = 0; i < prompts.size(); ++i) {
      asked.push_back(prompts[i]);
      answers.push_back(Wait(*sinks[i]));
      EXPECT_EQ(sinks[i]->Wait().num_cached_tokens,
                turn == 0 ? 0 : static_cast<int>(asked[asked.size() - 3].size()) + 23);
      const auto& answer = answers.back().token_ids;
      prompts[i].insert(prompts[i].end(), answer.begin(), answer.end());
      const auto more = model::RandomTokens(config_, 11 + static_cast<int>(i), turn + 10);
      prompts[i].insert(prompts[i].end(), more.begin(), more.end());
    }
  }
  for (size_t i = 0; i < asked.size(); ++i) {
    Start(setting);  // knows nothing
    EXPECT_EQ(Wait(*Submit(asked[i])), answers[i]) << asked[i].size() << " tokens";
  }
}

INSTANTIATE_TEST_SUITE_P(Numerics, EngineModelTest,
                         testing::Values(Numerics::kOfficial, Numerics::kFp32),
                         [](const auto& param_info) {
                           return param_info.param == Numerics::kFp32 ? "Fp32" : "Official";
                         });

}  // namespace
}  // namespace fathom::engine
