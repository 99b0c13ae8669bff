// The loop alone, over an executor whose steps a test lets go one by one.
#include "engine/engine_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "engine/testing.h"

namespace fathom::engine {
namespace {

using request::FinishReason;
using request::TokenEvent;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int32_t kToken = 7;
constexpr int kAllSteps = 1 << 30;
constexpr int kEndless = 1 << 20;  // tokens

// Samples kToken for everyone.
class HeldExecutor final : public runtime::Executor {
 public:
  Status Start(std::span<const request::ScheduledBatch> batches) override {
    std::lock_guard lock(mutex_);
    if (++num_started_ > num_good_) return PeerError("node 1 is gone");
    batch_ = &batches[0];
    changed_.notify_all();
    return OkStatus();
  }
  Result<std::vector<request::StepResult>> Wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return num_started_ <= num_let_go_; });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    request::StepResult result{.step = batch_->step, .sequences = {}};
    for (const request::ScheduledSequence& s : batch_->sequences) {
      request::SequenceResult& sampled = result.sequences.emplace_back();
      sampled.request_id = s.request_id;
      sampled.sampled_token_ids = {kToken};
    }
    return std::vector<request::StepResult>{std::move(result)};
  }
  int max_in_flight() const override { return 1; }

  void FailAfter(int num_steps) { num_good_ = num_steps; }
  void LetGo(int num_steps) {
    std::lock_guard lock(mutex_);
    num_let_go_ = num_steps;
    changed_.notify_all();
  }
  void WaitUntilStarted(int num_steps) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_started_ >= num_steps; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const request::ScheduledBatch* batch_ = nullptr;
  int num_started_ = 0;
  int num_let_go_ = 0;
  int num_good_ = kAllSteps;
};

// Leaves when it is told that its request has ended, and not before.
class LeavingSink final : public request::TokenSink {
 public:
  LeavingSink(Engine& engine, request::RequestId id) : engine_(engine), id_(id) {}
  void OnEvent(TokenEvent event) override {
    if (event.finish_reason) engine_.Cancel(id_);
  }

 private:
  Engine& engine_;
  const request::RequestId id_;
};

class ThrowsAtTheEnd final : public request::TokenSink {
 public:
  void OnEvent(TokenEvent event) override {
    if (event.finish_reason) throw std::runtime_error("no reader");
  }
};

class EngineLoopTest : public testing::Test {
 protected:
  static constexpr int kMaxLive = 4;

  EngineLoopTest() {
    auto executor = std::make_unique<HeldExecutor>();
    executor_ = executor.get();
    const scheduler::SchedulerOptions options{
        .max_num_seqs = kMaxLive,
        .max_num_batched_tokens = 64,
        .max_logits_rows = kMaxLive,
        .max_model_len = 2 * kEndless,
        .vocab_size = 100,
        .eos_token_ids = {},
        .cache = {.pools = {.num_blocks = 16384, .num_window_pages = 64, .num_state_slots = 8}},
        .decode_floor = 0};
    loop_ = std::make_unique<EngineLoop>(
        EngineLoopOptions{.model_name = "held", .max_live_requests = kMaxLive}, options,
        std::move(executor), metrics_, clock_);
  }
  // Ids count from 1.
  request::RequestId Submit(int max_tokens, std::shared_ptr<request::TokenSink> sink) {
    request::Request request;
    request.id = loop_->NextRequestId();
    request.prompt_token_ids = {20};
    request.sampling.max_tokens = max_tokens;
    const request::RequestId id = request.id;
    Status status;
    do {  // those that have just ended make room in a moment
      status = loop_->Submit(request, sink);
    } while (status.message().find("are running or waiting") != std::string::npos);
    EXPECT_TRUE(status.ok()) << status.message();
    return id;
  }

  SystemClock clock_;
  MetricsRegistry metrics_;
  HeldExecutor* executor_ = nullptr;
  std::unique_ptr<EngineLoop> loop_;
};

TEST_F(EngineLoopTest, ThereIsRoomForEveryCommandWhileAStepRuns) {
  auto running = std::make_shared<CollectingSink>();
  const auto running_id = Submit(kEndless, running);
  executor_->WaitUntilStarted(1);
  for (request::RequestId id = 2; id <= kMaxLive; ++id) {
    Submit(1, std::make_shared<LeavingSink>(*loop_, id));
  }
  executor_->LetGo(2);  // the second step ends all but the first request
  executor_->WaitUntilStarted(3);
  // These wait for the third step, with what the readers of the ended ones ask for.
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int i = 1; i < kMaxLive; ++i) {
    sinks.push_back(std::make_shared<CollectingSink>());
    loop_->Cancel(Submit(1, sinks.back()));
  }
  loop_->Cancel(running_id);
  loop_->ResetPrefixCache();
  executor_->LetGo(kAllSteps);
  EXPECT_EQ(running->Wait().finish_reason, FinishReason::kCancelled);
  for (const auto& sink : sinks) EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kCancelled);
}

TEST_F(EngineLoopTest, WhatWasSampledBeforeTheLoopFailsIsDelivered) {
  executor_->FailAfter(2);
  auto ends = std::make_shared<CollectingSink>();
  auto goes_on = std::make_shared<CollectingSink>();
  Submit(kEndless, goes_on);
  executor_->WaitUntilStarted(1);
  Submit(1, ends);
  executor_->LetGo(kAllSteps);
  EXPECT_EQ(ends->Wait().finish_reason, FinishReason::kLength);
  EXPECT_THAT(ends->token_ids(), ElementsAre(kToken));
  const TokenEvent last = goes_on->Wait();
  EXPECT_EQ(last.finish_reason, FinishReason::kError);
  EXPECT_THAT(last.error.message(), HasSubstr("node 1 is gone"));
  EXPECT_THAT(goes_on->token_ids(), ElementsAre(kToken, kToken));
}

TEST_F(EngineLoopTest, AReaderThatFailsAtTheEndOfTheEngineHurtsNobody) {
  auto sink = std::make_shared<CollectingSink>();
  Submit(kEndless, std::make_shared<ThrowsAtTheEnd>());
  Submit(kEndless, sink);
  executor_->LetGo(kAllSteps);
  executor_->WaitUntilStarted(1);
  loop_.reset();
  EXPECT_EQ(sink->Wait().finish_reason, FinishReason::kCancelled);
}

}  // namespace
}  // namespace fathom::engine
