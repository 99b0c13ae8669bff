// A fixed set of threads for data-parallel loops. ParallelFor splits [0, n) into ranges of `grain`;
// which thread runs a range is not fixed, so a result must not depend on it (sum inside one index,
// never across). One ParallelFor at a time; the caller takes part and returns when all ranges are
// done.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fathom {

class ThreadPool {
 public:
  // num_threads counts the calling thread; at least 1.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end) for ranges that cover [0, n), each at most `grain` long.
  void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

 private:
  struct Loop {
    const std::function<void(int64_t, int64_t)>* body = nullptr;
    int64_t n = 0;
    int64_t grain = 1;
    std::atomic<int64_t> next{0};
  };
  void RunWorker();
  void RunRanges();

  Loop loop_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  uint64_t generation_ = 0;  // guarded by mutex_
  int num_active_ = 0;       // guarded by mutex_
  bool stopping_ = false;    // guarded by mutex_
  std::vector<std::thread> workers_;
};

// The processors this process may run on.
int NumUsableCores();

}  // namespace fathom
