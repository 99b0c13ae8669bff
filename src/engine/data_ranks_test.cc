// The schedulers of several data ranks in one thread, over scripted models, on a virtual clock.
#include "engine/data_ranks.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "engine/data_rank_choice.h"
#include "kv_cache/pool_plan.h"
#include "runtime/model_runner.h"
#include "runtime/testing/fake_model.h"

namespace fathom::engine {
namespace {

constexpr int kVocab = 64;
constexpr int32_t kEos = 1;

TEST(ChooseDataRank, TakesTheLeastLoadedAndOfEqualsTheOneWithFewestTokens) {
  using Ranks = std::vector<DataRankState>;
  EXPECT_EQ(ChooseDataRank(Ranks{{.num_running = 3}, {.num_running = 2}}, {}), 1u);
  // A waiting request counts as four that run.
  EXPECT_EQ(ChooseDataRank(Ranks{{.num_waiting = 1}, {.num_running = 3}}, {}), 1u);
  EXPECT_EQ(ChooseDataRank(Ranks{{.num_running = 4}, {.num_waiting = 1}}, {}), 0u);
  EXPECT_EQ(ChooseDataRank(Ranks{{.num_tokens = 9}, {.num_tokens = 8}, {.num_tokens = 8}}, {}), 1u);
}

TEST(ChooseDataRank, PrefersAKnownPromptThenTheSessionsRankUnlessItIsMuchMoreLoaded) {
  using Ranks = std::vector<DataRankState>;
  EXPECT_EQ(ChooseDataRank(Ranks{{}, {.num_running = 8, .num_cached_tokens = 256}}, {}), 1u);
  EXPECT_EQ(ChooseDataRank(Ranks{{}, {.num_running = 9, .num_cached_tokens = 256}}, {}), 0u);
  EXPECT_EQ(ChooseDataRank(Ranks{{}, {.num_running = 1, .num_cached_tokens = 255}}, {}), 0u);
  EXPECT_EQ(ChooseDataRank(Ranks{{.num_running = 20},
                                 {.num_waiting = 1, .num_running = 34, .num_cached_tokens = 4096},
                                 {.num_running = 21, .num_cached_tokens = 512}},
                           {}),
            1u);
  EXPECT_EQ(ChooseDataRank(Ranks{{}, {.num_running = 8}}, 1), 1u);
  EXPECT_EQ(ChooseDataRank(Ranks{{}, {.num_running = 9}}, 1), 0u);
  EXPECT_EQ(ChooseDataRank(Ranks{{.num_cached_tokens = 512}, {}}, 1), 0u);
}

// Steps take time for the tokens of all data ranks, as experts do.
TEST(DataRanks, ThePromptOfOneLeavesTheDecodesOfAnotherTheirFloor) {
  const scheduler::SchedulerOptions options{
      .max_num_seqs = 2,
      .max_num_batched_tokens = 512,
      .max_logits_rows = 2,
      .max_model_len = 2048,
      .vocab_size = kVocab,
      .eos_token_ids = {kEos},
      .cache = {.pools = {.num_blocks = 20, .num_window_pages = 40, .num_state_slots = 2}},
      .decode_floor = 0.7};
  DataRanks ranks(options, 2);
  const auto step = [&] {
    const DataRanks::Step plan = ranks.Schedule();
    std::vector<request::StepResult> results(2);
    int num_tokens = 0;
    for (size_t d = 0; d < 2; ++d) {
      results[d].step = plan.batches[d].step;
      num_tokens += plan.batches[d].num_tokens();
      for (const auto& s : plan.batches[d].sequences) {
        results[d].sequences.emplace_back().request_id = s.request_id;
        if (s.sample) results[d].sequences.back().sampled_token_ids = {7};
      }
    }
    ranks.Commit(plan, results, std::chrono::microseconds(1000 + 50 * num_tokens));
    return num_tokens;
  };
  request::Request decoding;
  decoding.id = 1;
  decoding.prompt_token_ids = {5};
  decoding.sampling.max_tokens = 1000;
  decoding.data_rank = 0;
  ranks.Submit(decoding);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(step(), 1);
  request::Request prompt;
  prompt.id = 2;
  prompt.prompt_token_ids.assign(500, 6);
  prompt.data_rank = 1;
  ranks.Submit(prompt);
  // 1050 us alone, at most 1500 us with the prompt.
  int num_steps = 0;
  for (; ranks.scheduler(1).num_waiting() + ranks.scheduler(1).num_running() > 0; ++num_steps) {
    ASSERT_LT(num_steps, 300) << "the prompt starves";
    EXPECT_LE(step(), 10);
  }
  EXPECT_GT(num_steps, 40);
}

// What a sequence samples depends on its tokens alone.
int32_t NextToken(std::span<const int32_t> token_ids) {
  uint64_t h = token_ids.size();
  for (const int32_t id : token_ids.last(std::min<size_t>(8, token_ids.size()))) {
    h = (h ^ static_cast<uint64_t>(id + 1)) * 0xff51afd7ed558ccdu;
  }
  return static_cast<int32_t>((h >> 33) % kVocab);
}

struct Outcome {
  size_t num_prompt_tokens = 0;
  std::vector<int32_t> token_ids;
  std::optional<request::FinishReason> finish_reason;
  bool operator==(const Outcome&) const = default;
};

class Simulation {
 public:
  Simulation(uint64_t seed, int num_ranks) : random_(seed), options_(RandomOptions()) {
    ranks_ = std::make_unique<DataRanks>(options_, num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank) {
      models_.push_back(std::make_unique<runtime::FakeModel>(
          kVocab, [](std::span<const int32_t> ids, int64_t, std::span<float> logits) {
            std::fill(logits.begin(), logits.end(), 0.0f);
            logits[static_cast<size_t>(NextToken(ids))] = 1;
          }));
      auto kv_cache = runtime::KvCache::Make(runtime::FakeLayout(), options_.cache.pools, *device_);
      auto runner = runtime::ModelRunner::Make({.vocab_size = kVocab,
                                                .max_logits_rows = options_.max_logits_rows,
                                                .eos_token_ids = {kEos}},
                                               *models_.back(), *std::move(kv_cache), *device_);
      runners_.push_back(*std::move(runner));
    }
  }

  void Run(int num_events) {
    for (int i = 0; i < num_events && !testing::Test::HasFatalFailure(); ++i) {
      const uint32_t event = random_() % 12;
      if (event < 4 && ranks_->num_live() < 20 * ranks_->size()) {
        Arrive();
      } else if (event == 4 && last_id_ > 0) {
        Cancel();
      } else {
        Step();
      }
    }
    for (int steps = 0; ranks_->num_live() > 0; ++steps) {
      ASSERT_LT(steps, 50000) << "a request starves";
      Step();
      if (testing::Test::HasFatalFailure()) return;
    }
    ranks_->ClearCache();
    for (int steps = 0; ranks_->HasWork(); ++steps) {
      ASSERT_LT(steps, 1000) << "work without end";
      Step();
    }
    EXPECT_EQ(ranks_->num_live_sessions(), 0u);
    for (size_t d = 0; d < ranks_->size(); ++d) {
      EXPECT_EQ(ranks_->scheduler(d).cache().usage(), 0);
      EXPECT_TRUE(ranks_->scheduler(d).cache().pool().IsEmpty());
    }
    for (const auto& [id, outcome] : outcomes_) {
      const std::span<const int32_t> all(outcome.token_ids);
      for (size_t i = outcome.num_prompt_tokens; i < all.size(); ++i) {
        ASSERT_EQ(all[i], NextToken(all.first(i))) << "request " << id;
      }
    }
  }

  const std::map<uint64_t, Outcome>& outcomes() const { return outcomes_; }
  const std::vector<uint64_t>& trace() const { return trace_; }
  // Steps in which a data rank had nothing to do and another had.
  int num_idle() const { return num_idle_; }
  const std::vector<int>& requests_of_rank() const { return requests_of_rank_; }

 private:
  scheduler::SchedulerOptions RandomOptions() {
    scheduler::SchedulerOptions options;
    options.max_num_seqs = 1 + static_cast<int>(random_() % 6);
    options.max_num_batched_tokens = options.max_num_seqs + static_cast<int>(random_() % 300);
    options.max_logits_rows = options.max_num_seqs + static_cast<int>(random_() % 4);
    options.max_model_len = 300 + random_() % 900;
    options.vocab_size = kVocab;
    options.eos_token_ids = {kEos};
    const kv_cache::PoolDemand demand{.max_num_seqs = options.max_num_seqs,
                                      .max_num_batched_tokens = options.max_num_batched_tokens,
                                      .max_model_len = options.max_model_len,
                                      .sliding_window = 128,
                                      .prefix_cache = true};
    const auto layout = runtime::FakeLayout();
    const auto least = kv_cache::MaxUsefulBytes(
        layout, {.max_num_seqs = 1, .max_num_batched_tokens = 1, .max_model_len = 1});
    for (int64_t bytes = least;; bytes += layout.block_bytes) {
      const auto pools = kv_cache::PlanPools(layout, demand, bytes);
      if (!pools.ok()) continue;
      options.cache.pools = *pools;
      options.cache.pools.num_blocks += static_cast<int32_t>(random_() % 6);
      break;
    }
    options.cache.retention_interval = 256;
    options.decode_floor = random_() % 4 == 0 ? 0 : 0.7;
    return options;
  }

  void Arrive() {
    request::Request request;
    request.id = last_id_ + 1;
    if (!outcomes_.empty() && random_() % 3 == 0) {
      request.prompt_token_ids = outcomes_.at(1 + random_() % last_id_).token_ids;
    }
    const auto length = 1 + random_() % (random_() % 4 == 0 ? 600 : 40);
    for (size_t i = 0; i < length; ++i) {
      request.prompt_token_ids.push_back(static_cast<int32_t>(random_() % kVocab));
    }
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 1 + static_cast<int>(random_() % 60);
    request.sampling.ignore_eos = random_() % 2 == 0;
    if (random_() % 2 == 0) request.session = std::to_string(random_() % 4);
    if (random_() % 6 == 0) request.data_rank = static_cast<int>(random_() % ranks_->size());
    if (random_() % 10 == 0) {
      request.deadline = clock_.Now() + std::chrono::milliseconds(random_() % 2000);
    }
    if (!ranks_->Validate(request).ok()) return;
    const auto asked = request.data_rank;
    outcomes_[++last_id_] = {.num_prompt_tokens = request.prompt_token_ids.size(),
                             .token_ids = request.prompt_token_ids,
                             .finish_reason = {}};
    const size_t data_rank = ranks_->Submit(std::move(request));
    EXPECT_EQ(data_rank, static_cast<size_t>(asked.value_or(static_cast<int>(data_rank))));
    requests_of_rank_.resize(ranks_->size());
    ++requests_of_rank_[data_rank];
    trace_.push_back(data_rank);
  }

  void Cancel() {
    const uint64_t id = 1 + random_() % last_id_;
    if (ranks_->Cancel(id)) outcomes_[id].finish_reason = request::FinishReason::kCancelled;
  }

  void Take(const std::vector<scheduler::SequenceOutput>& outputs) {
    for (const auto& output : outputs) {
      Outcome& outcome = outcomes_.at(output.request_id);
      ASSERT_FALSE(outcome.finish_reason);
      outcome.token_ids.insert(outcome.token_ids.end(), output.event.token_ids.begin(),
                               output.event.token_ids.end());
      outcome.finish_reason = output.event.finish_reason;
    }
  }

  void Step() {
    Take(ranks_->EndExpired(clock_.Now()));
    const DataRanks::Step step = ranks_->Schedule();
    if (step.empty()) return clock_.Advance(std::chrono::milliseconds(1));
    std::vector<request::StepResult> results;
    int most_tokens = 0;
    for (size_t d = 0; d < ranks_->size(); ++d) {
      const request::ScheduledBatch& batch = step.batches[d];
      if (ranks_->size() > 1) {
        ASSERT_EQ(batch.data_rank_tokens[d], batch.num_tokens());
      }
      for (const auto& s : batch.sequences)
        trace_.push_back(s.request_id * 4096 + s.token_ids.size());
      num_idle_ += batch.empty() ? 1 : 0;
      most_tokens = std::max(most_tokens, batch.num_tokens());
      auto result = runners_[d]->Run(batch);
      ASSERT_TRUE(result.ok()) << result.status().message();
      results.push_back(*std::move(result));
    }
    const Duration step_time = std::chrono::microseconds(1000 + 50 * most_tokens);
    clock_.Advance(step_time);
    Take(ranks_->Commit(step, results, step_time));
  }

  std::mt19937 random_;
  const scheduler::SchedulerOptions options_;
  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(1);
  std::vector<std::unique_ptr<runtime::FakeModel>> models_;
  std::vector<std::unique_ptr<runtime::ModelRunner>> runners_;
  std::unique_ptr<DataRanks> ranks_;
  VirtualClock clock_;
  std::map<uint64_t, Outcome> outcomes_;
  std::vector<uint64_t> trace_;
  std::vector<int> requests_of_rank_;
  uint64_t last_id_ = 0;
  int num_idle_ = 0;
};

class DataRanksSimulation : public testing::TestWithParam<int> {};

TEST_P(DataRanksSimulation, LosesNoMemoryAndStarvesNobodyOverManySeeds) {
  int num_idle = 0;
  std::vector<int> requests(static_cast<size_t>(GetParam()));
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    Simulation simulation(seed, GetParam());
    simulation.Run(400);
    if (HasFailure()) return;
    num_idle += simulation.num_idle();
    for (size_t d = 0; d < simulation.requests_of_rank().size(); ++d) {
      requests[d] += simulation.requests_of_rank()[d];
    }
  }
  EXPECT_EQ(num_idle > 100, GetParam() > 1) << num_idle;
  for (const int count : requests) EXPECT_GT(count, requests[0] / 2) << "a rank gets no share";
}

TEST_P(DataRanksSimulation, TheSameSeedRunsTheSame) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    Simulation a(seed, GetParam()), b(seed, GetParam());
    a.Run(300);
    b.Run(300);
    EXPECT_EQ(a.trace(), b.trace());
    EXPECT_EQ(a.outcomes(), b.outcomes());
  }
}

INSTANTIATE_TEST_SUITE_P(DataRanks, DataRanksSimulation, testing::Range(1, 5));

}  // namespace
}  // namespace fathom::engine
