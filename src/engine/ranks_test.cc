// The engine over several ranks of scripted models that notice a rank which does not run the same
// steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <future>
#include <stdexcept>

#include "engine/make_engine.h"
#include "engine/testing.h"
#include "engine/testing_ranks.h"
#include "runtime/local_executor.h"

namespace fathom::engine {
namespace {

using config::ParallelConfig;
using request::FinishReason;
using testing::HasSubstr;

void NotANumber(std::span<const int32_t>, int64_t, std::span<float> logits) {
  std::fill(logits.begin(), logits.end(), NAN);
}

class RanksTest : public testing::Test {
 protected:
  ~RanksTest() override { engine_.reset(); }

  void Start(const EngineOptions& options,
             const std::function<runtime::FakeModel::Script(int rank)>& script) {
    engine_.reset();
    metrics_ = std::make_unique<MetricsRegistry>();
    fakes_ = std::make_unique<FakeRanks>(options.parallel, kVocab, script);
    auto engine = MakeEngine(options, fakes_->ranks, *metrics_, clock_);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = std::move(*engine);
  }
  request::Request MakeRequest(std::vector<int32_t> prompt, int max_tokens = 20) {
    request::Request request;
    request.id = engine_->NextRequestId();
    request.prompt_token_ids = std::move(prompt);
    request.sampling.temperature = 0.7;
    request.sampling.seed = request.prompt_token_ids.size();
    request.sampling.max_tokens = max_tokens;
    request.sampling.ignore_eos = true;
    request.arrival = clock_.Now();
    return request;
  }
  std::shared_ptr<CollectingSink> Submit(request::Request request) {
    auto sink = std::make_shared<CollectingSink>();
    const Status status = engine_->Submit(std::move(request), sink);
    EXPECT_TRUE(status.ok()) << status.message();
    return sink;
  }
  // Prompts of many lengths, with grammars, penalties and prompt log-probabilities among them.
  std::vector<std::vector<int32_t>> Answers() {
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (size_t i = 0; i < 12; ++i) {
      request::Request request = MakeRequest(std::vector<int32_t>(1 + i * 37, 17));
      if (i % 3 == 0) request.constraint = std::make_shared<CountsModuloThree>();
      if (i % 4 == 1) request.sampling.frequency_penalty = 1.5;
      if (i % 4 == 2) request.sampling.num_prompt_logprobs = 1;
      if (i % 5 == 2) request.sampling.num_logprobs = 2;
      sinks.push_back(Submit(std::move(request)));
    }
    std::vector<std::vector<int32_t>> answers;
    for (size_t i = 0; i < sinks.size(); ++i) {
      const request::TokenEvent last = sinks[i]->Wait();
      EXPECT_EQ(last.finish_reason, FinishReason::kLength) << last.error.message();
      answers.push_back(sinks[i]->token_ids());
      EXPECT_EQ(sinks[i]->logprobs().size(), i % 5 == 2 ? 20u : 0u);
    }
    return answers;
  }

  const SystemClock clock_;
  std::unique_ptr<MetricsRegistry> metrics_;
  std::unique_ptr<FakeRanks> fakes_;
  std::unique_ptr<Engine> engine_;
};

struct Layout {
  ParallelConfig parallel;
  bool async;
};

TEST_F(RanksTest, EveryLayoutGivesTheAnswersOfOneRank) {
  Start(FakeOptions({}), [](int) { return HashOfAll; });
  const auto expected = Answers();
  const Layout layouts[] = {
      {{.tensor_parallel_size = 2}, false},
      {{.tensor_parallel_size = 2}, true},
      {{.data_parallel_size = 3}, false},
      {{.data_parallel_size = 2}, true},
      {{.pipeline_parallel_size = 2}, false},
      {{.pipeline_parallel_size = 3}, true},
      {{.tensor_parallel_size = 2, .data_parallel_size = 2}, true},
      {{.tensor_parallel_size = 2, .data_parallel_size = 2, .pipeline_parallel_size = 2}, false}};
  for (const Layout& layout : layouts) {
    const ParallelConfig& p = layout.parallel;
    SCOPED_TRACE(testing::Message()
                 << "tensor " << p.tensor_parallel_size << " data " << p.data_parallel_size
                 << " pipeline " << p.pipeline_parallel_size << " async " << layout.async);
    EngineOptions options = FakeOptions(p);
    options.async_scheduling = layout.async;
    // Where steps are planned ahead every tensor rank chooses; else nobody looks at these logits.
    const bool all_choose = layout.async && p.pipeline_parallel_size == 1;
    Start(options, [&](int rank) -> runtime::FakeModel::Script {
      const auto place = config::PlaceOf(p, rank);
      const auto tells = runtime::ResultPlace(p, place.data);
      const bool is_read = place.tensor == tells.tensor && place.pipeline == tells.pipeline;
      if (is_read || all_choose) return HashOfAll;
      return NotANumber;
    });
    EXPECT_EQ(Answers(), expected);
    engine_->Drain(std::chrono::seconds(10));
    EXPECT_EQ(engine_->Stats().num_running, 0);
    EXPECT_EQ(engine_->Stats().kv_cache_usage, 0);
    engine_.reset();
    for (const auto& model : fakes_->models) {
      EXPECT_EQ(model->num_steps(), fakes_->models[0]->num_steps());
    }
  }
}

TEST_F(RanksTest, RequestsAreSpreadOverDataRanksAndGoWhereTheyAreSent) {
  const EngineOptions options = FakeOptions({.data_parallel_size = 2});
  std::atomic<bool> open = false;
  Start(options, [&](int) {
    return [&](auto tokens, auto num_prompt, auto logits) {
      while (!open) std::this_thread::yield();
      HashOfAll(tokens, num_prompt, logits);
    };
  });
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int i = 0; i < 6; ++i) sinks.push_back(Submit(MakeRequest({20 + i, 21})));
  for (int i = 0; i < 3; ++i) {
    request::Request request = MakeRequest({50 + i});
    request.data_rank = 1;
    sinks.push_back(Submit(std::move(request)));
  }
  open = true;
  for (const auto& sink : sinks) EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kLength);
  request::Request wrong = MakeRequest({20});
  wrong.data_rank = 2;
  const Status refused = engine_->Submit(wrong, std::make_shared<CollectingSink>());
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("X-data-parallel-rank must be 0 to 1"));
  engine_.reset();
  const std::string text = metrics_->ExposeText();
  for (const char* line : {"vllm:prompt_tokens_total{model_name=\"fake\",engine=\"0\"} 6\n",
                           "vllm:prompt_tokens_total{model_name=\"fake\",engine=\"1\"} 9\n",
                           "vllm:num_requests_running{model_name=\"fake\",engine=\"1\"} 0\n",
                           "vllm:kv_cache_usage_perc{model_name=\"fake\",engine=\"0\"} 0\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST_F(RanksTest, ARequestGoesToTheDataRankThatHasItsPrompt) {
  Start(FakeOptions({.data_parallel_size = 2}), [](int) { return HashOfAll; });
  std::vector<int32_t> prompt(700, 30);
  request::Request first = MakeRequest(prompt);
  first.data_rank = 1;
  const auto sink = Submit(std::move(first));
  sink->Wait();
  const std::vector<int32_t> answer = sink->token_ids();
  prompt.insert(prompt.end(), answer.begin(), answer.end());
  prompt.push_back(5);
  EXPECT_EQ(Submit(MakeRequest(prompt))->Wait().num_cached_tokens, 719);
  engine_->ResetPrefixCache();
  EXPECT_EQ(Submit(MakeRequest(prompt))->Wait().num_cached_tokens, 0);
}

TEST_F(RanksTest, AFailedRankEndsEveryRequestAndNoRankWaitsForIt) {
  for (const bool async : {false, true}) {
    EngineOptions options = FakeOptions({.tensor_parallel_size = 2, .data_parallel_size = 2});
    options.async_scheduling = async;
    std::atomic<int> num_calls = 0;
    Start(options, [&](int rank) -> runtime::FakeModel::Script {
      if (rank != 2) return HashOfAll;
      return [&](auto tokens, auto num_prompt, auto logits) {
        if (++num_calls == 5) throw std::runtime_error("rank 2 fell over");
        HashOfAll(tokens, num_prompt, logits);
      };
    });
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (int i = 0; i < 8; ++i) sinks.push_back(Submit(MakeRequest({20 + i}, 1000)));
    for (auto& sink : sinks) {
      const request::TokenEvent last = sink->Wait();
      EXPECT_EQ(last.finish_reason, FinishReason::kError);
      EXPECT_THAT(last.error.message(), HasSubstr("rank 2 fell over"));
    }
    EXPECT_FALSE(engine_->Stats().healthy);
    engine_.reset();  // hangs for an hour if a rank waits until the transport's time is over
  }
}

TEST_F(RanksTest, ARankThatHangsWhenAnotherHasFailedIsNotWaitedFor) {
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  Start(FakeOptions({.tensor_parallel_size = 2}), [&](int rank) -> runtime::FakeModel::Script {
    return [rank, ended, num_calls = 0](auto tokens, auto num_prompt, auto logits) mutable {
      if (++num_calls == 5 && rank == 1) throw std::runtime_error("rank 1 fell over");
      if (num_calls == 5) ended.wait();
      HashOfAll(tokens, num_prompt, logits);
    };
  });
  const request::TokenEvent last = Submit(MakeRequest({20}, 1000))->Wait();
  EXPECT_EQ(last.finish_reason, FinishReason::kError);
  EXPECT_THAT(last.error.message(), HasSubstr("rank 1 fell over"));
  EXPECT_FALSE(engine_->Stats().healthy);
  end.set_value();
  engine_.reset();
}

TEST_F(RanksTest, TheKvCacheIsWhatEveryRankHolds) {
  const ParallelConfig parallel{.pipeline_parallel_size = 2};
  EngineOptions options = FakeOptions(parallel);
  options.kv.prefix_caching = false;
  options.limits.max_num_seqs = 1;
  options.limits.max_batched_tokens = 64;
  options.auto_model_len = true;
  options.limits.max_model_len = 1 << 20;
  const kv_cache::KvLayout layout = runtime::FakeLayout();
  options.kv_cache_bytes =
      20 * layout.block_bytes + 8 * layout.window_page_bytes + layout.state.slot_bytes;
  FakeRanks fakes(parallel, kVocab, [](int) { return HashOfAll; });
  MetricsRegistry metrics;
  fakes.ranks[1].layout.block_bytes *= 2;  // a stage of larger blocks
  const auto engine = MakeEngine(options, fakes.ranks, metrics, clock_);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  EXPECT_LT((*engine)->max_model_len(), 11 * 256);
  EXPECT_GE((*engine)->max_model_len(), 9 * 256);
}

TEST_F(RanksTest, StagesDoNotTellRoutedExpertsAndTensorRanksDo) {
  Start(FakeOptions({.pipeline_parallel_size = 2}), [](int) { return HashOfAll; });
  request::Request request = MakeRequest({20});
  request.routed_experts_start = 0;
  const Status refused = engine_->Submit(request, std::make_shared<CollectingSink>());
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("--pipeline-parallel-size"));

  Start(FakeOptions({.tensor_parallel_size = 2}), [](int) { return HashOfAll; });
  request = MakeRequest({20, 21}, 3);
  request.routed_experts_start = 0;
  const auto sink = Submit(request);
  sink->Wait();
  EXPECT_EQ(sink->routed_experts().size(),
            4u * runtime::kFakeLayers * runtime::kFakeExpertsPerToken);
}

TEST_F(RanksTest, HostMemoryOfEachRankKeepsWhatItsDeviceHasNoRoomFor) {
  EngineOptions options = FakeOptions({.tensor_parallel_size = 2, .data_parallel_size = 2});
  options.limits.max_num_seqs = 1;
  options.limits.max_model_len = 1024;
  const kv_cache::KvLayout layout = runtime::FakeLayout();
  options.kv_cache_bytes =
      5 * layout.block_bytes + 40 * layout.window_page_bytes + 8 * layout.state.slot_bytes;
  options.kv.host_bytes = int64_t{1} << 20;
  Start(options, [](int) { return HashOfAll; });
  const auto ask = [&](int32_t token) {
    request::Request request = MakeRequest(std::vector<int32_t>(800, token), 2);
    request.data_rank = 1;
    return Submit(std::move(request))->Wait().num_cached_tokens;
  };
  EXPECT_EQ(ask(20), 0);
  EXPECT_EQ(ask(21), 0);
  EXPECT_EQ(ask(22), 0);
  EXPECT_GE(ask(20), 512) << "evicted from the device, and not found in host memory";
}

}  // namespace
}  // namespace fathom::engine
