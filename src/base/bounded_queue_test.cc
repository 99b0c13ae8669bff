#include "base/bounded_queue.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

namespace fathom {
namespace {

TEST(BoundedQueue, GivesValuesInTheOrderTheyCame) {
  BoundedQueue<int> queue(3);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(queue.TryPush(i));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(queue.TryPop(), i);
  EXPECT_EQ(queue.TryPop(), std::nullopt);
}

TEST(BoundedQueue, RefusesWhatDoesNotFit) {
  BoundedQueue<std::unique_ptr<int>> queue(1);
  EXPECT_TRUE(queue.TryPush(std::make_unique<int>(1)));
  EXPECT_FALSE(queue.TryPush(std::make_unique<int>(2)));
  EXPECT_EQ(**queue.Pop(), 1);
  EXPECT_TRUE(queue.TryPush(std::make_unique<int>(3)));
}

TEST(BoundedQueue, GivesOutTheRestAfterCloseAndThenNothing) {
  BoundedQueue<int> queue(4);
  EXPECT_TRUE(queue.TryPush(7));
  queue.Close();
  EXPECT_FALSE(queue.TryPush(8));
  EXPECT_EQ(queue.Pop(), 7);
  EXPECT_EQ(queue.Pop(), std::nullopt);
}

TEST(BoundedQueue, WaitsForAValueNoLongerThanItIsTold) {
  BoundedQueue<int> queue(1);
  EXPECT_EQ(queue.PopFor(std::chrono::milliseconds(1)), std::nullopt);
  std::thread producer([&queue] { EXPECT_TRUE(queue.TryPush(7)); });
  EXPECT_EQ(queue.PopFor(std::chrono::hours(1)), 7);
  producer.join();
  queue.Close();
  EXPECT_EQ(queue.PopFor(std::chrono::hours(1)), std::nullopt);
}

TEST(BoundedQueue, HandsEveryValueOfManyThreadsOverOnce) {
  constexpr int kPerThread = 2000;
  BoundedQueue<int> queue(16);
  std::vector<std::thread> producers;
  for (int t = 0; t < 3; ++t) {
    producers.emplace_back([&queue, t] {
      for (int i = 0; i < kPerThread; ++i) {
        while (!queue.TryPush(t * kPerThread + i)) std::this_thread::yield();
      }
    });
  }
  std::vector<int> seen(3 * kPerThread);
  for (int i = 0; i < 3 * kPerThread; ++i) ++seen[static_cast<size_t>(queue.Pop().value())];
  for (std::thread& producer : producers) producer.join();
  for (const int count : seen) EXPECT_EQ(count, 1);
}

}  // namespace
}  // namespace fathom
