// Random arrivals, cancels and shortages of memory against a runtime that only remembers: every
// entry of the cache is marked with whose it is, and a batch may read nothing but its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "scheduler/scheduler.h"

namespace fathom::scheduler {
namespace {

constexpr int kWindow = 128;
constexpr int kVocab = 64;
constexpr int32_t kEos = 1;

// Marks what each block and page was last written for, and checks what a step may read.
class RememberingRuntime {
 public:
  explicit RememberingRuntime(const SchedulerOptions& options)
      : options_(options),
        blocks_(static_cast<size_t>(options.pools.num_blocks)),
        pages_(static_cast<size_t>(options.pools.num_window_pages)) {}

  request::StepResult Run(const request::ScheduledBatch& batch) {
    CheckBatch(batch);
    request::StepResult result{.step = batch.step, .sequences = {}};
    for (const auto& s : batch.sequences) {
      for (size_t i = 0; i < s.token_ids.size(); ++i) {
        Write(s, s.num_computed_tokens + static_cast<int64_t>(i));
      }
      CheckReadable(s);
      request::SequenceResult r;
      r.request_id = s.request_id;
      if (s.sample) r.sampled_token_ids = {NextToken(s)};
      result.sequences.push_back(std::move(r));
    }
    return result;
  }

  // What a request's next token is, from its tokens alone.
  static int32_t NextToken(const request::ScheduledSequence& s) {
    uint64_t h = s.request_id * 0x9e3779b97f4a7c15u + s.all_token_ids.size();
    for (const int32_t id : s.all_token_ids.last(1))
      h = (h ^ static_cast<uint64_t>(id)) * 0xff51afd7ed558ccdu;
    return static_cast<int32_t>((h >> 33) % kVocab);
  }

 private:
  // Whose a block or page is: the index-th of a request, holding its first num_tokens tokens.
  struct Mark {
    uint64_t request_id = 0;
    int64_t index = 0;
    int64_t num_tokens = 0;
    bool operator==(const Mark&) const = default;
  };

  void CheckBatch(const request::ScheduledBatch& batch) {
    ASSERT_LE(batch.num_tokens(), options_.max_num_batched_tokens);
    ASSERT_LE(static_cast<int>(batch.sequences.size()), options_.max_num_seqs);
    std::set<int32_t> blocks, pages, slots;
    for (const auto& s : batch.sequences) {
      ASSERT_FALSE(s.token_ids.empty());
      const auto end = static_cast<size_t>(s.num_computed_tokens) + s.token_ids.size();
      ASSERT_LE(end, s.all_token_ids.size());
      ASSERT_EQ(s.token_ids.data(), s.all_token_ids.data() + s.num_computed_tokens);
      ASSERT_EQ(s.sample, end == s.all_token_ids.size());
      for (const int32_t id : s.block_table.blocks) ASSERT_TRUE(blocks.insert(id).second);
      for (const int32_t id : s.block_table.window_pages) ASSERT_TRUE(pages.insert(id).second);
      ASSERT_TRUE(slots.insert(s.block_table.state_slot).second);
    }
  }

  Mark& BlockMark(const request::ScheduledSequence& s, int64_t index) {
    const int32_t id = s.block_table.blocks.at(static_cast<size_t>(index));
    return blocks_.at(static_cast<size_t>(id));
  }
  Mark& PageMark(const request::ScheduledSequence& s, int64_t index) {
    const int64_t i = index - s.block_table.first_window_page;
    return pages_.at(static_cast<size_t>(s.block_table.window_pages.at(static_cast<size_t>(i))));
  }

  // Tokens come in order, so a mark either begins or grows.
  void Write(const request::ScheduledSequence& s, int64_t position) {
    WriteMark(s, BlockMark(s, position / kv_cache::kBlockTokens), position, kv_cache::kBlockTokens);
    WriteMark(s, PageMark(s, position / kv_cache::kWindowPageTokens), position,
              kv_cache::kWindowPageTokens);
  }
  void WriteMark(const request::ScheduledSequence& s, Mark& mark, int64_t position, int64_t size) {
    if (position % size == 0) mark = {s.request_id, position / size, 0};
    ASSERT_EQ(mark, (Mark{s.request_id, position / size, position % size}));
    ++mark.num_tokens;
  }

  void CheckReadable(const request::ScheduledSequence& s) {
    const int64_t end = s.num_computed_tokens + static_cast<int64_t>(s.token_ids.size());
    const int64_t reach = s.num_computed_tokens - kv_cache::kMaxRollbackTokens - (kWindow - 1);
    for (int64_t i = 0; i * kv_cache::kBlockTokens < end; ++i) {
      CheckMark(s, BlockMark(s, i), i, end, kv_cache::kBlockTokens);
    }
    for (int64_t i = std::max<int64_t>(0, reach) / kv_cache::kWindowPageTokens;
         i * kv_cache::kWindowPageTokens < end; ++i) {
      CheckMark(s, PageMark(s, i), i, end, kv_cache::kWindowPageTokens);
    }
  }
  void CheckMark(const request::ScheduledSequence& s, const Mark& mark, int64_t index, int64_t end,
                 int64_t size) {
    ASSERT_EQ(mark, (Mark{s.request_id, index, std::min(size, end - index * size)}));
  }

  const SchedulerOptions options_;
  std::vector<Mark> blocks_, pages_;
};

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
    options.sliding_window = kWindow;
    options.eos_token_ids = {kEos};
    const auto min_pages = static_cast<int32_t>(kv_cache::MaxWindowPages(kWindow, 1));
    options.pools = {.num_blocks = 1 + static_cast<int32_t>(random_() % 12),
                     .num_window_pages = min_pages + static_cast<int32_t>(random_() % 16),
                     .num_state_slots = 1 + static_cast<int32_t>(random_() % options.max_num_seqs)};
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
    request.priority = static_cast<int>(random_() % 3);
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

  void Step() {
    const auto batch = scheduler_.Schedule();
    ASSERT_TRUE(scheduler_.pool().IsIntact());
    if (batch.sequences.empty()) {
      ASSERT_EQ(scheduler_.num_waiting() + scheduler_.num_running(), 0) << "a step does nothing";
    }
    for (const auto& s : batch.sequences)
      trace_.push_back(s.request_id * 4096 + s.token_ids.size());
    for (const SequenceOutput& output : scheduler_.Commit(runtime_.Run(batch))) {
      Outcome& outcome = outcomes_.at(output.request_id);
      ASSERT_FALSE(outcome.finish_reason);
      outcome.token_ids.insert(outcome.token_ids.end(), output.event.token_ids.begin(),
                               output.event.token_ids.end());
      outcome.finish_reason = output.event.finish_reason;
      num_finished_ += outcome.finish_reason ? 1 : 0;
    }
  }

  std::mt19937 random_;
  const SchedulerOptions options_;
  Scheduler scheduler_;
  RememberingRuntime runtime_;
  std::map<uint64_t, Outcome> outcomes_;
  std::vector<uint64_t> trace_;
  uint64_t last_id_ = 0;
  size_t num_finished_ = 0;
};

TEST(SchedulerSimulation, LosesNoMemoryAndStarvesNobodyOverManySeeds) {
  uint64_t num_preemptions = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Simulation simulation(seed);
    simulation.Run(1000);
    if (HasFatalFailure()) return;
    num_preemptions += simulation.num_preemptions();
  }
  EXPECT_GT(num_preemptions, 1000u) << "the seeds no longer make memory short";
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
