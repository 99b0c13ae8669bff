// bench throughput: requests of random tokens through the whole engine, all submitted at once,
// after a few short ones that no figure has.
#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>

#include "apps/fathom/bench/bench.h"
#include "apps/fathom/bench/report.h"
#include "apps/fathom/bench/step_bench.h"
#include "apps/fathom/bench/step_gaps.h"
#include "apps/fathom/local_engine.h"
#include "base/clock.h"

namespace fathom::app {
namespace {

// What the requests' events tell; any thread.
class Arrivals {
 public:
  explicit Arrivals(int num_requests) : unfinished_(num_requests) {}

  // Times of one request's tokens; touched by one event at a time.
  struct Request {
    TimePoint submitted;
    std::vector<TimePoint> tokens;
  };

  void OnEvent(Request& request, const request::TokenEvent& event) {
    const TimePoint now = clock_.Now();
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < event.token_ids.size(); ++i) request.tokens.push_back(now);
    if (!event.finish_reason) return;
    if (*event.finish_reason == request::FinishReason::kError && error_.ok()) error_ = event.error;
    if (--unfinished_ == 0) done_.notify_all();
  }
  Status Wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return unfinished_ == 0; });
    return error_;
  }

 private:
  const SystemClock clock_;
  std::mutex mutex_;
  std::condition_variable done_;
  int unfinished_;  // guarded by mutex_, as the requests and the next
  Status error_;
};

class ArrivalSink final : public request::TokenSink {
 public:
  ArrivalSink(Arrivals& arrivals, Arrivals::Request& request)
      : arrivals_(arrivals), request_(request) {}
  void OnEvent(request::TokenEvent event) override { arrivals_.OnEvent(request_, event); }

 private:
  Arrivals& arrivals_;
  Arrivals::Request& request_;
};

struct Load {
  int num_prompts = 0, input_len = 0, output_len = 0;
};

struct Measured {
  double seconds = 0;
  double decode_seconds = 0;  // from the first request's first token to the last one's last
  std::vector<double> time_to_first_token;    // seconds
  std::vector<double> time_between_tokens;    // while every request decodes
  std::vector<double> time_per_output_token;  // a request's mean after its first
};

request::Request MakeRequest(const ThroughputOptions& options, const Load& load,
                             engine::Engine& engine, int vocab_size, std::mt19937_64& random) {
  request::Request request;
  request.id = engine.NextRequestId();
  for (int i = 0; i < load.input_len; ++i) {
    request.prompt_token_ids.push_back(
        static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size)));
  }
  request.sampling.temperature = options.temperature;
  request.sampling.max_tokens = load.output_len;
  request.sampling.ignore_eos = true;
  request.sampling.seed = random();
  return request;
}

// The gaps between one request's tokens from when the last request had its first token until the
// first one ended: steps of decodes alone.
std::vector<double> PureDecodeGaps(const std::vector<Arrivals::Request>& requests) {
  TimePoint begin{}, end = TimePoint::max();
  for (const Arrivals::Request& r : requests) {
    if (r.tokens.empty()) return {};
    begin = std::max(begin, r.tokens.front());
    end = std::min(end, r.tokens.back());
  }
  std::vector<double> gaps;
  const std::vector<TimePoint>& tokens = requests.front().tokens;
  for (size_t i = 1; i < tokens.size(); ++i) {
    if (tokens[i - 1] > begin && tokens[i] < end)
      gaps.push_back(Seconds(tokens[i] - tokens[i - 1]));
  }
  return gaps;
}

Result<Measured> RunRequests(const ThroughputOptions& options, const Load& load, LocalEngine& local,
                             std::mt19937_64& random) {
  const SystemClock clock;
  std::vector<Arrivals::Request> requests(static_cast<size_t>(load.num_prompts));
  Arrivals arrivals(load.num_prompts);
  std::vector<request::Request> submissions;
  for (int i = 0; i < load.num_prompts; ++i) {
    submissions.push_back(
        MakeRequest(options, load, local.engine(), local.session().config.vocab_size, random));
  }
  const TimePoint begin = clock.Now();
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].submitted = submissions[i].arrival = clock.Now();
    RETURN_IF_ERROR(local.engine().Submit(std::move(submissions[i]),
                                          std::make_shared<ArrivalSink>(arrivals, requests[i])));
  }
  RETURN_IF_ERROR(arrivals.Wait());
  Measured out;
  out.seconds = Seconds(clock.Now() - begin);
  TimePoint first = TimePoint::max(), last{};
  for (const Arrivals::Request& r : requests) {
    first = std::min(first, r.tokens.front());
    last = std::max(last, r.tokens.back());
    out.time_to_first_token.push_back(Seconds(r.tokens.front() - r.submitted));
    if (r.tokens.size() > 1) {
      out.time_per_output_token.push_back(Seconds(r.tokens.back() - r.tokens.front()) /
                                          static_cast<double>(r.tokens.size() - 1));
    }
  }
  out.decode_seconds = Seconds(last - first);
  out.time_between_tokens = PureDecodeGaps(requests);
  return out;
}

// Kernels are loaded and the steps' costs known before the requests that count.
Load WarmupOf(const Load& load) {
  return {.num_prompts = load.num_prompts,
          .input_len = std::min(load.input_len, 64),
          .output_len = std::min(load.output_len, 8)};
}

// Of all requests; microseconds.
Result<double> DeviceStep(const ThroughputOptions& options, const ModelSession& session) {
  const int64_t context = options.input_len + options.output_len / 2;
  ASSIGN_OR_RETURN(const auto bench, StepBench::Make(session, options.num_prompts, context + 1));
  return DecodeDeviceUs(*bench, options.num_prompts, context);
}

json::Value Milliseconds(const std::vector<double>& seconds) {
  json::Value out = json::Value::Object();
  out.Set("mean_ms", json::Value::Number(Mean(seconds) * 1e3));
  out.Set("p50_ms", json::Value::Number(Percentile(seconds, 0.5) * 1e3));
  out.Set("p99_ms", json::Value::Number(Percentile(seconds, 0.99) * 1e3));
  return out;
}

void PrintTimes(const char* what, const std::vector<double>& seconds) {
  if (seconds.empty()) return;
  fmt::print("{:<28} mean {:.3f} ms, median {:.3f} ms, p99 {:.3f} ms\n", what, Mean(seconds) * 1e3,
             Percentile(seconds, 0.5) * 1e3, Percentile(seconds, 0.99) * 1e3);
}

// What --profile tells.
struct Profile {
  std::vector<StepGaps::Step> steps;
  std::optional<double> device_step_us;  // a decode step of all requests, the model alone; on a GPU
};

json::Value PrintTokens(const ThroughputOptions& options, const Measured& m) {
  const double requests = options.num_prompts;
  const double output = requests * options.output_len,
               total = output + requests * options.input_len;
  fmt::print("Throughput: {:.2f} requests/s, {:.2f} total tokens/s, {:.2f} output tokens/s\n",
             requests / m.seconds, total / m.seconds, output / m.seconds);
  if (m.decode_seconds > 0) {
    fmt::print(
        "aggregate decode             {:.2f} tokens/s: all generated tokens over the time from the "
        "first request's first token to the last one's last\n",
        output / m.decode_seconds);
  }
  PrintTimes("time to first token", m.time_to_first_token);
  PrintTimes("time per output token", m.time_per_output_token);
  PrintTimes("decode step, all requests", m.time_between_tokens);
  json::Value out = json::Value::Object();
  out.Set("elapsed_time", json::Value::Number(m.seconds));
  out.Set("num_requests", json::Value::Number(int64_t{options.num_prompts}));
  out.Set("total_num_tokens", json::Value::Number(total));
  out.Set("requests_per_second", json::Value::Number(requests / m.seconds));
  out.Set("tokens_per_second", json::Value::Number(total / m.seconds));
  out.Set("output_tokens_per_second", json::Value::Number(output / m.seconds));
  if (m.decode_seconds > 0) {
    out.Set("aggregate_decode_tokens_per_second", json::Value::Number(output / m.decode_seconds));
  }
  out.Set("ttft", Milliseconds(m.time_to_first_token));
  out.Set("tpot", Milliseconds(m.time_per_output_token));
  out.Set("decode_step", Milliseconds(m.time_between_tokens));
  return out;
}

// Where the device's time went: steps with prompt tokens, steps of decodes, and between steps.
void PrintSteps(const std::vector<StepGaps::Step>& steps, json::Value* out) {
  const auto print = [&](const char* what, const char* name, bool prompts) {
    int count = 0;
    double tokens = 0, us = 0;
    for (const StepGaps::Step& step : steps) {
      if (step.has_prompt != prompts) continue;
      ++count;
      tokens += step.num_tokens;
      us += step.us;
    }
    if (count == 0) return;
    fmt::print("{:<28} {} of {:.1f} tokens, {:.3f} ms each, {:.1f} ms\n", what, count,
               tokens / count, us / count / 1e3, us / 1e3);
    json::Value kind = json::Value::Object();
    kind.Set("count", json::Value::Number(int64_t{count}));
    kind.Set("tokens", json::Value::Number(tokens));
    kind.Set("ms", json::Value::Number(us / 1e3));
    out->Set(name, std::move(kind));
  };
  print("steps with prompt tokens", "prompt_steps", true);
  print("steps of decodes", "decode_steps", false);
  double between_us = 0;
  for (const StepGaps::Step& step : steps) between_us += step.us_to_next;
  fmt::print("{:<28} {:.1f} ms: sampling, and waiting for the host\n", "between all steps",
             between_us / 1e3);
}

// What lies beside the model in a decode step of all requests.
void PrintOverhead(const ThroughputOptions& options, const Measured& m, const Profile& profile,
                   json::Value* out) {
  const auto is_decode = [&](const StepGaps::Step& step) {
    return !step.has_prompt && step.num_tokens == options.num_prompts;
  };
  std::vector<double> between_us;
  for (size_t i = 0; i + 1 < profile.steps.size(); ++i) {
    if (is_decode(profile.steps[i]) && is_decode(profile.steps[i + 1])) {
      between_us.push_back(profile.steps[i].us_to_next);
    }
  }
  if (between_us.empty() || m.time_between_tokens.empty()) {
    fmt::print("no two steps ran all requests alone: --profile needs a larger --output-len\n");
    return;
  }
  const double between = Percentile(between_us, 0.5);
  fmt::print("{:<28} median {:.1f} us, p99 {:.1f} us\n", "between two decode steps", between,
             Percentile(between_us, 0.99));
  out->Set("between_steps_us", json::Value::Number(between));
  if (!profile.device_step_us) return;
  const double step_us = Percentile(m.time_between_tokens, 0.5) * 1e6;
  fmt::print("{:<28} {:.3f} ms when the host is ahead; the engine's is {:.1f} us longer\n",
             "a like step, model alone", *profile.device_step_us / 1e3,
             step_us - *profile.device_step_us);
  out->Set("device_step_ms", json::Value::Number(*profile.device_step_us / 1e3));
}

// What --profile tells is of decode steps that hold all prompts, on all GPUs at once.
Status CheckProfile(const ThroughputOptions& options) {
  const config::ParallelConfig& parallel = options.model.parallel;
  if (parallel.pipeline_parallel_size > 1) {
    return InvalidArgument(
        "--profile watches one GPU, and stages take turns: leave --pipeline-parallel-size out");
  }
  const int most = options.model.max_num_seqs * parallel.data_parallel_size;
  if (options.num_prompts > most) {
    return InvalidArgument(
        fmt::format("--profile needs all prompts in one step: --num-prompts {} with --max-num-seqs "
                    "{}{}",
                    options.num_prompts, options.model.max_num_seqs,
                    parallel.data_parallel_size > 1 ? " on each data rank" : ""));
  }
  return OkStatus();
}

}  // namespace

Status RunBenchThroughput(const ThroughputOptions& options) {
  ModelOptions model = options.model;
  model.max_model_len =
      std::max<int64_t>(model.max_model_len, int64_t{options.input_len} + options.output_len);
  if (options.profile) RETURN_IF_ERROR(CheckProfile(options));
  ASSIGN_OR_RETURN(ModelSession session, OpenModel(model, SessionText::kTokensOnly));
  Profile profile;
  StepGaps gaps(session.device().kind());
  if (options.profile) {
    if (session.on_gpu()) {
      ASSIGN_OR_RETURN(profile.device_step_us, DeviceStep(options, session));
    }
    auto& model_of_rank = session.ranks.front().model;
    model_of_rank = gaps.Watch(std::move(model_of_rank));
  }
  ASSIGN_OR_RETURN(auto local,
                   LocalEngine::Start(std::move(session), model, model.model, options.num_prompts));
  std::mt19937_64 random(options.model.seed);
  const Load load = {.num_prompts = options.num_prompts,
                     .input_len = options.input_len,
                     .output_len = options.output_len};
  RETURN_IF_ERROR(RunRequests(options, WarmupOf(load), *local, random).status());
  gaps.BeginRun();
  ASSIGN_OR_RETURN(const Measured m, RunRequests(options, load, *local, random));
  local.reset();  // the worker marks no more

  json::Value out = PrintTokens(options, m);
  if (options.profile) {
    ASSIGN_OR_RETURN(profile.steps, gaps.Take());
    PrintSteps(profile.steps, &out);
    PrintOverhead(options, m, profile, &out);
  }
  return WriteJson(options.output_json, out);
}

}  // namespace fathom::app
