// What users of a busy server see, on a virtual clock over devices whose steps cost what they do on
// real ones.
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

// What a step takes; `depth`: the prompt's context in tokens, as decodes have next to none here.
struct Device {
  virtual ~Device() = default;
  virtual double Seconds(int num_decodes, int64_t num_prompt_tokens, double depth) const = 0;
};

// Each prompt token costs the same.
struct SmoothDevice final : Device {
  double Seconds(int num_decodes, int64_t num_prompt_tokens, double depth) const override {
    return 0.015 + 0.0003 * num_decodes +
           0.0001 * (1 + depth / 300'000) * static_cast<double>(num_prompt_tokens);
  }
};

// A step with prompt tokens reads nearly all experts, however few they are: an H200 with 30 layers.
struct ExpertDevice final : Device {
  double Seconds(int num_decodes, int64_t num_prompt_tokens, double depth) const override {
    const double decodes = 0.0038 + 0.0008 * num_decodes;
    if (num_prompt_tokens == 0) return decodes;
    constexpr std::pair<double, double> kCurve[] = {{1, 0.030},   {16, 0.045},   {64, 0.083},
                                                    {256, 0.099}, {2048, 0.158}, {65536, 2.3}};
    const auto tokens = static_cast<double>(num_prompt_tokens);
    size_t i = 1;
    while (kCurve[i].first < tokens) ++i;
    const auto [x0, y0] = kCurve[i - 1];
    const auto [x1, y1] = kCurve[i];
    return (y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)) * (1 + depth / 600'000) +
           0.0001 * num_decodes;
  }
};

// Ten chats of many turns each and, if wanted, one prompt of 300,000 tokens; or whatever is
// submitted.
class Server {
 public:
  explicit Server(const Device& device, int max_num_batched_tokens = 8192)
      : device_(device), scheduler_(Options(max_num_batched_tokens)), random_(7) {}

  void Submit(int num_tokens, int max_tokens) {
    request::Request request = MakeRequest(++last_id_, num_tokens, max_tokens);
    chats_[request.id] = {kNoChat, clock_.Now(), {}};
    scheduler_.Submit(std::move(request));
  }

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
    int num_decodes = 0;
    int64_t num_prompt_tokens = 0;
    double depth = 0;
    for (const auto& s : batch.sequences) {
      request::SequenceResult r;
      r.request_id = s.request_id;
      if (s.sample) r.sampled_token_ids = {7};
      result.sequences.push_back(std::move(r));
      if (s.token_ids.size() == 1 && s.sample) {
        ++num_decodes;
        continue;
      }
      num_prompt_tokens += static_cast<int64_t>(s.token_ids.size());
      depth = std::max(depth, static_cast<double>(s.num_computed_tokens));
    }
    double seconds = device_.Seconds(num_decodes, num_prompt_tokens, depth);
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
  double MinFirstTokenSeconds() const {
    return *std::min_element(first_token_seconds_.begin(), first_token_seconds_.end());
  }
  double MaxFirstTokenSeconds() const {
    return *std::max_element(first_token_seconds_.begin(), first_token_seconds_.end());
  }
  void ForgetTimes() {
    inter_token_seconds_.clear();
    first_token_seconds_.clear();
  }
  bool long_prompt_runs() const { return long_prompt_runs_; }
  size_t num_tokens() const { return inter_token_seconds_.size(); }
  size_t num_prompts() const { return first_token_seconds_.size(); }
  int num_live() const { return scheduler_.num_running() + scheduler_.num_waiting(); }
  int num_waiting() const { return scheduler_.num_waiting(); }
  const Clock& clock() const { return clock_; }

 private:
  static constexpr int kNoChat = -1;
  struct ChatTurn {
    int chat = 0;
    TimePoint begin;
    std::optional<TimePoint> last_token;
  };

  static SchedulerOptions Options(int max_num_batched_tokens) {
    SchedulerOptions options;
    options.max_num_seqs = 64;
    options.max_num_batched_tokens = max_num_batched_tokens;
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
    if (chat != kNoChat) SubmitChatTurn(chat);
  }

  const Device& device_;
  Scheduler scheduler_;
  VirtualClock clock_;
  std::mt19937 random_;
  std::map<request::RequestId, ChatTurn> chats_;
  std::vector<double> inter_token_seconds_, first_token_seconds_;
  bool long_prompt_runs_ = false;
  uint64_t last_id_ = 0;
};

// What chats see alone, for a minute.
struct ChatTimes {
  double p99_inter_token = 0, mean_inter_token = 0, max_first_token = 0;
};

// Ten chats alone, and then until a long prompt beside them is through: the server's times are of
// the latter.
ChatTimes RunChatsAloneThenBesideALongPrompt(Server& server) {
  for (int chat = 0; chat < 10; ++chat) server.SubmitChatTurn(chat);
  server.RunUntil(5);
  server.ForgetTimes();
  server.RunUntil(65);
  const ChatTimes alone = {.p99_inter_token = server.InterTokenSeconds(0.99),
                           .mean_inter_token = server.MeanInterTokenSeconds(),
                           .max_first_token = server.MaxFirstTokenSeconds()};
  server.ForgetTimes();
  server.SubmitLongPrompt();
  const TimePoint begin = server.clock().Now();
  while (server.long_prompt_runs() && Seconds(server.clock().Now() - begin) < 600) server.Step();
  EXPECT_FALSE(server.long_prompt_runs()) << "the long prompt starves";
  return alone;
}

TEST(SchedulerLatency, TenChatsKeepTheirSpeedBesideAPromptOf300KTokens) {
  const SmoothDevice device;
  Server server(device);
  const ChatTimes alone = RunChatsAloneThenBesideALongPrompt(server);
  EXPECT_LE(server.InterTokenSeconds(0.99), 1.5 * alone.p99_inter_token);
  EXPECT_LE(server.InterTokenSeconds(0.99), 1.5 * 0.0182) << "a step of ten decodes alone";
  EXPECT_LE(server.MeanInterTokenSeconds(), alone.mean_inter_token / 0.7);
  EXPECT_LE(server.MaxFirstTokenSeconds(), 2 * alone.max_first_token)
      << "a chat's prompt waits for the long";
}

TEST(SchedulerLatency, PromptsThatComeTogetherStartTogether) {
  const ExpertDevice device;
  Server server(device, 2048);
  server.Submit(889, 256);
  server.Step();  // it came first and runs alone
  for (int i = 1; i < 10; ++i) server.Submit(889, 256);
  while (server.num_live() > 0) server.Step();
  const double full = device.Seconds(0, 2048, 0);
  const double prompts = 9 * 889 / 2048.0 * full;
  EXPECT_LE(server.MaxFirstTokenSeconds(), prompts + 2 * full);
  const double decodes = 255 * device.Seconds(10, 0, 0);
  EXPECT_LE(Seconds(server.clock().Now() - TimePoint()), prompts + decodes + 3 * full);
}

TEST(SchedulerLatency, PromptsBesideDecodesRunInLargeStepsWithinTheirShare) {
  const ExpertDevice device;
  Server server(device, 2048);
  for (int i = 0; i < 10; ++i) server.Submit(100, 20'000);
  while (server.num_tokens() < 1000) server.Step();
  server.ForgetTimes();
  const TimePoint begin = server.clock().Now();
  while (server.num_tokens() < 50'000) {
    while (server.num_waiting() < 4) server.Submit(2000, 1);
    server.Step();
  }
  const double seconds = Seconds(server.clock().Now() - begin);
  const double solo = 5000 * device.Seconds(10, 0, 0);
  EXPECT_LE(seconds, solo / 0.7 + 1) << "the decodes are below their floor";
  const double possible = 0.3 * seconds / device.Seconds(0, 2000, 0);
  EXPECT_GE(static_cast<double>(server.num_prompts()), 0.75 * possible)
      << "prompts wait for nothing";
}

TEST(SchedulerLatency, ChatsOnADeviceOfDearSmallStepsGoOnBesideALongPrompt) {
  const ExpertDevice device;
  Server server(device, 2048);
  const ChatTimes alone = RunChatsAloneThenBesideALongPrompt(server);
  EXPECT_LE(server.InterTokenSeconds(0.99), 1.5 * alone.p99_inter_token);
  EXPECT_LE(server.MeanInterTokenSeconds(), device.Seconds(10, 0, 0) / 0.7);
  EXPECT_LE(server.MaxFirstTokenSeconds(), 3) << "a chat's prompt waits for the long";
}

}  // namespace
}  // namespace fathom::scheduler
