// A fixed set of threads for data-parallel loops. ParallelFor splits [0, n) into ranges of `grain`;
// which thread runs a range is not fixed, so a result must not depend on it (sum inside one index,
// never across). One ParallelFor at a time; the caller takes part and returns when all ranges are
// done.
// Loops follow each other within microseconds, so a thread without work looks for the next loop for
// a moment before it sleeps.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
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

  Loop loop_;  // written between loops, when no worker is inside
  // Odd while a loop is open. A worker enters by raising num_inside_ and then finding the epoch
  // unchanged; closing is a new epoch, then waiting for num_inside_ to fall to 0. A worker that
  // wakes too late finds the loop closed and nobody waits for it.
  std::atomic<int> epoch_{0};
  std::atomic<int> num_inside_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

// The processors this process may run on.
int NumUsableCores();

}  // namespace fathom
