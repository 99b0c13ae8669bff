// ParallelSlots: a parallel loop whose tasks may use scratch memory of their thread. body(slot,
// task) runs for every task in [0, num_tasks); no two calls with the same slot (< num_threads) run
// at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/thread_pool.h"

namespace fathom::kernels {

template <typename Body>
void ParallelSlots(ThreadPool& pool, int64_t num_tasks, const Body& body) {
  std::atomic<int64_t> next{0};
  pool.ParallelFor(std::min<int64_t>(pool.num_threads(), num_tasks), 1, [&](int64_t slot, int64_t) {
    for (int64_t task = next.fetch_add(1, std::memory_order_relaxed); task < num_tasks;
         task = next.fetch_add(1, std::memory_order_relaxed)) {
      body(slot, task);
    }
  });
}

}  // namespace fathom::kernels
