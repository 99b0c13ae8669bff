// What the engine's tests share: a request's reader, and a grammar.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "request/request.h"

namespace fathom::engine {

// A wait of so long hangs, also under a sanitizer on a busy machine.
constexpr auto kHung = std::chrono::minutes(10);

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
  // The last event.
  request::TokenEvent Wait() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kHung, [this] { return finished_; }));
    return last_;
  }
  void WaitForTokens(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, kHung, [&] { return finished_ || token_ids_.size() >= count; }));
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

// A grammar whose n-th token is n modulo 3, so that it notices a token that is missing or twice.
class CountsModuloThree final : public request::TokenConstraint {
 public:
  bool FillNextTokenMask(std::span<uint32_t> mask) override {
    for (size_t t = static_cast<size_t>(num_accepted_) % 3; t < mask.size() * 32; t += 3) {
      mask[t / 32] |= 1u << t % 32;
    }
    return true;
  }
  bool AcceptToken(int32_t token_id) override { return token_id % 3 == num_accepted_++ % 3; }
  void Rollback(int num_tokens) override { num_accepted_ -= num_tokens; }
  int num_accepted() const override { return num_accepted_; }

 private:
  int num_accepted_ = 0;
};

}  // namespace fathom::engine
