// BoundedQueue: how two threads hand each other values. First in, first out; never grows beyond its
// capacity; any number of threads on either side. A closed queue takes nothing more and gives out
// the rest.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace fathom {

template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}
  BoundedQueue(const BoundedQueue&) = delete;
  BoundedQueue& operator=(const BoundedQueue&) = delete;

  // False, with `value` dropped, when the queue is full or closed. Never waits.
  bool TryPush(T value) {
    {
      std::lock_guard lock(mutex_);
      if (closed_ || values_.size() >= capacity_) return false;
      values_.push_back(std::move(value));
    }
    not_empty_.notify_one();
    return true;
  }

  // Waits for a value; none when the queue is closed and empty.
  std::optional<T> Pop() {
    std::unique_lock lock(mutex_);
    not_empty_.wait(lock, [this] { return closed_ || !values_.empty(); });
    return TakeFront();
  }

  // Waits for so long at most; none, too, when it is over.
  std::optional<T> PopFor(std::chrono::nanoseconds limit) {
    std::unique_lock lock(mutex_);
    not_empty_.wait_for(lock, limit, [this] { return closed_ || !values_.empty(); });
    return TakeFront();
  }

  // None when the queue is empty now.
  std::optional<T> TryPop() {
    std::lock_guard lock(mutex_);
    return TakeFront();
  }

  void Close() {
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
    }
    not_empty_.notify_all();
  }

 private:
  std::optional<T> TakeFront() {
    if (values_.empty()) return std::nullopt;
    std::optional<T> value(std::move(values_.front()));
    values_.pop_front();
    return value;
  }

  const size_t capacity_;
  std::mutex mutex_;
  std::condition_variable not_empty_;
  std::deque<T> values_;  // guarded by mutex_
  bool closed_ = false;   // guarded by mutex_
};

}  // namespace fathom
