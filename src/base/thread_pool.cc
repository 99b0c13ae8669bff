#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>

#include "base/check.h"

namespace fathom {
namespace {

// Looks before sleeping: some 50 microseconds, longer than the pause between two loops of a step.
constexpr int kSpins = 1000;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns once value is no longer `old`.
void WaitForChange(const std::atomic<int>& value, int old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    Pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  CHECK_GE(num_threads, 1);
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { RunWorker(); });
}

ThreadPool::~ThreadPool() {
  stopping_ = true;
  epoch_ += 2;
  epoch_.notify_all();
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
  CHECK_EQ(epoch_.load() % 2, 0);
  loop_.body = &body;
  loop_.n = n;
  loop_.grain = grain;
  loop_.next.store(0, std::memory_order_relaxed);
  ++epoch_;
  epoch_.notify_all();
  RunRanges();
  ++epoch_;
  for (int inside = num_inside_.load(); inside != 0; inside = num_inside_.load()) {
    WaitForChange(num_inside_, inside);
  }
}

void ThreadPool::RunRanges() {
  while (true) {
    const int64_t begin = loop_.next.fetch_add(loop_.grain, std::memory_order_relaxed);
    if (begin >= loop_.n) return;
    (*loop_.body)(begin, std::min(begin + loop_.grain, loop_.n));
  }
}

void ThreadPool::RunWorker() {
  int seen = 0;
  while (true) {
    WaitForChange(epoch_, seen);
    seen = epoch_.load();
    if (stopping_) return;
    if (seen % 2 == 0) continue;
    ++num_inside_;
    if (epoch_.load() == seen) RunRanges();
    --num_inside_;
    num_inside_.notify_one();
  }
}

int NumUsableCores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace fathom
