// The scheduler with its prefix cache: what was computed once is not run again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <optional>
#include <vector>

#include "kv_cache/testing/simulated_memory.h"
#include "scheduler/scheduler.h"

namespace fathom::scheduler {
namespace {

using request::FinishReason;
using request::RequestId;

std::vector<int32_t> Tokens(int count, int seed = 0) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(2 + (i * 31 + seed * 7) % 900);
  return tokens;
}

class SchedulerCache : public testing::Test {
 protected:
  SchedulerCache() { Start(Options()); }

  static SchedulerOptions Options() {
    return {.max_num_seqs = 4,
            .max_num_batched_tokens = 300,
            .max_logits_rows = 300,
            .max_model_len = 4000,
            .vocab_size = 1000,
            .eos_token_ids = {1},
            .cache = {.pools = {.num_blocks = 32,
                                .num_window_pages = 64,
                                .num_state_slots = 8,
                                .num_snapshots = 8}},
            .decode_floor = 0};
  }
  void Start(const SchedulerOptions& options) {
    scheduler_.emplace(options);
    memory_.emplace(options.cache);
  }

  void Submit(RequestId id, std::vector<int32_t> prompt, int max_tokens = 1, int priority = 0) {
    request::Request request;
    request.id = id;
    request.prompt_token_ids = std::move(prompt);
    request.sampling.max_tokens = max_tokens;
    request.priority = priority;
    scheduler_->Submit(std::move(request));
  }

  // One step; every token sampled is 500.
  request::ScheduledBatch Step() {
    auto batch = scheduler_->Schedule();
    memory_->Run(batch.transfers);
    request::StepResult result;
    result.step = batch.step;
    for (const auto& s : batch.sequences) {
      const auto num_tokens = static_cast<int64_t>(s.token_ids.size());
      EXPECT_EQ(memory_->Step(s.block_table, s.all_token_ids, s.num_computed_tokens, num_tokens),
                "");
      num_run_[s.request_id] += num_tokens;
      request::SequenceResult r;
      r.request_id = s.request_id;
      if (s.sample) r.sampled_token_ids = {500};
      for (int64_t i = 0; s.request->routed_experts_start && i < num_tokens; ++i) {
        r.routed_experts.push_back(static_cast<uint16_t>(s.num_computed_tokens + i));
      }
      result.sequences.push_back(std::move(r));
    }
    result.store_events = memory_->TakeEvents();
    const auto step_time = std::chrono::microseconds(100 * batch.num_tokens());
    for (const SequenceOutput& output : scheduler_->Commit(result, step_time)) {
      last_[output.request_id] = output.event;
    }
    return batch;
  }
  void RunToTheEnd() {
    while (scheduler_->num_running() + scheduler_->num_waiting() > 0) Step();
  }

  std::optional<Scheduler> scheduler_;
  std::optional<kv_cache::SimulatedMemory> memory_;
  std::map<RequestId, int64_t> num_run_;  // tokens, by request
  std::map<RequestId, request::TokenEvent> last_;
};

TEST_F(SchedulerCache, ATurnThatGoesOnRunsOnlyWhatIsNew) {
  Submit(1, Tokens(700), 20);
  RunToTheEnd();
  EXPECT_EQ(last_[1].num_cached_tokens, 0);
  auto next = Tokens(700);
  next.insert(next.end(), 20, 500);  // the answer
  for (const int32_t id : Tokens(30, 5)) next.push_back(id);
  Submit(2, next, 3);
  RunToTheEnd();
  // The answer's last token was sampled but never run.
  EXPECT_EQ(last_[2].num_cached_tokens, 719);
  EXPECT_EQ(num_run_[2], 31 + 2);
}

TEST_F(SchedulerCache, ChoicesOfOnePromptComputeItOnce) {
  for (const RequestId id : {1, 2, 3, 4}) Submit(id, Tokens(700), 4);
  RunToTheEnd();
  int64_t num_run = 0;
  for (const auto& [id, n] : num_run_) num_run += n;
  EXPECT_LE(num_run, 700 + 4 * (3 + 8)) << "the prompt, and a token or so of it for each choice";
  EXPECT_EQ(scheduler_->cache().usage(), 0);
}

TEST_F(SchedulerCache, WhoWaitsForAPrefixInTheMakingHoldsUpNobody) {
  Submit(1, Tokens(1500));
  Step();
  Submit(2, Tokens(1500));
  Submit(3, Tokens(20, 9));
  const auto batch = Step();
  std::vector<RequestId> ids;
  for (const auto& s : batch.sequences) ids.push_back(s.request_id);
  EXPECT_THAT(ids, testing::UnorderedElementsAre(1, 3));
  RunToTheEnd();
  EXPECT_GT(last_[2].num_cached_tokens, 1400);
}

TEST_F(SchedulerCache, APreemptedSequenceGoesOnWhereItWas) {
  auto options = Options();
  options.max_num_seqs = 1;
  Start(options);
  Submit(1, Tokens(600), 50, /*priority=*/1);
  for (int i = 0; i < 10; ++i) Step();
  Submit(2, Tokens(100, 3), 5);
  RunToTheEnd();
  EXPECT_EQ(scheduler_->num_preemptions(), 1u);
  EXPECT_EQ(num_run_[1], 600 + 49) << "nothing is run twice";
  EXPECT_EQ(last_[1].num_cached_tokens, 0) << "its own work is no cached prompt";
  EXPECT_EQ(last_[1].finish_reason, FinishReason::kLength);
}

TEST_F(SchedulerCache, ACancelledPrefillKeepsWhatItComputed) {
  Submit(1, Tokens(3000));
  for (int i = 0; i < 5; ++i) Step();
  ASSERT_TRUE(scheduler_->Cancel(1));
  EXPECT_EQ(scheduler_->cache().usage(), 0);
  Submit(2, Tokens(3000));
  RunToTheEnd();
  EXPECT_EQ(num_run_[1] + num_run_[2], 3000);
}

TEST_F(SchedulerCache, ALongPromptThatIsCachedComesBeforeAShortOneThatIsNot) {
  auto options = Options();
  options.max_num_seqs = 1;
  Start(options);
  Submit(1, Tokens(3000));
  RunToTheEnd();
  Submit(2, Tokens(200, 4));
  auto longer = Tokens(3000);
  longer.push_back(7);
  Submit(3, longer);
  EXPECT_EQ(Step().sequences.at(0).request_id, 3u);
}

TEST_F(SchedulerCache, PromptLogprobsComputeAllOfThePrompt) {
  Submit(1, Tokens(700));
  RunToTheEnd();
  request::Request request;
  request.id = 2;
  request.prompt_token_ids = Tokens(700);
  request.sampling.max_tokens = 1;
  request.sampling.num_prompt_logprobs = 1;
  scheduler_->Submit(std::move(request));
  RunToTheEnd();
  EXPECT_EQ(num_run_[2], 700);
  EXPECT_EQ(last_[2].num_cached_tokens, 0);
}

TEST_F(SchedulerCache, ATokenWhoseExpertsAreAskedForIsRun) {
  struct Case {
    int length, start, num_run;
  };
  RequestId id = 0;
  for (const Case& c : {Case{700, 0, 700}, {700, 0, 700}, {800, 700, 100}, {800, 800, 1}}) {
    request::Request request;
    request.id = ++id;
    request.prompt_token_ids = Tokens(c.length);
    request.sampling.max_tokens = 1;
    request.routed_experts_start = c.start;
    scheduler_->Submit(std::move(request));
    RunToTheEnd();
    EXPECT_EQ(num_run_[id], c.num_run) << id;
    // Step reports the position of every token as its one expert.
    const auto& experts = last_[id].routed_experts;
    ASSERT_EQ(experts.size(), static_cast<size_t>(c.length - c.start));
    for (size_t i = 0; i < experts.size(); ++i)
      EXPECT_EQ(experts[i], c.start + static_cast<int>(i));
  }
}

TEST_F(SchedulerCache, AnotherSaltSharesNothing) {
  Submit(1, Tokens(700));
  RunToTheEnd();
  request::Request request;
  request.id = 2;
  request.prompt_token_ids = Tokens(700);
  request.cache_salt = "another";
  request.sampling.max_tokens = 1;
  scheduler_->Submit(std::move(request));
  RunToTheEnd();
  EXPECT_EQ(num_run_[2], 700);
}

TEST_F(SchedulerCache, WhatTheDeviceLostComesBackFromHostAndDisk) {
  auto options = Options();
  options.cache.pools.num_blocks = 16;
  options.cache.num_host_blocks = 16;
  options.cache.num_host_snapshots = 8;
  options.cache.disk_bytes = 1 << 20;
  options.cache.block_bytes = options.cache.snapshot_bytes = 100;
  Start(options);
  Submit(1, Tokens(2000));
  RunToTheEnd();
  for (int id = 2; id <= 6; ++id) {  // drives it out
    Submit(static_cast<RequestId>(id), Tokens(3500, id));
    RunToTheEnd();
  }
  Submit(10, Tokens(2000));
  RunToTheEnd();
  EXPECT_GE(last_[10].num_cached_tokens, 1792);
  EXPECT_GT(scheduler_->cache().stats().disk_hit_tokens, 0u);
}

}  // namespace
}  // namespace fathom::scheduler
