// The scheduler alone: a batch is looked at, and answered by hand.
#include "scheduler/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>

namespace fathom::scheduler {
namespace {

using request::FinishReason;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int32_t kEos = 1;

SchedulerOptions SmallOptions() {
  return {.max_num_seqs = 4,
          .max_num_batched_tokens = 100,
          .max_logits_rows = 100,
          .max_model_len = 2000,
          .vocab_size = 1000,
          .eos_token_ids = {kEos},
          .cache = {.pools = {.num_blocks = 32, .num_window_pages = 64, .num_state_slots = 4},
                    .enabled = false},
          .decode_floor = 0};
}

request::Request MakeRequest(request::RequestId id, int num_prompt_tokens, int max_tokens = 8) {
  request::Request request;
  request.id = id;
  for (int i = 0; i < num_prompt_tokens; ++i) request.prompt_token_ids.push_back(2 + i % 900);
  request.sampling.max_tokens = max_tokens;
  return request;
}

// (request, tokens) of every sequence in a batch.
std::vector<std::pair<uint64_t, size_t>> Shape(const request::ScheduledBatch& batch) {
  std::vector<std::pair<uint64_t, size_t>> shape;
  for (const auto& s : batch.sequences) shape.emplace_back(s.request_id, s.token_ids.size());
  return shape;
}

std::vector<SequenceOutput> Answer(Scheduler& scheduler, const request::ScheduledBatch& batch,
                                   int32_t token_id = 500) {
  request::StepResult result;
  result.step = batch.step;
  for (const auto& s : batch.sequences) {
    request::SequenceResult r;
    r.request_id = s.request_id;
    if (s.sample) r.sampled_token_ids = {token_id};
    result.sequences.push_back(std::move(r));
  }
  return scheduler.Commit(result, std::chrono::microseconds(100 * batch.num_tokens()));
}

using Pairs = std::vector<std::pair<uint64_t, size_t>>;

TEST(Scheduler, RunsAPromptInChunksOfTheBudgetAndSamplesAfterTheLast) {
  Scheduler scheduler(SmallOptions());
  scheduler.Submit(MakeRequest(1, 250));
  for (const size_t expected : {100, 100, 50}) {
    const auto batch = scheduler.Schedule();
    ASSERT_EQ(Shape(batch), (Pairs{{1, expected}}));
    EXPECT_EQ(batch.sequences[0].sample, expected == 50);
    EXPECT_EQ(batch.sequences[0].all_token_ids.size(), 250u);
    EXPECT_EQ(Answer(scheduler, batch).size(), expected == 50 ? 1u : 0u);
  }
  const auto batch = scheduler.Schedule();
  ASSERT_EQ(Shape(batch), (Pairs{{1, 1}}));
  EXPECT_EQ(batch.sequences[0].num_computed_tokens, 250);
  EXPECT_THAT(batch.sequences[0].token_ids, ElementsAre(500));
}

TEST(Scheduler, RunsDecodesBeforePrompts) {
  Scheduler scheduler(SmallOptions());
  scheduler.Submit(MakeRequest(1, 10));
  Answer(scheduler, scheduler.Schedule());
  scheduler.Submit(MakeRequest(2, 300));
  scheduler.Submit(MakeRequest(3, 300));
  auto batch = scheduler.Schedule();
  EXPECT_EQ(Shape(batch), (Pairs{{1, 1}, {2, 99}}));
  Answer(scheduler, batch);
  batch = scheduler.Schedule();
  EXPECT_EQ(Shape(batch), (Pairs{{1, 1}, {2, 99}}));
}

TEST(Scheduler, PutsSeveralPromptsIntoOneStep) {
  Scheduler scheduler(SmallOptions());
  for (int id = 1; id <= 6; ++id) scheduler.Submit(MakeRequest(id, 30));
  const auto batch = scheduler.Schedule();
  EXPECT_EQ(Shape(batch), (Pairs{{1, 30}, {2, 30}, {3, 30}, {4, 10}}));
  EXPECT_EQ(scheduler.num_running(), 4);
  EXPECT_EQ(scheduler.num_waiting(), 2);
}

TEST(Scheduler, AdmitsByPriorityThenByArrival) {
  SchedulerOptions options = SmallOptions();
  options.max_num_seqs = 1;
  Scheduler scheduler(options);
  for (const auto& [id, priority] : {std::pair{1, 1}, {2, 0}, {3, 1}, {4, 0}}) {
    auto request = MakeRequest(id, 5, 1);
    request.priority = priority;
    scheduler.Submit(std::move(request));
  }
  std::vector<uint64_t> order;
  while (scheduler.num_waiting() + scheduler.num_running() > 0) {
    const auto batch = scheduler.Schedule();
    order.push_back(batch.sequences.at(0).request_id);
    Answer(scheduler, batch);
  }
  EXPECT_THAT(order, ElementsAre(2, 4, 1, 3));
}

TEST(Scheduler, AdmitsAPromptOnlyWhenAllOfItAndTheNextTokenFit) {
  SchedulerOptions options = SmallOptions();
  options.cache.pools.num_blocks = 3;
  Scheduler scheduler(options);
  scheduler.Submit(MakeRequest(1, 300));  // two blocks
  scheduler.Submit(MakeRequest(2, 256));  // exactly one, but the next token needs another
  scheduler.Submit(MakeRequest(3, 300));  // must not pass by
  auto batch = scheduler.Schedule();
  EXPECT_EQ(Shape(batch), (Pairs{{2, 100}}));  // the shortest comes first
  EXPECT_EQ(batch.sequences[0].block_table.blocks.size(), 2u);
  EXPECT_EQ(scheduler.num_waiting(), 2);
  Answer(scheduler, batch);
  EXPECT_EQ(Shape(scheduler.Schedule()), (Pairs{{2, 100}}));
}

TEST(Scheduler, LeavesABlockForEachRunningSequenceThatWillGrow) {
  SchedulerOptions options = SmallOptions();
  options.cache.pools.num_blocks = 3;
  options.max_num_batched_tokens = 1000;
  for (const int max_tokens : {7, 8}) {
    Scheduler scheduler(options);
    scheduler.Submit(MakeRequest(1, 250, max_tokens));  // the last token is never run
    Answer(scheduler, scheduler.Schedule());
    scheduler.Submit(MakeRequest(2, 300));
    const bool grows = max_tokens == 8;
    EXPECT_EQ(scheduler.Schedule().sequences.size(), grows ? 1u : 2u) << max_tokens;
  }
}

TEST(Scheduler, PreemptsTheNewestAndComputesItAnewFromPromptAndOutput) {
  SchedulerOptions options = SmallOptions();
  options.cache.pools.num_blocks = 2;
  options.max_num_batched_tokens = 1000;
  Scheduler scheduler(options);
  scheduler.Submit(MakeRequest(1, 254, 100));
  scheduler.Submit(MakeRequest(2, 20, 100));
  for (int i = 0; i < 2; ++i) Answer(scheduler, scheduler.Schedule());
  // Request 1 has 256 tokens and needs its second block for the one to come.
  Answer(scheduler, scheduler.Schedule());
  const auto batch = scheduler.Schedule();
  EXPECT_EQ(Shape(batch), (Pairs{{1, 1}}));
  EXPECT_EQ(scheduler.num_preemptions(), 1u);
  EXPECT_EQ(scheduler.num_waiting(), 1);
  Answer(scheduler, batch, kEos);
  const auto again = scheduler.Schedule();
  ASSERT_EQ(Shape(again), (Pairs{{2, 23}}));  // 20 of the prompt and 3 sampled
  EXPECT_EQ(again.sequences[0].num_computed_tokens, 0);
  EXPECT_TRUE(again.sequences[0].sample);
}

TEST(Scheduler, PreemptsLowerPriorityEvenWhenItCameFirst) {
  SchedulerOptions options = SmallOptions();
  options.cache.pools.num_blocks = 2;
  options.max_num_batched_tokens = 1000;
  Scheduler scheduler(options);
  auto low = MakeRequest(1, 20, 100);
  low.priority = 5;
  scheduler.Submit(std::move(low));
  Answer(scheduler, scheduler.Schedule());
  scheduler.Submit(MakeRequest(2, 255, 100));
  for (int i = 0; i < 2; ++i) Answer(scheduler, scheduler.Schedule());
  EXPECT_EQ(Shape(scheduler.Schedule()), (Pairs{{2, 1}}));
}

TEST(Scheduler, RefusesWhatCouldNeverRunAndSaysTheLimit) {
  SchedulerOptions options = SmallOptions();
  options.cache.pools.num_blocks = 2;
  const Scheduler scheduler(options);
  EXPECT_EQ(scheduler.max_model_len(), 512);
  EXPECT_TRUE(scheduler.Validate(MakeRequest(1, 511)).ok());
  const Status status = scheduler.Validate(MakeRequest(1, 512));
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("has 512 tokens"));
  EXPECT_THAT(status.message(), HasSubstr("may have 512"));
  EXPECT_FALSE(scheduler.Validate(MakeRequest(1, 0)).ok());
  EXPECT_FALSE(scheduler.Validate(MakeRequest(1, 5, 0)).ok());
  auto request = MakeRequest(1, 5);
  request.prompt_token_ids[3] = 1000;
  EXPECT_THAT(scheduler.Validate(request).message(), HasSubstr("1000 is not in the vocabulary"));
}

TEST(Scheduler, AShortPromptPassesALongOneThatRuns) {
  Scheduler scheduler(SmallOptions());
  scheduler.Submit(MakeRequest(1, 1500));
  Answer(scheduler, scheduler.Schedule());
  scheduler.Submit(MakeRequest(2, 50));
  EXPECT_EQ(Shape(scheduler.Schedule()), (Pairs{{2, 50}, {1, 50}}));
}

TEST(Scheduler, NobodyIsPassedForMoreThanAnEqualSplitWouldTake) {
  Scheduler scheduler(SmallOptions());
  scheduler.Submit(MakeRequest(1, 1000));
  uint64_t next_id = 2;
  int num_tokens = 0;  // of others
  while (true) {       // a new short prompt every step
    scheduler.Submit(MakeRequest(next_id++, 90, 1));
    const auto batch = scheduler.Schedule();
    const auto outputs = Answer(scheduler, batch);
    for (const auto& s : batch.sequences) {
      num_tokens += s.request_id == 1 ? 0 : static_cast<int>(s.token_ids.size());
    }
    if (!outputs.empty() && outputs.front().request_id == 1) break;
    if (!outputs.empty() && outputs.back().request_id == 1) break;
    ASSERT_LT(num_tokens, 10000) << "the long prompt starves";
  }
  // Two sessions or so at a time.
  EXPECT_GT(num_tokens, 500);
}

TEST(Scheduler, ASessionWithManyPromptsDoesNotHoldUpOneWithFew) {
  SchedulerOptions options = SmallOptions();
  options.max_num_seqs = 1;
  Scheduler scheduler(options);
  for (int id = 1; id <= 20; ++id) {
    auto request = MakeRequest(id, 100, 1);
    request.session = "many";
    scheduler.Submit(std::move(request));
  }
  for (int i = 0; i < 5; ++i) Answer(scheduler, scheduler.Schedule());
  for (int id = 101; id <= 103; ++id) {
    auto request = MakeRequest(id, 100, 1);
    request.session = "few";
    scheduler.Submit(std::move(request));
  }
  std::vector<uint64_t> order;
  for (int i = 0; i < 8; ++i) {
    const auto batch = scheduler.Schedule();
    order.push_back(batch.sequences.at(0).request_id);
    Answer(scheduler, batch);
  }
  const auto is_few = [](uint64_t id) { return id > 100; };
  EXPECT_EQ(std::count_if(order.begin(), order.begin() + 6, is_few), 3) << "half of the turns";
}

// Sequences of a session that generate for long.
void SubmitSession(Scheduler& scheduler, const std::string& session,
                   std::vector<request::RequestId> ids, int num_prompt_tokens, int priority = 0) {
  for (const request::RequestId id : ids) {
    auto request = MakeRequest(id, num_prompt_tokens, 1000);
    request.session = session;
    request.priority = priority;
    scheduler.Submit(std::move(request));
  }
}

TEST(Scheduler, ASessionBeyondItsShareOfSlotsMakesRoomForOneWithinItsOwn) {
  Scheduler scheduler(SmallOptions());
  SubmitSession(scheduler, "a", {1, 2, 3, 4}, 10);
  Answer(scheduler, scheduler.Schedule());
  SubmitSession(scheduler, "b", {5, 6, 7}, 10);
  for (int i = 0; i < 6; ++i) Answer(scheduler, scheduler.Schedule());
  std::vector<uint64_t> ids;
  for (const auto& [id, num_tokens] : Shape(scheduler.Schedule())) ids.push_back(id);
  EXPECT_THAT(ids, ElementsAre(1, 2, 5, 6)) << "two each, and then nobody is displaced";
  EXPECT_EQ(scheduler.num_preemptions(), 2u);
}

TEST(Scheduler, ASessionBeyondItsShareOfMemoryMakesRoomForOneWithinItsOwn) {
  SchedulerOptions options = SmallOptions();
  options.max_num_batched_tokens = 2000;
  options.cache.pools.num_blocks = 9;
  Scheduler scheduler(options);
  SubmitSession(scheduler, "a", {1, 2, 3}, 500);
  Answer(scheduler, scheduler.Schedule());
  SubmitSession(scheduler, "b", {4}, 600);
  for (int i = 0; i < 3; ++i) Answer(scheduler, scheduler.Schedule());
  EXPECT_THAT(Shape(scheduler.Schedule()),
              ElementsAre(std::pair(1, 1), std::pair(2, 1), std::pair(4, 1)));
}

TEST(Scheduler, TheOnlySequenceOfASessionStaysHoweverLargeItIs) {
  SchedulerOptions options = SmallOptions();
  options.max_num_batched_tokens = 2000;
  options.cache.pools.num_blocks = 8;
  Scheduler scheduler(options);
  SubmitSession(scheduler, "a", {1}, 1500);
  Answer(scheduler, scheduler.Schedule());
  SubmitSession(scheduler, "b", {2}, 600);
  for (int i = 0; i < 5; ++i) {
    const auto batch = scheduler.Schedule();
    EXPECT_EQ(Shape(batch), (Pairs{{1, 1}}));
    Answer(scheduler, batch);
  }
}

TEST(Scheduler, AWaitingRequestDisplacesALowerPriority) {
  Scheduler scheduler(SmallOptions());
  SubmitSession(scheduler, "", {1, 2, 3, 4}, 10, 1);
  Answer(scheduler, scheduler.Schedule());
  SubmitSession(scheduler, "", {5}, 10, 0);
  for (int i = 0; i < 2; ++i) Answer(scheduler, scheduler.Schedule());
  EXPECT_EQ(Shape(scheduler.Schedule()), (Pairs{{5, 1}, {1, 1}, {2, 1}, {3, 1}}));
}

TEST(Scheduler, ARequestWhoseDeadlinePassedEndsWithAnErrorWaitingOrRunning) {
  SchedulerOptions options = SmallOptions();
  options.max_num_seqs = 1;
  Scheduler scheduler(options);
  const TimePoint start;
  for (const int id : {1, 2, 3}) {
    auto request = MakeRequest(id, 20, 1000);
    if (id < 3) request.deadline = start + std::chrono::seconds(id);
    scheduler.Submit(std::move(request));
  }
  for (int i = 0; i < 5; ++i) Answer(scheduler, scheduler.Schedule());
  EXPECT_TRUE(scheduler.EndExpired(start).empty());
  auto outputs = scheduler.EndExpired(start + std::chrono::seconds(2));
  ASSERT_EQ(outputs.size(), 2u);
  EXPECT_EQ(outputs[0].request_id, 1u);
  EXPECT_EQ(outputs[0].event.finish_reason, FinishReason::kError);
  EXPECT_EQ(outputs[0].event.error.code(), StatusCode::kUnavailable);
  EXPECT_THAT(outputs[0].event.error.message(), HasSubstr("deadline passed when 20 of its 20"));
  EXPECT_THAT(outputs[0].event.error.message(), HasSubstr("and 5 output tokens"));
  EXPECT_EQ(outputs[1].request_id, 2u);
  EXPECT_THAT(outputs[1].event.error.message(), HasSubstr("when 0 of its 20"));
  EXPECT_EQ(Shape(scheduler.Schedule()), (Pairs{{3, 20}}));
}

// Runs a request whose every token is `token_id`; the last event.
request::TokenEvent RunToTheEnd(request::Request request, int32_t token_id, int* num_tokens) {
  Scheduler scheduler(SmallOptions());
  scheduler.Submit(std::move(request));
  *num_tokens = 0;
  while (true) {
    for (const SequenceOutput& output : Answer(scheduler, scheduler.Schedule(), token_id)) {
      *num_tokens += static_cast<int>(output.event.token_ids.size());
      if (output.event.finish_reason) {
        EXPECT_TRUE(scheduler.cache().pool().IsEmpty());
        EXPECT_EQ(scheduler.num_running() + scheduler.num_waiting(), 0);
        return output.event;
      }
    }
  }
}

TEST(Scheduler, StopsAtAnEndTokenAStopIdMaxTokensOrAFullContext) {
  int num_tokens = 0;
  auto event = RunToTheEnd(MakeRequest(1, 5), kEos, &num_tokens);
  EXPECT_EQ(event.finish_reason, FinishReason::kStop);
  EXPECT_EQ(event.stop_token_id, kEos);
  EXPECT_EQ(num_tokens, 1);

  auto request = MakeRequest(1, 5);
  request.sampling.stop_token_ids = {7, 9};
  event = RunToTheEnd(request, 9, &num_tokens);
  EXPECT_EQ(event.finish_reason, FinishReason::kStop);
  EXPECT_EQ(event.stop_token_id, 9);

  event = RunToTheEnd(MakeRequest(1, 5, 8), 500, &num_tokens);
  EXPECT_EQ(event.finish_reason, FinishReason::kLength);
  EXPECT_EQ(event.stop_token_id, std::nullopt);
  EXPECT_EQ(num_tokens, 8);

  event = RunToTheEnd(MakeRequest(1, 1990, 100), 500, &num_tokens);
  EXPECT_EQ(event.finish_reason, FinishReason::kLength);
  EXPECT_EQ(num_tokens, 10);
}

TEST(Scheduler, IgnoreEosRunsPastEveryStopId) {
  int num_tokens = 0;
  auto request = MakeRequest(1, 5, 8);
  request.sampling.ignore_eos = true;
  request.sampling.stop_token_ids = {kEos};
  const auto event = RunToTheEnd(request, kEos, &num_tokens);
  EXPECT_EQ(event.finish_reason, FinishReason::kLength);
  EXPECT_EQ(num_tokens, 8);
}

TEST(Scheduler, AFailedSequenceEndsAndTheOthersGoOn) {
  Scheduler scheduler(SmallOptions());
  scheduler.Submit(MakeRequest(1, 5));
  scheduler.Submit(MakeRequest(2, 5));
  const auto batch = scheduler.Schedule();
  request::StepResult result;
  result.step = batch.step;
  result.sequences.resize(2);
  result.sequences[0].request_id = 1;
  result.sequences[0].status = InternalError("not finite");
  result.sequences[1].request_id = 2;
  result.sequences[1].sampled_token_ids = {6};
  const auto outputs = scheduler.Commit(result, {});
  ASSERT_EQ(outputs.size(), 2u);
  EXPECT_EQ(outputs[0].event.finish_reason, FinishReason::kError);
  EXPECT_EQ(outputs[0].event.error.message(), "not finite");
  EXPECT_EQ(outputs[1].event.finish_reason, std::nullopt);
  EXPECT_EQ(Shape(scheduler.Schedule()), (Pairs{{2, 1}}));
}

TEST(Scheduler, CancelFreesMemoryAtOnce) {
  Scheduler scheduler(SmallOptions());
  scheduler.Submit(MakeRequest(1, 500));
  scheduler.Submit(MakeRequest(2, 500));
  Answer(scheduler, scheduler.Schedule());
  EXPECT_GT(scheduler.cache().usage(), 0);
  EXPECT_TRUE(scheduler.Cancel(1));
  EXPECT_TRUE(scheduler.Cancel(2));
  EXPECT_FALSE(scheduler.Cancel(2));
  EXPECT_TRUE(scheduler.cache().pool().IsEmpty());
  EXPECT_TRUE(scheduler.Schedule().sequences.empty());
  EXPECT_EQ(scheduler.cache().usage(), 0);
}

TEST(Scheduler, PromptLogprobsTakeLogitsRowsAndComeWithTheFirstToken) {
  SchedulerOptions options = SmallOptions();
  options.max_logits_rows = 10;
  Scheduler scheduler(options);
  auto request = MakeRequest(1, 25);
  request.sampling.num_prompt_logprobs = 0;
  scheduler.Submit(std::move(request));
  scheduler.Submit(MakeRequest(2, 200));
  std::vector<SequenceOutput> outputs;
  for (const size_t expected : {10, 10, 5}) {
    const auto batch = scheduler.Schedule();
    ASSERT_EQ(batch.sequences[0].token_ids.size(), expected);
    request::StepResult result;
    result.step = batch.step;
    for (const auto& s : batch.sequences) {
      request::SequenceResult r;
      r.request_id = s.request_id;
      if (s.sample) r.sampled_token_ids = {500};
      if (s.request_id == 1) {
        const size_t begin = static_cast<size_t>(s.num_computed_tokens) + 1;
        for (size_t t = begin; t < begin + expected && t < 25; ++t) {
          r.prompt_logprobs.push_back(
              {.chosen = {.token_id = s.all_token_ids[t], .logprob = -1}, .rank = 1, .top = {}});
        }
      }
      result.sequences.push_back(std::move(r));
    }
    outputs = scheduler.Commit(result, {});
  }
  const auto& event = outputs.at(0).event;
  ASSERT_EQ(event.prompt_logprobs.size(), 24u);
  for (int i = 0; i < 24; ++i)
    EXPECT_EQ(event.prompt_logprobs[static_cast<size_t>(i)].chosen.token_id, 3 + i);
}

}  // namespace
}  // namespace fathom::scheduler
