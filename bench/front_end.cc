// front_end_bench: what the API itself costs. HTTP, JSON, chat encoder, tokenizer, detokenizer,
// parser and event streams are the real ones; the engine behind them answers at once, or a token a
// step. Server and clients share this process and its cores: `taskset -c 0,1 front_end_bench
// MODEL`.
//
//   requests   small chats, one after the other on 64 connections: answers a second
//   streams    1,000 streams at once: every token of every stream, in order
//   latency    200 streams, a token every 20 ms: from the engine's delivery to the client's read
//
// MODEL is a folder with tokenizer.json. Exit code 1: an answer was wrong.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "api/server.h"
#include "base/log.h"
#include "bench/load_client.h"
#include "json/json.h"

namespace fathom::bench {
namespace {

using std::chrono::steady_clock;

// Gives every sequence the same tokens, one a step; a step takes at least `step_time`.
class InstantEngine final : public engine::Engine {
 public:
  InstantEngine(std::vector<int32_t> token_ids, int32_t eos)
      : token_ids_(std::move(token_ids)), eos_(eos), thread_([this] { Loop(); }) {}
  ~InstantEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  void set_step_time(std::chrono::milliseconds step_time) { step_time_ = step_time; }
  // When each step's delivery began; step i of a run in which all sequences start together.
  std::vector<TimePoint> step_times() const {
    const std::lock_guard lock(mutex_);
    return step_times_;
  }
  void ForgetSteps() {
    const std::lock_guard lock(mutex_);
    step_times_.clear();
  }
  // No sequence begins before this many are there.
  void WaitFor(size_t num_sequences) { num_together_ = num_sequences; }

  Status Submit(request::Request request, std::shared_ptr<request::TokenSink> sink) override {
    {
      const std::lock_guard lock(mutex_);
      arrived_.push_back({request.id, static_cast<size_t>(request.sampling.max_tokens), 0,
                          std::move(sink), std::move(request)});
    }
    wake_.notify_one();
    return OkStatus();
  }
  void Finish(request::RequestId, request::FinishReason) override {
    std::abort();  // no client of ours leaves
  }
  void ResetPrefixCache() override {}
  void Drain(Duration) override {}
  engine::EngineStats Stats() const override { return {}; }
  request::RequestId NextRequestId() override { return next_id_++; }
  int64_t max_model_len() const override { return 1 << 20; }

 private:
  struct Sequence {
    request::RequestId id;
    size_t max_tokens;
    size_t num_done;
    std::shared_ptr<request::TokenSink> sink;
    request::Request request;
  };

  void Loop() {
    TimePoint next = steady_clock::now();
    while (true) {
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] {
          return stopping_ || running_.size() + arrived_.size() >= num_together_;
        });
        if (stopping_) return;
        for (Sequence& sequence : arrived_) running_.push_back(std::move(sequence));
        arrived_.clear();
      }
      next = std::max(next + step_time_.load(), steady_clock::now());
      std::this_thread::sleep_until(next);
      Step();
      if (!running_.empty()) continue;
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !arrived_.empty(); });
    }
  }
  void Step() {
    {
      const std::lock_guard lock(mutex_);
      step_times_.push_back(steady_clock::now());
    }
    num_together_ = 0;
    for (Sequence& sequence : running_) {
      request::TokenEvent event;
      const bool at_end = sequence.num_done == token_ids_.size();
      event.token_ids = {at_end ? eos_ : token_ids_[sequence.num_done]};
      ++sequence.num_done;
      if (at_end) {
        event.finish_reason = request::FinishReason::kStop;
        event.stop_token_id = eos_;
      } else if (sequence.num_done == sequence.max_tokens) {
        event.finish_reason = request::FinishReason::kLength;
      }
      const bool over = event.finish_reason.has_value();
      sequence.sink->OnEvent(std::move(event));
      if (over) sequence.sink.reset();
    }
    std::erase_if(running_, [](const Sequence& sequence) { return sequence.sink == nullptr; });
  }

  const std::vector<int32_t> token_ids_;
  const int32_t eos_;
  std::atomic<std::chrono::milliseconds> step_time_{std::chrono::milliseconds(0)};
  std::atomic<size_t> num_together_{0};
  std::atomic<request::RequestId> next_id_{1};
  std::vector<Sequence> running_;  // the thread's

  mutable std::mutex mutex_;  // guards the rest
  std::condition_variable wake_;
  std::vector<Sequence> arrived_;
  std::vector<TimePoint> step_times_;
  bool stopping_ = false;
  std::thread thread_;
};

std::string ChatRequest(int max_tokens, bool stream) {
  const std::string body = fmt::format(
      R"({{"model":"bench","messages":[{{"role":"system","content":"You are helpful."}},)"
      R"({{"role":"user","content":"Say hello to the world, please."}}],"max_tokens":{},"stream":{}}})",
      max_tokens, stream);
  return fmt::format(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
      "Content-Length: {}\r\n\r\n{}",
      body.size(), body);
}

double Percentile(std::vector<double> values, double share) {
  const auto at =
      values.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// The content of a chunk of a stream; "" if it has none.
std::string ContentOf(std::string_view data) {
  const auto chunk = json::Parse(data);
  if (!chunk.ok()) return "";
  const json::Value* choices = chunk->Find("choices");
  if (choices == nullptr || choices->items().empty()) return "";
  const json::Value* content = choices->items()[0].Find("delta")->Find("content");
  return content == nullptr ? "" : content->AsString();
}

class Bench {
 public:
  Bench(InstantEngine& engine, int port, std::string expected, int num_tokens)
      : engine_(engine), port_(port), expected_(std::move(expected)), num_tokens_(num_tokens) {}

  void Requests(size_t num_connections, double seconds) {
    engine_.set_step_time(std::chrono::milliseconds(0));
    LoadClient client(port_, num_connections, [](size_t) { return ChatRequest(8, false); });
    const TimePoint begin = steady_clock::now();
    int64_t num_answers = 0;
    std::vector<double> ms;
    client.Run({.on_event = nullptr, .on_answer = [&](const Connection& connection) {
                  ++num_answers;
                  const TimePoint now = steady_clock::now();
                  ms.push_back(Seconds(now - connection.sent) * 1e3);
                  return Seconds(now - begin) < seconds;
                }});
    fmt::print(
        "requests: {:.0f} answers/s of 8 tokens on {} connections; p50 {:.2f} ms, p99 {:.2f} ms\n",
        static_cast<double>(num_answers) / Seconds(steady_clock::now() - begin), num_connections,
        Percentile(ms, 0.5), Percentile(ms, 0.99));
  }

  bool Streams(size_t num_streams) {
    engine_.set_step_time(std::chrono::milliseconds(0));
    engine_.WaitFor(num_streams);
    std::vector<std::string> contents(num_streams);
    LoadClient client(port_, num_streams,
                      [this](size_t) { return ChatRequest(num_tokens_, true); });
    const TimePoint begin = steady_clock::now();
    client.Run(
        {.on_event = [&](const Connection& connection, size_t,
                         std::string_view data) { contents[connection.idx] += ContentOf(data); },
         .on_answer = [](const Connection&) { return false; }});
    const double seconds = Seconds(steady_clock::now() - begin);
    const auto num_right = std::count(contents.begin(), contents.end(), expected_);
    fmt::print("streams: {} of {} streams whole and in order; {:.0f} tokens/s\n", num_right,
               num_streams, static_cast<double>(num_streams) * num_tokens_ / seconds);
    return num_right == static_cast<int64_t>(num_streams);
  }

  void Latency(size_t num_streams, std::chrono::milliseconds step_time) {
    engine_.set_step_time(step_time);
    engine_.WaitFor(num_streams);
    engine_.ForgetSteps();
    std::vector<std::vector<TimePoint>> arrivals(num_streams);
    LoadClient client(port_, num_streams,
                      [this](size_t) { return ChatRequest(num_tokens_, true); });
    client.Run({.on_event =
                    [&](const Connection& connection, size_t event_idx, std::string_view) {
                      // The first chunk has the role and no token.
                      if (event_idx > 0) arrivals[connection.idx].push_back(steady_clock::now());
                    },
                .on_answer = [](const Connection&) { return false; }});
    const std::vector<TimePoint> steps = engine_.step_times();
    std::vector<double> ms;
    for (const std::vector<TimePoint>& times : arrivals) {
      for (size_t i = 0; i < static_cast<size_t>(num_tokens_); ++i)
        ms.push_back(Seconds(times.at(i) - steps.at(i)) * 1e3);
    }
    fmt::print(
        "latency: {} streams, a token every {} ms: p50 {:.2f} ms, p99 {:.2f} ms, most {:.2f} ms\n",
        num_streams, step_time.count(), Percentile(ms, 0.5), Percentile(ms, 0.99),
        Percentile(ms, 1.0));
  }

 private:
  InstantEngine& engine_;
  const int port_;
  const std::string expected_;
  const int num_tokens_;
};

int Run(const std::string& model, const std::string& only) {
  constexpr int kTokens = 200;
  SetLogLevel(LogLevel::kWarning);
  auto tokenizer = text::Tokenizer::Load(model + "/tokenizer.json");
  if (!tokenizer.ok()) {
    fmt::print(stderr, "front_end_bench: {}\n", tokenizer.status().message());
    return 2;
  }
  const auto special = text::SpecialTokens::Find(**tokenizer);
  if (!special.ok()) {
    fmt::print(stderr, "front_end_bench: {}\n", special.status().message());
    return 2;
  }
  // Words that differ, so that order shows.
  std::vector<int32_t> ids;
  for (int i = 0; static_cast<int>(ids.size()) < kTokens; ++i)
    (*tokenizer)->Encode(fmt::format(" word{}", i), text::Tokenizer::AddedTokens::kAsPlain, &ids);
  ids.resize(kTokens);
  InstantEngine engine(ids, special->eos);
  MetricsRegistry metrics;
  api::ApiOptions options;
  options.port = 0;
  options.served_model_names = {"bench"};
  auto server = api::StartApiServer(std::move(options), engine, **tokenizer,
                                    {.root = model, .special_tokens = *special}, metrics);
  if (!server.ok()) {
    fmt::print(stderr, "front_end_bench: {}\n", server.status().message());
    return 2;
  }
  Bench bench(engine, (*server)->port(), (*tokenizer)->Decode(ids, true), kTokens);
  bool right = true;
  if (only.empty() || only == "requests") bench.Requests(64, 5);
  if (only.empty() || only == "streams") right = bench.Streams(1000);
  if (only.empty() || only == "latency") bench.Latency(200, std::chrono::milliseconds(20));
  return right ? 0 : 1;
}

}  // namespace
}  // namespace fathom::bench

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: front_end_bench MODEL [requests|streams|latency]\n");
    return 2;
  }
  return fathom::bench::Run(argv[1], argc > 2 ? argv[2] : "");
}
