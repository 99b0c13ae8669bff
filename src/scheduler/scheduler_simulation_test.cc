// Random arrivals, cancels, deadlines and shortages of memory, over a simulated memory that finds
// out a step which would read anything but its own past, and on a virtual clock.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "kv_cache/testing/simulated_memory.h"
#include "scheduler/scheduler.h"

namespace fathom::scheduler {
namespace {

constexpr int kVocab = 64;
constexpr int32_t kEos = 1;

// What a sequence samples depends on its tokens alone.
int32_t NextToken(std::span<const int32_t> token_ids) {
  uint64_t h = token_ids.size();
  for (const int32_t id : token_ids.last(std::min<size_t>(8, token_ids.size()))) {
    h = (h ^ static_cast<uint64_t>(id + 1)) * 0xff51afd7ed558ccdu;
  }
  return static_cast<int32_t>((h >> 33) % kVocab);
}

// Runs batches in the order in which they were planned.
class Runtime {
 public:
  explicit Runtime(const SchedulerOptions& options) : options_(options), memory_(options.cache) {}

  request::StepResult Run(const request::ScheduledBatch& batch) {
    CheckBatch(batch);
    memory_.Run(batch.transfers);
    request::StepResult result;
    result.step = batch.step;
    for (const auto& s : batch.sequences) {
      std::vector<int32_t> all(s.all_token_ids.begin(), s.all_token_ids.end());
      if (s.is_pending()) all.push_back(sampled_.at(s.request_id));
      RunTokens(s, all);
      request::SequenceResult r;
      r.request_id = s.request_id;
      if (s.sample) r.sampled_token_ids = {NextToken(all)};
      result.sequences.push_back(std::move(r));
    }
    sampled_.clear();
    for (const auto& r : result.sequences) {
      if (!r.sampled_token_ids.empty()) sampled_[r.request_id] = r.sampled_token_ids[0];
    }
    result.store_events = memory_.TakeEvents();
    return result;
  }

 private:
  void RunTokens(const request::ScheduledSequence& s, std::span<const int32_t> all) {
    ASSERT_EQ(memory_.Step(s.block_table, all, s.num_computed_tokens,
                           static_cast<int64_t>(s.token_ids.size())),
              "")
        << "request " << s.request_id;
  }

  void CheckBatch(const request::ScheduledBatch& batch) {
    ASSERT_LE(batch.num_tokens(), options_.max_num_batched_tokens);
    ASSERT_LE(static_cast<int>(batch.sequences.size()), options_.max_num_seqs);
    std::set<int32_t> slots;
    for (const auto& s : batch.sequences) {
      ASSERT_FALSE(s.token_ids.empty());
      const auto end = static_cast<size_t>(s.num_computed_tokens) + s.token_ids.size();
      const size_t num_known = s.all_token_ids.size();
      if (s.is_pending()) {
        ASSERT_EQ(end, num_known + 1);
        ASSERT_EQ(s.token_ids.size(), 1u);
        ASSERT_TRUE(s.sample);
      } else {
        ASSERT_LE(end, num_known);
        ASSERT_EQ(s.token_ids.data(), s.all_token_ids.data() + s.num_computed_tokens);
        ASSERT_EQ(s.sample, end == num_known);
      }
      ASSERT_TRUE(slots.insert(s.block_table.state_slot).second);
    }
  }

  const SchedulerOptions options_;
  kv_cache::SimulatedMemory memory_;
  std::map<uint64_t, int32_t> sampled_;  // in the last batch
};

struct Outcome {
  size_t num_prompt_tokens = 0;
  std::vector<int32_t> all_token_ids;
  std::optional<request::FinishReason> finish_reason;
  bool operator==(const Outcome&) const = default;
};

class Simulation {
 public:
  // At most `depth` steps are in flight.
  Simulation(uint64_t seed, size_t depth)
      : random_(seed),
        depth_(depth),
        options_(RandomOptions()),
        scheduler_(options_),
        runtime_(options_) {}

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
    while (!steps_.empty()) Step();  // what ran beyond the ends
    EXPECT_EQ(scheduler_.cache().usage(), 0);
    scheduler_.ClearCache();
    for (int steps = 0; scheduler_.HasWork(); ++steps) {
      ASSERT_LT(steps, 1000) << "work without end";
      Step();
    }
    EXPECT_TRUE(scheduler_.cache().pool().IsEmpty());
    EXPECT_TRUE(scheduler_.cache().pool().IsIntact());
    ExpectEveryTokenFollows();
  }

  const std::map<uint64_t, Outcome>& outcomes() const { return outcomes_; }
  const std::vector<uint64_t>& trace() const { return trace_; }
  int64_t num_cached_tokens() const { return num_cached_tokens_; }
  uint64_t num_preemptions() const { return scheduler_.num_preemptions(); }
  int64_t num_pending_tokens() const { return num_pending_tokens_; }

 private:
  SchedulerOptions RandomOptions() {
    SchedulerOptions options;
    options.max_num_seqs = 1 + static_cast<int>(random_() % 8);
    options.max_num_batched_tokens = options.max_num_seqs + static_cast<int>(random_() % 300);
    options.max_logits_rows = options.max_num_seqs + static_cast<int>(random_() % 4);
    options.max_model_len = 200 + random_() % 1500;
    options.vocab_size = kVocab;
    options.eos_token_ids = {kEos};
    const int window = options.cache.sliding_window;
    const auto min_pages = static_cast<int32_t>(kv_cache::MaxWindowPages(window, 1));
    options.cache.pools = {
        .num_blocks = 1 + static_cast<int32_t>(random_() % (random_() % 2 == 0 ? 8 : 32)),
        .num_window_pages = min_pages + static_cast<int32_t>(random_() % 32),
        .num_state_slots = 1 + static_cast<int32_t>(random_() % (2 * options.max_num_seqs)),
        .num_snapshots = static_cast<int32_t>(random_() % 6)};
    options.cache.enabled = random_() % 5 != 0;
    options.cache.retention_interval = 256 * static_cast<int64_t>(random_() % 4);
    if (random_() % 2 == 0) {
      options.cache.num_host_blocks = 2 + static_cast<int32_t>(random_() % 12);
      options.cache.num_host_snapshots = 1 + static_cast<int32_t>(random_() % 6);
      options.cache.disk_bytes = random_() % 2 == 0 ? 2000 : 0;
      options.cache.block_bytes = options.cache.snapshot_bytes = 100;
    }
    options.decode_floor = random_() % 4 == 0 ? 0 : 0.7;
    return options;
  }

  void Arrive() {
    request::Request request;
    request.id = last_id_ + 1;
    const int64_t limit = scheduler_.max_model_len() + 20;
    const auto length = 1 + static_cast<int64_t>(random_()) % (random_() % 4 == 0 ? limit : 40);
    // Most begin as an earlier request did, or with all of its prompt and answer.
    if (!outcomes_.empty() && random_() % 4 != 0) {
      request.prompt_token_ids = outcomes_.at(1 + random_() % last_id_).all_token_ids;
      if (random_() % 2 == 0) {
        request.prompt_token_ids.resize(random_() % (1 + request.prompt_token_ids.size()));
      }
    }
    const int64_t num_new = random_() % 3 == 0 ? length % 2 : length;
    for (int64_t i = 0; i < num_new; ++i) {
      request.prompt_token_ids.push_back(static_cast<int32_t>(random_() % kVocab));
    }
    request.sampling.max_tokens = 1 + static_cast<int>(random_() % 300);
    request.sampling.ignore_eos = random_() % 2 == 0;
    if (random_() % 5 == 0) request.sampling.num_prompt_logprobs = 1;
    request.priority = random_() % 4 == 0 ? static_cast<int>(random_() % 3) : 0;
    if (random_() % 2 == 0) request.session = std::to_string(random_() % 4);
    if (random_() % 4 == 0) request.cache_salt = "salt";
    if (random_() % 8 == 0) {
      request.deadline = clock_.Now() + std::chrono::milliseconds(random_() % 5000);
    }
    if (!scheduler_.Validate(request).ok()) return;
    if (random_() % 16 == 0) request.sampling.presence_penalty = 1;
    outcomes_[++last_id_] = {.num_prompt_tokens = request.prompt_token_ids.size(),
                             .all_token_ids = request.prompt_token_ids,
                             .finish_reason = {}};
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
      outcome.all_token_ids.insert(outcome.all_token_ids.end(), output.event.token_ids.begin(),
                                   output.event.token_ids.end());
      num_cached_tokens_ += output.event.finish_reason ? output.event.num_cached_tokens : 0;
      outcome.finish_reason = output.event.finish_reason;
      num_finished_ += outcome.finish_reason ? 1 : 0;
    }
  }

  void Step() {
    Take(scheduler_.EndExpired(clock_.Now()));
    while (steps_.size() < depth_ && scheduler_.CanSchedule() && Plan()) {
    }
    if (steps_.empty()) {
      clock_.Advance(std::chrono::milliseconds(1));
      return;
    }
    const auto [result, step_time] = std::move(steps_.front());
    steps_.pop_front();
    clock_.Advance(step_time);
    Take(scheduler_.Commit(result, step_time));
  }

  // False when there is nothing to do.
  bool Plan() {
    const auto batch = scheduler_.Schedule();
    EXPECT_TRUE(scheduler_.cache().pool().IsIntact());
    if (batch.empty()) {
      const bool idle = scheduler_.num_waiting() + scheduler_.num_running() == 0;
      EXPECT_TRUE(idle || !steps_.empty()) << "a step does nothing";
      return false;
    }
    for (const auto& s : batch.sequences) {
      trace_.push_back(s.request_id * 4096 + s.token_ids.size());
      num_pending_tokens_ += s.is_pending() ? 1 : 0;
    }
    trace_.push_back(batch.transfers.copies.size());
    steps_.emplace_back(runtime_.Run(batch), StepTime(batch));
    return true;
  }

  void ExpectEveryTokenFollows() const {
    for (const auto& [id, outcome] : outcomes_) {
      const std::span<const int32_t> all(outcome.all_token_ids);
      for (size_t i = outcome.num_prompt_tokens; i < all.size(); ++i) {
        ASSERT_EQ(all[i], NextToken(all.first(i))) << "request " << id;
      }
    }
  }

  // As of a device whose steps vary by a tenth.
  Duration StepTime(const request::ScheduledBatch& batch) {
    const auto micros = 1000 + 50 * batch.num_tokens();
    return std::chrono::microseconds(micros + static_cast<int>(random_() % (micros / 10)));
  }

  std::mt19937 random_;
  const size_t depth_;
  const SchedulerOptions options_;
  Scheduler scheduler_;
  VirtualClock clock_;
  Runtime runtime_;
  std::deque<std::pair<request::StepResult, Duration>> steps_;  // run, not committed
  int64_t num_pending_tokens_ = 0;
  std::map<uint64_t, Outcome> outcomes_;
  std::vector<uint64_t> trace_;
  uint64_t last_id_ = 0;
  size_t num_finished_ = 0;
  int64_t num_cached_tokens_ = 0;
};

class SchedulerSimulation : public testing::TestWithParam<size_t> {};

TEST_P(SchedulerSimulation, LosesNoMemoryAndStarvesNobodyOverManySeeds) {
  uint64_t num_preemptions = 0;
  int64_t num_cached_tokens = 0, num_pending_tokens = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    Simulation simulation(seed, GetParam());
    simulation.Run(1000);
    if (HasFailure()) return;
    num_preemptions += simulation.num_preemptions();
    num_cached_tokens += simulation.num_cached_tokens();
    num_pending_tokens += simulation.num_pending_tokens();
  }
  EXPECT_GT(num_preemptions, 5000u) << "the seeds no longer make memory short";
  EXPECT_GT(num_cached_tokens, 150'000) << "the seeds no longer share prefixes";
  EXPECT_EQ(num_pending_tokens > 100'000, GetParam() > 1) << num_pending_tokens;
}

TEST_P(SchedulerSimulation, TheSameSeedRunsTheSame) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Simulation a(seed, GetParam()), b(seed, GetParam());
    a.Run(600);
    b.Run(600);
    EXPECT_EQ(a.trace(), b.trace());
    EXPECT_EQ(a.outcomes(), b.outcomes());
  }
}

INSTANTIATE_TEST_SUITE_P(StepsInFlight, SchedulerSimulation, testing::Values(1, 2));

}  // namespace
}  // namespace fathom::scheduler
