#include "device/free_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fathom::device {
namespace {

using std::chrono::milliseconds;

// A device of 100 bytes, of which `free[i]` are free at the i-th look, then as many as at the last.
struct Looks {
  std::vector<int64_t> free;
  size_t count = 0;
  int waits = 0;

  int64_t Await(int64_t bytes, milliseconds patience) {
    return AwaitFreeMemory(
        bytes, 100, [this] { return free[std::min(count++, free.size() - 1)]; },
        [this](int64_t) { ++waits; }, patience);
  }
};

TEST(AwaitFreeMemory, DoesNotWaitForWhatIsFree) {
  Looks looks{.free = {60}};
  EXPECT_EQ(looks.Await(60, milliseconds(60'000)), 60);
  EXPECT_EQ(looks.count, 1u);
  EXPECT_EQ(looks.waits, 0);
}

TEST(AwaitFreeMemory, WaitsForWhatAnotherProcessGivesBack) {
  Looks looks{.free = {10, 10, 90}};
  EXPECT_EQ(looks.Await(60, milliseconds(60'000)), 90);
  EXPECT_EQ(looks.count, 3u);
  EXPECT_EQ(looks.waits, 1);
}

TEST(AwaitFreeMemory, EndsWhenNobodyDoes) {
  Looks looks{.free = {10}};
  EXPECT_EQ(looks.Await(60, milliseconds(5)), 10);
  EXPECT_GE(looks.count, 2u);
}

TEST(AwaitFreeMemory, DoesNotWaitForMoreThanThereIs) {
  Looks looks{.free = {10}};
  EXPECT_EQ(looks.Await(101, milliseconds(60'000)), 10);
  EXPECT_EQ(looks.count, 1u);
}

}  // namespace
}  // namespace fathom::device
