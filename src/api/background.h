// Background: threads for work that would hold up an io thread for long: parsing and tokenizing
// long requests. A bounded queue, first in first out. Any thread.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "base/bounded_queue.h"

namespace fathom::api {

class Background {
 public:
  Background(int num_threads, size_t max_waiting);
  ~Background();  // what waits is dropped, what runs is waited for
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // False when too much waits already. What `task` throws is logged.
  bool TryRun(std::function<void()> task);

 private:
  void RunThread();

  BoundedQueue<std::function<void()>> tasks_;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

}  // namespace fathom::api
