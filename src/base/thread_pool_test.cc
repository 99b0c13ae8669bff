#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <chrono>

namespace fathom {
namespace {

TEST(ThreadPool, CoversEveryIndexOnce) {
  for (const int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    for (const int64_t n : {0, 1, 7, 64, 1000}) {
      std::vector<std::atomic<int>> counts(static_cast<size_t>(n));
      pool.ParallelFor(n, 7, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) counts[static_cast<size_t>(i)]++;
      });
      for (const auto& count : counts) EXPECT_EQ(count, 1);
    }
  }
}

TEST(ThreadPool, LoopsFollowEachOtherWithoutMixing) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  for (int round = 0; round < 2000; ++round) {
    pool.ParallelFor(10, 1, [&](int64_t begin, int64_t) { sum += begin; });
  }
  EXPECT_EQ(sum, 2000 * 45);
}

TEST(ThreadPool, LoopsAfterAPauseWakeSleepingThreads) {
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // longer than a thread looks around
    pool.ParallelFor(8, 1, [&](int64_t begin, int64_t) { sum += begin; });
    EXPECT_EQ(sum, (round + 1) * 28);
  }
}

TEST(ThreadPool, EndsWithThreadsThatNeverWorked) {
  for (int round = 0; round < 50; ++round) ThreadPool pool(3);
}

}  // namespace
}  // namespace fathom
