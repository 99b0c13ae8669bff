// ScriptedEngine: an engine for tests that "generates" the token ids it is told, one a step, on its
// own thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace fathom::api {

class ScriptedEngine final : public engine::Engine {
 public:
  using Script = std::function<std::vector<int32_t>(const request::Request&)>;

  // After the script's ids comes `eos`.
  ScriptedEngine(Script script, int32_t eos, int64_t max_model_len)
      : script_(std::move(script)),
        eos_(eos),
        max_model_len_(max_model_len),
        thread_([this] { Loop(); }) {}
  ~ScriptedEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  // While held, requests wait as if queued.
  void Hold(bool held) {
    held_ = held;
    wake_.notify_all();
  }
  void set_capacity(size_t capacity) { capacity_ = capacity; }
  void set_step_time(std::chrono::milliseconds step_time) { step_time_ = step_time; }
  size_t num_active() const {
    const std::lock_guard lock(mutex_);
    return active_.size();
  }
  std::vector<request::Request> submitted() const {
    const std::lock_guard lock(mutex_);
    return submitted_;
  }

  Status Submit(request::Request request, std::shared_ptr<request::TokenSink> sink) override {
    const std::lock_guard lock(mutex_);
    if (draining_ || active_.size() >= capacity_)
      return Unavailable("the queue is full: try again later");
    submitted_.push_back(request);
    std::vector<int32_t> ids = script_(request);
    const request::RequestId id = request.id;
    active_.emplace(id, Active{std::move(request), std::move(sink), std::move(ids), 0});
    wake_.notify_all();
    return OkStatus();
  }
  void Finish(request::RequestId id, request::FinishReason reason) override {
    const std::lock_guard lock(mutex_);
    if (active_.count(id) > 0) ended_.emplace_back(id, reason);
    wake_.notify_all();
  }
  void Drain(Duration timeout) override {
    std::unique_lock lock(mutex_);
    draining_ = true;
    idle_.wait_for(lock, timeout, [this] { return active_.empty(); });
    for (const auto& [id, active] : active_) {
      ended_.emplace_back(id, request::FinishReason::kCancelled);
    }
    wake_.notify_all();
    idle_.wait(lock, [this] { return active_.empty(); });
  }
  void ResetPrefixCache() override {}
  engine::EngineStats Stats() const override { return {}; }
  request::RequestId NextRequestId() override { return next_id_++; }
  int64_t max_model_len() const override { return max_model_len_; }

 private:
  struct Active {
    request::Request request;
    std::shared_ptr<request::TokenSink> sink;
    std::vector<int32_t> ids;
    size_t next;
  };

  void Loop() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      for (const auto& [id, reason] : std::exchange(ended_, {})) {
        const auto it = active_.find(id);
        if (it == active_.end()) continue;
        request::TokenEvent event;
        event.finish_reason = reason;
        it->second.sink->OnEvent(std::move(event));
        active_.erase(it);
      }
      if (!held_) Step();
      if (active_.empty()) idle_.notify_all();
      const bool waits = active_.empty() || held_;
      const std::chrono::microseconds least{20};  // others want the lock, too
      wake_.wait_for(lock, waits ? std::chrono::milliseconds(20)
                                 : std::max<std::chrono::microseconds>(step_time_.load(), least));
    }
  }
  void Step() {
    for (auto it = active_.begin(); it != active_.end();) {
      Active& active = it->second;
      request::TokenEvent event;
      const bool at_end = active.next >= active.ids.size() && !active.request.sampling.ignore_eos;
      const int32_t id = at_end ? eos_ : active.ids[active.next % active.ids.size()];
      ++active.next;
      event.token_ids = {id};
      if (active.request.sampling.num_logprobs)
        event.logprobs = {Logprobs(id, *active.request.sampling.num_logprobs)};
      if (active.next == 1 && active.request.sampling.num_prompt_logprobs) {
        const std::vector<int32_t>& prompt = active.request.prompt_token_ids;
        for (size_t i = 1; i < prompt.size(); ++i) {
          event.prompt_logprobs.push_back(
              Logprobs(prompt[i], *active.request.sampling.num_prompt_logprobs));
        }
      }
      if (at_end) {
        event.finish_reason = request::FinishReason::kStop;
        event.stop_token_id = eos_;
      } else if (active.next >= static_cast<size_t>(active.request.sampling.max_tokens)) {
        event.finish_reason = request::FinishReason::kLength;
      }
      const bool over = event.finish_reason.has_value();
      active.sink->OnEvent(std::move(event));
      it = over ? active_.erase(it) : std::next(it);
    }
  }
  static request::TokenLogprobs Logprobs(int32_t id, int num_top) {
    request::TokenLogprobs out{{id, -0.5f}, 1, {}};
    for (int i = 0; i < num_top; ++i) out.top.push_back({id + i, -0.5f - static_cast<float>(i)});
    return out;
  }

  const Script script_;
  const int32_t eos_;
  const int64_t max_model_len_;
  std::atomic<size_t> capacity_{64};
  std::atomic<bool> held_{false};
  std::atomic<std::chrono::milliseconds> step_time_{std::chrono::milliseconds(0)};
  std::atomic<request::RequestId> next_id_{1};

  mutable std::mutex mutex_;  // guards the rest
  std::condition_variable wake_, idle_;
  std::map<request::RequestId, Active> active_;
  std::vector<std::pair<request::RequestId, request::FinishReason>> ended_;
  std::vector<request::Request> submitted_;
  bool draining_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace fathom::api
