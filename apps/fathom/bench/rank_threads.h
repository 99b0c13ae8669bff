// RankThreads: runs the same thing for every rank at once, the first rank's on the calling thread.
// GPUs wait for each other, so that no rank's work may be enqueued behind another's. Used by one
// thread.
#pragma once

#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "base/bounded_queue.h"
#include "base/check.h"
#include "base/status.h"

namespace fathom::app {

class RankThreads {
 public:
  explicit RankThreads(size_t num_ranks) {
    for (size_t rank = 1; rank < num_ranks; ++rank) {
      queues_.push_back(std::make_unique<Queue>(1));
      threads_.emplace_back([&queue = *queues_.back()] {
        while (const auto run = queue.Pop()) (*run)();
      });
    }
  }
  ~RankThreads() {
    for (const auto& queue : queues_) queue->Close();
    for (std::thread& thread : threads_) thread.join();
  }
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Returns when all have; the first error.
  Status OnAll(const std::function<Status(size_t rank)>& run) {
    std::vector<Status> statuses(queues_.size() + 1);
    std::latch done(static_cast<std::ptrdiff_t>(queues_.size()));
    for (size_t rank = 1; rank < statuses.size(); ++rank) {
      CHECK(queues_[rank - 1]->TryPush([&, rank] {
        statuses[rank] = run(rank);
        done.count_down();
      }));
    }
    statuses[0] = run(0);
    done.wait();
    for (const Status& status : statuses) RETURN_IF_ERROR(status);
    return OkStatus();
  }

 private:
  using Queue = BoundedQueue<std::function<void()>>;
  std::vector<std::unique_ptr<Queue>> queues_;  // of the ranks after the first
  std::vector<std::thread> threads_;
};

}  // namespace fathom::app
