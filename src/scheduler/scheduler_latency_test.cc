// What users of a busy server see, on a virtual clock over a device whose steps cost what those of
// a large GPU do.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <vector>

#include "base/clock.h"
#include "scheduler/scheduler.h"

namespace fathom::scheduler {
namespace {

constexpr uint64_t kLongPromptId = 1'000'000;

// Ten chats of many turns each and, if wanted, one prompt of 300,000 tokens.
class Server {
 public:
  Server() : scheduler_(Options()), random_(7) {}

  void SubmitChatTurn(int chat) {
    const int length = 200 + static_cast<int>(random_() % 1500);
    request::Request request =
        MakeRequest(++last_id_, length, 100 + static_cast<int>(random_() % 300));
    request.session = "chat " + std::to_string(chat);
    chats_[request.id] = {chat, clock_.Now(), {}};
    scheduler_.Submit(std::move(request));
  }
  void SubmitLongPrompt() {
    scheduler_.Submit(MakeRequest(kLongPromptId, 300'000, 50));
    long_prompt_runs_ = true;
  }

  void Step() {
    const auto batch = scheduler_.Schedule();
    request::StepResult result;
    result.step = batch.step;
    double seconds = 0.015;
    for (const auto& s : batch.sequences) {
      request::SequenceResult r;
      r.request_id = s.request_id;
      if (s.sample) r.sampled_token_ids = {7};
      result.sequences.push_back(std::move(r));
      const bool is_decode = s.token_ids.size() == 1 && s.sample;
      const double depth = s.num_computed_tokens / 300'000.0;  // longer contexts, dearer tokens
      seconds += is_decode ? 0.0003 * (1 + depth)
                           : 0.0001 * (1 + depth) * static_cast<double>(s.token_ids.size());
    }
    seconds *= 0.98 + 0.04 * static_cast<double>(random_() % 1000) / 1000;
    const auto step_time =
        std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
    clock_.Advance(step_time);
    for (const SequenceOutput& output : scheduler_.Commit(result, step_time)) Take(output);
  }

  void RunUntil(double seconds) {
    while (Seconds(clock_.Now() - TimePoint()) < seconds) Step();
  }

  double InterTokenSeconds(double quantile) {
    std::vector<double>& times = inter_token_seconds_;
    const auto nth = static_cast<size_t>(quantile * static_cast<double>(times.size() - 1));
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(nth), times.end());
    return times[nth];
  }
  double MeanInterTokenSeconds() const {
    double sum = 0;
    for (const double t : inter_token_seconds_) sum += t;
    return sum / static_cast<double>(inter_token_seconds_.size());
  }
  double MaxFirstTokenSeconds() const {
    return *std::max_element(first_token_seconds_.begin(), first_token_seconds_.end());
  }
  void ForgetTimes() {
    inter_token_seconds_.clear();
    first_token_seconds_.clear();
  }
  bool long_prompt_runs() const { return long_prompt_runs_; }
  const Clock& clock() const { return clock_; }

 private:
  struct ChatTurn {
    int chat = 0;
    TimePoint begin;
    std::optional<TimePoint> last_token;
  };

  static SchedulerOptions Options() {
    SchedulerOptions options;
    options.max_num_seqs = 64;
    options.max_num_batched_tokens = 8192;
    options.max_logits_rows = 64;
    options.max_model_len = 1 << 20;
    options.vocab_size = 1000;
    options.cache.pools = {.num_blocks = 4000, .num_window_pages = 1000, .num_state_slots = 64};
    options.cache.enabled = false;
    return options;
  }
  static request::Request MakeRequest(request::RequestId id, int num_tokens, int max_tokens) {
    request::Request request;
    request.id = id;
    request.prompt_token_ids.assign(static_cast<size_t>(num_tokens), 5);
    request.sampling.max_tokens = max_tokens;
    return request;
  }

  void Take(const SequenceOutput& output) {
    const TimePoint now = clock_.Now();
    if (output.request_id == kLongPromptId) {
      long_prompt_runs_ = false;
      return;
    }
    ChatTurn& turn = chats_.at(output.request_id);
    if (turn.last_token) {
      inter_token_seconds_.push_back(Seconds(now - *turn.last_token));
    } else {
      first_token_seconds_.push_back(Seconds(now - turn.begin));
    }
    turn.last_token = now;
    if (!output.event.finish_reason) return;
    const int chat = turn.chat;
    chats_.erase(output.request_id);
    SubmitChatTurn(chat);
  }

  Scheduler scheduler_;
  VirtualClock clock_;
  std::mt19937 random_;
  std::map<request::RequestId, ChatTurn> chats_;
  std::vector<double> inter_token_seconds_, first_token_seconds_;
  bool long_prompt_runs_ = false;
  uint64_t last_id_ = 0;
};

TEST(SchedulerLatency, TenChatsKeepTheirSpeedBesideAPromptOf300KTokens) {
  Server server;
  for (int chat = 0; chat < 10; ++chat) server.SubmitChatTurn(chat);
  server.RunUntil(5);
  server.ForgetTimes();
  server.RunUntil(65);
  const double p99_alone = server.InterTokenSeconds(0.99);
  const double mean_alone = server.MeanInterTokenSeconds();
  const double first_alone = server.MaxFirstTokenSeconds();

  server.ForgetTimes();
  server.SubmitLongPrompt();
  const TimePoint begin = server.clock().Now();
  while (server.long_prompt_runs()) {
    server.Step();
    ASSERT_LT(Seconds(server.clock().Now() - begin), 600) << "the long prompt starves";
  }
  EXPECT_LE(server.InterTokenSeconds(0.99), 1.5 * p99_alone);
  EXPECT_LE(server.InterTokenSeconds(0.99), 1.5 * 0.0182) << "a step of ten decodes alone";
  EXPECT_LE(server.MeanInterTokenSeconds(), mean_alone / 0.7);
  EXPECT_LE(server.MaxFirstTokenSeconds(), 2 * first_alone) << "a chat's prompt waits for the long";
}

}  // namespace
}  // namespace fathom::scheduler
