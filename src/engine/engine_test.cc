// The engine with its scheduler, runtime and threads over a scripted model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "engine/make_engine.h"
#include "engine/testing.h"
#include "runtime/testing/fake_model.h"

namespace fathom::engine {
namespace {

using request::FinishReason;
using request::Request;
using request::TokenEvent;
using runtime::FakeModel;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kVocab = 100;
constexpr int32_t kEos = 1;

class ThrowingSink final : public request::TokenSink {
 public:
  void OnEvent(TokenEvent) override { throw std::runtime_error("no reader"); }
};

// A script that tests hold and let go.
class Gate {
 public:
  void Open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    entered_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void WaitUntilEntered() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return entered_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  bool entered_ = false;
};

// The next token is the last plus one, from 10 to 89.
void CountUp(std::span<const int32_t> token_ids, int64_t, std::span<float> logits) {
  std::fill(logits.begin(), logits.end(), 0.0f);
  logits[static_cast<size_t>(10 + (token_ids.back() + 1) % 80)] = 50.0f;
}

// The same, so slowly that 2000 tokens are not done before a test has done what it does meanwhile.
void CountUpSlowly(std::span<const int32_t> token_ids, int64_t num_prompt_tokens,
                   std::span<float> logits) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CountUp(token_ids, num_prompt_tokens, logits);
}

// Logits that depend on every token so far, with something to draw from.
void HashOfAll(std::span<const int32_t> token_ids, int64_t, std::span<float> logits) {
  uint64_t h = 1;
  for (const int32_t id : token_ids) h = (h ^ static_cast<uint64_t>(id)) * 0x100000001b3u;
  for (float& x : logits) {
    h = h * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<float>(h >> 40) * 0x1p-22f;
  }
}

// The parameter: whether a step is planned while the one before runs.
class EngineTest : public testing::TestWithParam<bool> {
 protected:
  EngineOptions Options() {
    return {.model_name = "fake",
            .vocab_size = kVocab,
            .eos_token_ids = {kEos},
            .limits = {.max_batched_tokens = 256, .max_num_seqs = 4, .max_model_len = 2048},
            .max_queue = 16,
            .async_scheduling = GetParam()};
  }
  EngineRank RankOf(FakeModel& model) {
    return {.model = &model, .device = device_.get(), .layout = runtime::FakeLayout()};
  }
  void Start(FakeModel::Script script) { Start(std::move(script), Options()); }
  void Start(FakeModel::Script script, const EngineOptions& options) {
    model_ = std::make_unique<FakeModel>(kVocab, std::move(script));
    auto engine = MakeEngine(options, {RankOf(*model_)}, metrics_, clock_);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
  }
  Request MakeRequest(std::vector<int32_t> prompt, int max_tokens = 5) {
    Request request;
    request.id = engine_->NextRequestId();
    request.prompt_token_ids = std::move(prompt);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = max_tokens;
    request.arrival = clock_.Now();
    return request;
  }
  std::shared_ptr<CollectingSink> Submit(Request request) {
    auto sink = std::make_shared<CollectingSink>();
    const Status status = engine_->Submit(std::move(request), sink);
    EXPECT_TRUE(status.ok()) << status.message();
    return sink;
  }

  SystemClock clock_;
  MetricsRegistry metrics_;
  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(2);
  std::unique_ptr<FakeModel> model_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(EngineTest, GeneratesUntilMaxTokensOrAnEndToken) {
  Start(CountUp);
  auto sink = Submit(MakeRequest({20, 21}, 3));
  EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kLength);
  EXPECT_THAT(sink->token_ids(), ElementsAre(32, 43, 54));

  engine_.reset();
  Start(runtime::ReplyWith([](auto) { return std::vector<int32_t>{7, 8}; }, kEos));
  sink = Submit(MakeRequest({20, 21}, 30));
  const TokenEvent last = sink->Wait();
  EXPECT_EQ(last.finish_reason, FinishReason::kStop);
  EXPECT_EQ(last.stop_token_id, kEos);
  EXPECT_THAT(sink->token_ids(), ElementsAre(7, 8, kEos));
}

TEST_P(EngineTest, AnswersManyRequestsFromManyThreads) {
  EngineOptions options = Options();
  options.max_queue = 200;
  Start(HashOfAll, options);
  std::vector<std::future<std::vector<std::vector<int32_t>>>> futures;
  for (int thread = 0; thread < 3; ++thread) {
    futures.push_back(std::async(std::launch::async, [this] {
      std::vector<std::shared_ptr<CollectingSink>> sinks;
      for (int i = 0; i < 20; ++i) {
        sinks.push_back(
            Submit(MakeRequest(std::vector<int32_t>(static_cast<size_t>(1 + i * 31), 17), 20)));
      }
      std::vector<std::vector<int32_t>> outputs;
      for (auto& sink : sinks) {
        sink->Wait();
        outputs.push_back(sink->token_ids());
      }
      return outputs;
    }));
  }
  const auto first = futures[0].get();
  EXPECT_EQ(futures[1].get(), first);
  EXPECT_EQ(futures[2].get(), first);
  engine_->Drain(seconds(10));
  EXPECT_EQ(engine_->Stats().kv_cache_usage, 0);
}

std::vector<std::vector<int32_t>> Prompts() {
  std::vector<std::vector<int32_t>> prompts;
  for (const size_t length : {1, 3, 64, 255, 256, 257, 700}) {
    prompts.emplace_back(length);
    std::iota(prompts.back().begin(), prompts.back().end(), static_cast<int32_t>(length));
    for (int32_t& id : prompts.back()) id = 2 + id % 90;
  }
  return prompts;
}

TEST_P(EngineTest, TheSameSeedGivesTheSameTokensAloneBatchedChunkedAndPreempted) {
  struct Setting {
    int max_num_seqs;
    int max_batched_tokens;
    int num_blocks;
    bool last_is_first;  // who comes later has priority over those that run by then
  };
  std::vector<std::vector<int32_t>> expected;
  for (const Setting& setting :
       {Setting{1, 2048, 24, false}, {7, 2048, 24, false}, {7, 33, 24, false}, {3, 300, 8, true}}) {
    EngineOptions options = Options();
    options.limits.max_num_seqs = setting.max_num_seqs;
    options.limits.max_batched_tokens = setting.max_batched_tokens;
    options.limits.max_model_len = 1024;
    const auto layout = runtime::FakeLayout();
    const int num_pages = 5 * setting.max_num_seqs + setting.max_batched_tokens / 64;
    options.kv_cache_bytes = setting.num_blocks * layout.block_bytes +
                             num_pages * layout.window_page_bytes +
                             setting.max_num_seqs * layout.state.slot_bytes;
    options.decode_floor = setting.last_is_first ? 0 : 0.7;
    metrics_.AddCounter("vllm:num_preemptions", "", {{"model_name", "fake"}});
    Start(HashOfAll, options);
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (const auto& prompt : Prompts()) {
      Request request = MakeRequest(prompt, 300);
      request.sampling.temperature = 0.8;
      request.sampling.top_p = 0.95;
      request.sampling.seed = prompt.size();
      request.sampling.ignore_eos = true;
      request.sampling.presence_penalty = 0.5;
      if (setting.last_is_first) request.priority = -static_cast<int>(prompt.size());
      sinks.push_back(Submit(std::move(request)));
      if (setting.last_is_first) sinks.back()->WaitForTokens(1);
    }
    std::vector<std::vector<int32_t>> outputs;
    for (auto& sink : sinks) {
      EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kLength);
      outputs.push_back(sink->token_ids());
      EXPECT_EQ(outputs.back().size(), 300u);
    }
    engine_.reset();
    if (expected.empty()) expected = outputs;
    EXPECT_EQ(outputs, expected);
  }
  const Counter& preemptions =
      metrics_.AddCounter("vllm:num_preemptions", "", {{"model_name", "fake"}});
  EXPECT_GT(preemptions.value(), 0u) << "the last setting no longer preempts";
}

TEST_P(EngineTest, CancelEndsARequestWithinAStepAndFreesItsMemory) {
  Start(CountUpSlowly);
  auto sink = Submit(MakeRequest({20}, 2000));
  sink->WaitForTokens(3);
  EXPECT_GT(engine_->Stats().num_running, 0);
  engine_->Cancel(1);
  engine_->Cancel(1);
  engine_->Cancel(12345);
  EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kCancelled);
  engine_->Drain(seconds(10));
  EXPECT_EQ(engine_->Stats().num_running, 0);
  EXPECT_EQ(engine_->Stats().kv_cache_usage, 0);
}

TEST_P(EngineTest, AReaderThatFoundItsStopStringEndsTheRequestAsStopped) {
  Start(CountUpSlowly);
  auto sink = Submit(MakeRequest({20}, 2000));
  sink->WaitForTokens(3);
  engine_->Finish(1, FinishReason::kStop);
  engine_->Cancel(1);  // too late to change anything
  EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kStop);
  engine_->Drain(seconds(10));
  EXPECT_EQ(engine_->Stats().kv_cache_usage, 0);
  engine_.reset();
  const std::string text = metrics_.ExposeText();
  EXPECT_THAT(text, HasSubstr("finished_reason=\"stop\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("finished_reason=\"abort\"} 0\n"));
}

TEST_P(EngineTest, ARequestPastItsDeadlineEndsWithAnErrorAndTheOthersGoOn) {
  Start(CountUpSlowly);
  Request late = MakeRequest({20}, 2000);
  late.deadline = clock_.Now() + std::chrono::milliseconds(50);
  auto late_sink = Submit(std::move(late));
  auto sink = Submit(MakeRequest({20}, 10));
  const TokenEvent last = late_sink->Wait();
  EXPECT_EQ(last.finish_reason, FinishReason::kError);
  EXPECT_THAT(last.error.message(), HasSubstr("deadline passed"));
  EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kLength);
}

TEST_P(EngineTest, AFullQueueRefusesAndMakesRoomAgain) {
  Gate gate;
  EngineOptions options = Options();
  options.limits.max_num_seqs = 1;
  options.max_queue = 2;
  Start(
      [&gate](auto tokens, auto num_prompt, auto logits) {
        gate.Pass();
        CountUp(tokens, num_prompt, logits);
      },
      options);
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int i = 0; i < 3; ++i) sinks.push_back(Submit(MakeRequest({20})));
  const Status status = engine_->Submit(MakeRequest({20}), std::make_shared<CollectingSink>());
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("3 requests are running or waiting"));
  gate.Open();
  for (auto& sink : sinks) EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kLength);
  engine_->Drain(seconds(10));
}

TEST_P(EngineTest, RefusesWhatCouldNeverFitAndWhatIsNotInTheVocabulary) {
  Start(CountUp);
  auto sink = std::make_shared<CollectingSink>();
  Status status = engine_->Submit(MakeRequest(std::vector<int32_t>(2048, 20)), sink);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("2048"));
  status = engine_->Submit(MakeRequest({20, kVocab}), sink);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->max_model_len(), 2048);
}

TEST_P(EngineTest, AnAutomaticContextIsWhatTheKvCacheHolds) {
  EngineOptions options = Options();
  const auto layout = runtime::FakeLayout();
  options.limits.max_model_len = 1 << 20;
  options.auto_model_len = true;
  options.kv.prefix_caching = false;
  options.limits.max_num_seqs = 2;
  options.limits.max_batched_tokens = 64;
  options.kv_cache_bytes =
      7 * layout.block_bytes + 13 * layout.window_page_bytes + 2 * layout.state.slot_bytes;
  Start(CountUp, options);
  EXPECT_EQ(engine_->max_model_len(), 7 * 256);
  const Status refused = engine_->Submit(MakeRequest(std::vector<int32_t>(7 * 256, 20), 1),
                                         std::make_shared<CollectingSink>());
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("1792"));
}

TEST_P(EngineTest, GrammarsAndPenaltiesSeeEveryTokenOnce) {
  std::vector<std::vector<int32_t>> tokens;
  for (const int max_num_seqs : {1, 4}) {
    EngineOptions options = Options();
    options.limits.max_num_seqs = max_num_seqs;
    Start(HashOfAll, options);
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (int i = 0; i < 8; ++i) {
      Request request = MakeRequest(std::vector<int32_t>(static_cast<size_t>(20 + i), 3), 30);
      request.sampling.ignore_eos = true;
      request.sampling.temperature = 0.7;
      if (i % 2 == 0) request.constraint = std::make_shared<CountsModuloThree>();
      if (i % 4 > 1) request.sampling.frequency_penalty = 1.5;
      sinks.push_back(Submit(std::move(request)));
    }
    for (size_t i = 0; i < sinks.size(); ++i) {
      EXPECT_EQ(sinks[i]->Wait().finish_reason, FinishReason::kLength);
      tokens.push_back(sinks[i]->token_ids());
      for (size_t t = 0; i % 2 == 0 && t < 30; ++t) {
        EXPECT_EQ(tokens.back()[t] % 3, static_cast<int32_t>(t) % 3);
      }
    }
    engine_.reset();
  }
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(tokens[i], tokens[i + 8]);
}

TEST_P(EngineTest, AnIdInUseIsRefused) {
  Gate gate;
  Start([&gate](auto tokens, auto num_prompt, auto logits) {
    gate.Pass();
    CountUp(tokens, num_prompt, logits);
  });
  Request request = MakeRequest({20});
  auto sink = Submit(request);
  EXPECT_EQ(engine_->Submit(request, sink).code(), StatusCode::kInternal);
  gate.Open();
  sink->Wait();
}

TEST_P(EngineTest, AFailedStepEndsEveryRequestAndTheEngineSaysSo) {
  Gate gate;
  Start([&gate](auto, auto, auto) {
    gate.Pass();
    throw std::runtime_error("layer 3 fell over");
  });
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int i = 0; i < 8; ++i) sinks.push_back(Submit(MakeRequest({20})));
  EXPECT_TRUE(engine_->Stats().healthy);
  gate.Open();
  for (auto& sink : sinks) {
    const TokenEvent last = sink->Wait();
    EXPECT_EQ(last.finish_reason, FinishReason::kError);
    EXPECT_THAT(last.error.message(), HasSubstr("layer 3 fell over"));
  }
  EXPECT_FALSE(engine_->Stats().healthy);
  EXPECT_THAT(engine_->Stats().error.message(), HasSubstr("layer 3 fell over"));
  const Status status = engine_->Submit(MakeRequest({20}), std::make_shared<CollectingSink>());
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  engine_->Cancel(1);
  engine_->Drain(seconds(10));
}

TEST_P(EngineTest, LogitsThatAreNotFiniteFailOneRequest) {
  Start([](auto tokens, auto num_prompt, std::span<float> logits) {
    CountUp(tokens, num_prompt, logits);
    if (tokens.front() == 66) logits[5] = NAN;
  });
  auto bad = Submit(MakeRequest({66}));
  auto good = Submit(MakeRequest({20}, 100));
  EXPECT_EQ(bad->Wait().finish_reason, FinishReason::kError);
  EXPECT_EQ(good->Wait().finish_reason, FinishReason::kLength);
  EXPECT_TRUE(engine_->Stats().healthy);
}

TEST_P(EngineTest, ASinkThatThrowsLosesItsRequestOnly) {
  Start(CountUp);
  ASSERT_TRUE(engine_->Submit(MakeRequest({20}, 2000), std::make_shared<ThrowingSink>()).ok());
  auto good = Submit(MakeRequest({20}, 20));
  EXPECT_EQ(good->Wait().finish_reason, FinishReason::kLength);
  engine_->Drain(seconds(10));
  EXPECT_EQ(engine_->Stats().num_running, 0);
}

TEST_P(EngineTest, DrainLetsRunningRequestsFinishAndRefusesNewOnes) {
  Gate gate;
  Start([&gate](auto tokens, auto num_prompt, auto logits) {
    gate.Pass();
    CountUp(tokens, num_prompt, logits);
  });
  auto sink = Submit(MakeRequest({20}, 50));
  gate.WaitUntilEntered();
  auto drained = std::async(std::launch::async, [this] { engine_->Drain(seconds(30)); });
  while (true) {
    Request request = MakeRequest({20});
    const auto id = request.id;
    const Status status = engine_->Submit(std::move(request), std::make_shared<CollectingSink>());
    if (status.message().find("shutting down") != std::string::npos) break;
    if (status.ok()) engine_->Cancel(id);  // came before the drain
    std::this_thread::yield();
  }
  gate.Open();
  drained.get();
  EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kLength);
  EXPECT_EQ(sink->token_ids().size(), 50u);
}

TEST_P(EngineTest, DrainCancelsWhatIsNotDoneInTime) {
  Start(CountUpSlowly);
  auto sink = Submit(MakeRequest({20}, 2000));
  sink->WaitForTokens(1);
  engine_->Drain(std::chrono::milliseconds(20));
  EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kCancelled);
}

TEST_P(EngineTest, DestroyingTheEngineCancelsWhatRunsAndWhatWaits) {
  EngineOptions options = Options();
  options.limits.max_num_seqs = 1;
  Start(CountUpSlowly, options);
  auto running = Submit(MakeRequest({20}, 2000));
  auto waiting = Submit(MakeRequest({20}, 2000));
  engine_.reset();
  EXPECT_EQ(running->Wait().finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(waiting->Wait().finish_reason, FinishReason::kCancelled);
}

TEST_P(EngineTest, ReportsLogprobsOfOutputAndPrompt) {
  EngineOptions options = Options();
  options.limits.max_batched_tokens = 64;
  Start(HashOfAll, options);
  Request request = MakeRequest(Prompts()[3], 1);
  request.sampling.num_prompt_logprobs = 1;
  request.sampling.num_logprobs = 2;
  auto sink = Submit(std::move(request));
  const TokenEvent event = sink->Wait();
  ASSERT_EQ(event.prompt_logprobs.size(), 254u);
  for (size_t i = 0; i < 254; ++i) {
    EXPECT_EQ(event.prompt_logprobs[i].chosen.token_id, Prompts()[3][i + 1]);
    EXPECT_EQ(event.prompt_logprobs[i].top.size(), 1u);
  }
  ASSERT_EQ(event.logprobs.size(), 1u);
  EXPECT_EQ(event.logprobs[0].top[0].token_id, event.token_ids[0]);
  EXPECT_EQ(event.logprobs[0].rank, 1);
}

TEST_P(EngineTest, CountsAndTimesUnderVllmsNames) {
  Start(CountUpSlowly);
  Submit(MakeRequest({20, 21, 22}, 4))->Wait();
  auto cancelled = Submit(MakeRequest({20}, 2000));
  cancelled->WaitForTokens(1);
  engine_->Cancel(2);
  cancelled->Wait();
  engine_->Drain(seconds(10));
  engine_.reset();
  const std::string text = metrics_.ExposeText();
  for (const char* line :
       {"vllm:request_success_total{model_name=\"fake\",finished_reason=\"length\"} 1\n",
        "vllm:request_success_total{model_name=\"fake\",finished_reason=\"abort\"} 1\n",
        "vllm:request_success_total{model_name=\"fake\",finished_reason=\"stop\"} 0\n",
        "vllm:prompt_tokens_total{model_name=\"fake\"} 4\n",
        "vllm:num_requests_running{model_name=\"fake\"} 0\n",
        "vllm:num_requests_waiting{model_name=\"fake\"} 0\n",
        "vllm:kv_cache_usage_perc{model_name=\"fake\"} 0\n",
        "vllm:num_preemptions_total{model_name=\"fake\"} 0\n",
        "vllm:time_to_first_token_seconds_count{model_name=\"fake\"} 2\n",
        "vllm:e2e_request_latency_seconds_count{model_name=\"fake\"} 2\n",
        "vllm:request_queue_time_seconds_count{model_name=\"fake\"} 2\n",
        "vllm:request_prefill_time_seconds_count{model_name=\"fake\"} 2\n",
        "vllm:request_decode_time_seconds_count{model_name=\"fake\"} 2\n",
        "vllm:request_inference_time_seconds_count{model_name=\"fake\"} 2\n",
        "vllm:request_prompt_tokens_bucket{model_name=\"fake\",le=\"2\"} 1\n",
        "vllm:request_prompt_tokens_bucket{model_name=\"fake\",le=\"5\"} 2\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_THAT(text, HasSubstr("vllm:inter_token_latency_seconds_count"));
  EXPECT_THAT(text, HasSubstr("vllm:iteration_tokens_total_bucket"));
  EXPECT_THAT(text, HasSubstr("vllm:generation_tokens_total"));
  EXPECT_THAT(text, HasSubstr("fathom:session_spread_seconds{model_name=\"fake\"} 0\n"));
}

TEST_P(EngineTest, LimitsThatContradictEachOtherAreNamed) {
  EngineOptions options = Options();
  options.limits.max_batched_tokens = 3;
  FakeModel model(kVocab, CountUp);
  const auto engine = MakeEngine(options, {RankOf(model)}, metrics_, clock_);
  ASSERT_FALSE(engine.ok());
  EXPECT_THAT(engine.status().message(), HasSubstr("--max-num-batched-tokens is 3"));
}

INSTANTIATE_TEST_SUITE_P(PlansAhead, EngineTest, testing::Bool());

}  // namespace
}  // namespace fathom::engine
