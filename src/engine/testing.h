// CollectingSink: a request's reader, for tests.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "request/request.h"

namespace fathom::engine {

// Keeps events; a test waits for the last.
class CollectingSink final : public request::TokenSink {
 public:
  void OnEvent(request::TokenEvent event) override {
    std::lock_guard lock(mutex_);
    EXPECT_FALSE(finished_) << "an event after the last";
    token_ids_.insert(token_ids_.end(), event.token_ids.begin(), event.token_ids.end());
    logprobs_.insert(logprobs_.end(), event.logprobs.begin(), event.logprobs.end());
    routed_experts_.insert(routed_experts_.end(), event.routed_experts.begin(),
                           event.routed_experts.end());
    finished_ = event.finish_reason.has_value();
    last_ = std::move(event);
    changed_.notify_all();
  }
  // The last event; a test that waits longer than a minute has hung.
  request::TokenEvent Wait() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(60), [this] { return finished_; }));
    return last_;
  }
  void WaitForTokens(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(60),
                                  [&] { return finished_ || token_ids_.size() >= count; }));
  }
  std::vector<int32_t> token_ids() const {
    std::lock_guard lock(mutex_);
    return token_ids_;
  }
  std::vector<request::TokenLogprobs> logprobs() const {
    std::lock_guard lock(mutex_);
    return logprobs_;
  }
  std::vector<uint16_t> routed_experts() const {
    std::lock_guard lock(mutex_);
    return routed_experts_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int32_t> token_ids_;
  std::vector<request::TokenLogprobs> logprobs_;
  std::vector<uint16_t> routed_experts_;
  request::TokenEvent last_;
  bool finished_ = false;
};

}  // namespace fathom::engine
