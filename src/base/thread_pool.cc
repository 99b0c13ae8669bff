#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>

#include "base/check.h"

namespace fathom {

ThreadPool::ThreadPool(int num_threads) {
  CHECK_GE(num_threads, 1);
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { RunWorker(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::ParallelFor(int64_t n, int64_t grain,
                             const std::function<void(int64_t, int64_t)>& body) {
  CHECK_GE(grain, 1);
  if (n <= 0) return;
  if (workers_.empty() || n <= grain) {
    for (int64_t begin = 0; begin < n; begin += grain) body(begin, std::min(begin + grain, n));
    return;
  }
  {
    std::lock_guard lock(mutex_);
    CHECK_EQ(num_active_, 0);
    loop_.body = &body;
    loop_.n = n;
    loop_.grain = grain;
    loop_.next.store(0, std::memory_order_relaxed);
    num_active_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  start_.notify_all();
  RunRanges();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return num_active_ == 0; });
}

void ThreadPool::RunRanges() {
  while (true) {
    const int64_t begin = loop_.next.fetch_add(loop_.grain, std::memory_order_relaxed);
    if (begin >= loop_.n) return;
    (*loop_.body)(begin, std::min(begin + loop_.grain, loop_.n));
  }
}

void ThreadPool::RunWorker() {
  uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
    }
    RunRanges();
    std::lock_guard lock(mutex_);
    if (--num_active_ == 0) done_.notify_one();
  }
}

int NumUsableCores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace fathom
