// Random arrivals, cancels, deadlines and shortages of memory, over a runtime that only remembers
// (testing/remembering_runtime.h) and whose time is virtual.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "scheduler/scheduler.h"
#include "scheduler/testing/remembering_runtime.h"

namespace fathom::scheduler {
namespace {

constexpr int kVocab = 64;
constexpr int32_t kEos = 1;

struct Outcome {
  std::vector<int32_t> token_ids;
  std::optional<request::FinishReason> finish_reason;
  bool operator==(const Outcome&) const = default;
};

class Simulation {
 public:
  explicit Simulation(uint64_t seed)
      : random_(seed), options_(RandomOptions()), scheduler_(options_), runtime_(options_) {}

  void Run(int num_events) {
    for (int i = 0; i < num_events && !testing::Test::HasFatalFailure(); ++i) {
      const uint32_t event = random_() % 16;
      if (event < 3 && outcomes_.size() - num_finished_ < 24) {
        Arrive();
      } else if (event == 3 && !outcomes_.empty()) {
        Cancel();
      } else {
        Step();
      }
    }
    // No starvation: what is left ends within the work that it can need, preempted again and again
    // or not.
    for (int64_t steps = 0; num_finished_ < outcomes_.size(); ++steps) {
      ASSERT_LT(steps, 200000) << "a request starves";
      Step();
      if (testing::Test::HasFatalFailure()) return;
    }
    EXPECT_TRUE(scheduler_.pool().IsEmpty());
    EXPECT_TRUE(scheduler_.pool().IsIntact());
    EXPECT_TRUE(scheduler_.Schedule().sequences.empty());
  }

  const std::map<uint64_t, Outcome>& outcomes() const { return outcomes_; }
  const std::vector<uint64_t>& trace() const { return trace_; }
  uint64_t num_preemptions() const { return scheduler_.num_preemptions(); }

 private:
  SchedulerOptions RandomOptions() {
    SchedulerOptions options;
    options.max_num_seqs = 1 + static_cast<int>(random_() % 8);
    options.max_num_batched_tokens = options.max_num_seqs + static_cast<int>(random_() % 300);
    options.max_logits_rows = options.max_num_seqs + static_cast<int>(random_() % 4);
    options.max_model_len = 200 + random_() % 1500;
    options.vocab_size = kVocab;
    options.sliding_window = RememberingRuntime::kWindow;
    options.eos_token_ids = {kEos};
    const auto min_pages =
        static_cast<int32_t>(kv_cache::MaxWindowPages(RememberingRuntime::kWindow, 1));
    options.pools = {.num_blocks = 1 + static_cast<int32_t>(random_() % 12),
                     .num_window_pages = min_pages + static_cast<int32_t>(random_() % 16),
                     .num_state_slots = 1 + static_cast<int32_t>(random_() % options.max_num_seqs)};
    options.decode_floor = random_() % 4 == 0 ? 0 : 0.7;
    return options;
  }

  void Arrive() {
    request::Request request;
    request.id = ++last_id_;
    const int64_t limit = scheduler_.max_model_len() + 20;
    const auto length = 1 + static_cast<int64_t>(random_()) % (random_() % 4 == 0 ? limit : 40);
    for (int64_t i = 0; i < length; ++i) {
      request.prompt_token_ids.push_back(static_cast<int32_t>(random_() % kVocab));
    }
    request.sampling.max_tokens = 1 + static_cast<int>(random_() % 300);
    request.sampling.ignore_eos = random_() % 2 == 0;
    if (random_() % 5 == 0) request.sampling.num_prompt_logprobs = 1;
    request.priority = random_() % 4 == 0 ? static_cast<int>(random_() % 3) : 0;
    if (random_() % 2 == 0) request.session = std::to_string(random_() % 4);
    if (random_() % 8 == 0) {
      request.deadline = clock_.Now() + std::chrono::milliseconds(random_() % 5000);
    }
    if (!scheduler_.Validate(request).ok()) return;
    outcomes_[request.id];
    scheduler_.Submit(std::move(request));
  }

  void Cancel() {
    const uint64_t id = 1 + random_() % last_id_;
    if (!scheduler_.Cancel(id)) return;
    outcomes_[id].finish_reason = request::FinishReason::kCancelled;
    ++num_finished_;
  }

  void Take(const std::vector<SequenceOutput>& outputs) {
    for (const SequenceOutput& output : outputs) {
      Outcome& outcome = outcomes_.at(output.request_id);
      ASSERT_FALSE(outcome.finish_reason);
      outcome.token_ids.insert(outcome.token_ids.end(), output.event.token_ids.begin(),
                               output.event.token_ids.end());
      outcome.finish_reason = output.event.finish_reason;
      num_finished_ += outcome.finish_reason ? 1 : 0;
    }
  }

  void Step() {
    Take(scheduler_.EndExpired(clock_.Now()));
    const auto batch = scheduler_.Schedule();
    ASSERT_TRUE(scheduler_.pool().IsIntact());
    if (batch.sequences.empty()) {
      ASSERT_EQ(scheduler_.num_waiting() + scheduler_.num_running(), 0) << "a step does nothing";
    }
    for (const auto& s : batch.sequences)
      trace_.push_back(s.request_id * 4096 + s.token_ids.size());
    const auto result = runtime_.Run(batch);
    const Duration step_time = StepTime(batch);
    clock_.Advance(step_time);
    Take(scheduler_.Commit(result, step_time));
  }

  // As of a device whose steps vary by a tenth.
  Duration StepTime(const request::ScheduledBatch& batch) {
    const auto micros = 1000 + 50 * batch.num_tokens();
    return std::chrono::microseconds(micros + static_cast<int>(random_() % (micros / 10)));
  }

  std::mt19937 random_;
  const SchedulerOptions options_;
  Scheduler scheduler_;
  VirtualClock clock_;
  RememberingRuntime runtime_;
  std::map<uint64_t, Outcome> outcomes_;
  std::vector<uint64_t> trace_;
  uint64_t last_id_ = 0;
  size_t num_finished_ = 0;
};

TEST(SchedulerSimulation, LosesNoMemoryAndStarvesNobodyOverManySeeds) {
  uint64_t num_preemptions = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    Simulation simulation(seed);
    simulation.Run(1000);
    if (HasFatalFailure()) return;
    num_preemptions += simulation.num_preemptions();
  }
  EXPECT_GT(num_preemptions, 5000u) << "the seeds no longer make memory short";
}

TEST(SchedulerSimulation, TheSameSeedRunsTheSame) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Simulation a(seed), b(seed);
    a.Run(600);
    b.Run(600);
    EXPECT_EQ(a.trace(), b.trace());
    EXPECT_EQ(a.outcomes(), b.outcomes());
  }
}

}  // namespace
}  // namespace fathom::scheduler
