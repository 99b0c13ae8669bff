#include "comm/group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "base/float_types.h"
#include "comm/memory_transport.h"
#include "comm/test_nodes.h"

namespace fathom::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::vector<int> AllRanks(const Transport& transport) {
  std::vector<int> ranks;
  for (int r = 0; r < transport.size(); ++r) ranks.push_back(r);
  return ranks;
}

template <typename T>
std::vector<T> RandomValues(size_t count, int rank) {
  std::mt19937 random(static_cast<uint32_t>(rank) + 7);
  std::normal_distribution<float> normal;
  std::vector<T> values;
  for (size_t i = 0; i < count; ++i) values.push_back(T(normal(random)));
  return values;
}

// Parameter: the number of ranks on each node.
class GroupOfRanks : public testing::TestWithParam<std::vector<int>> {
 protected:
  static int NumRanks() { return std::accumulate(GetParam().begin(), GetParam().end(), 0); }
};

TEST_P(GroupOfRanks, AllReduceSumsInTheOrderOfRanksAndRoundsOnce) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{257}, size_t{100'000}}) {
    std::vector<float> expected(count);
    for (int r = 0; r < NumRanks(); ++r) {
      const auto values = RandomValues<BFloat16>(count, r);
      for (size_t i = 0; i < count; ++i) expected[i] += static_cast<float>(values[i]);
    }
    TestWorld world(GetParam());
    world.OnEveryRank([&](Transport& transport) {
      Group group(transport, AllRanks(transport));
      auto values = RandomValues<BFloat16>(count, group.rank());
      ASSERT_TRUE(group.AllReduce(std::span(values)).ok());
      for (size_t i = 0; i < count; ++i) {
        const BFloat16 sum(NumRanks() == 1 ? static_cast<float>(values[i]) : expected[i]);
        ASSERT_EQ(values[i].bits, sum.bits) << i;
      }
    });
  }
}

TEST_P(GroupOfRanks, AllGatherPutsEveryMembersRangeInItsPlace) {
  TestWorld world(GetParam());
  world.OnEveryRank([&](Transport& transport) {
    Group group(transport, AllRanks(transport));
    std::vector<Group::Range> ranges;  // member m has m * 3 bytes: none for the first
    int64_t end = 0;
    for (int m = 0; m < group.size(); ++m) ranges.push_back({end, end += m * 3});
    std::vector<std::byte> all(static_cast<size_t>(end));
    const auto [begin, own_end] = ranges[static_cast<size_t>(group.rank())];
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(own_end); ++i) {
      all[i] = std::byte(group.rank() + 1);
    }
    ASSERT_TRUE(group.AllGather(all, ranges).ok());
    for (int m = 0; m < group.size(); ++m) {
      const auto& range = ranges[static_cast<size_t>(m)];
      for (auto i = static_cast<size_t>(range.begin); i < static_cast<size_t>(range.end); ++i) {
        ASSERT_EQ(all[i], std::byte(m + 1)) << i;
      }
    }
  });
}

TEST_P(GroupOfRanks, ManyOperationsInARowStayInOrder) {
  TestWorld world(GetParam());
  world.OnEveryRank([&](Transport& transport) {
    Group all(transport, AllRanks(transport));
    Group alone(transport, {transport.rank()});
    for (int round = 0; round < 300; ++round) {
      std::vector<float> value{static_cast<float>(round + all.rank())};
      ASSERT_TRUE(alone.AllReduce(std::span(value)).ok());
      ASSERT_TRUE(all.AllReduce(std::span(value)).ok());
      const int n = all.size();
      ASSERT_EQ(value[0], static_cast<float>(n * round + n * (n - 1) / 2));
    }
  });
}

using Nodes = std::vector<int>;
INSTANTIATE_TEST_SUITE_P(InMemory, GroupOfRanks,
                         testing::Values(Nodes{1}, Nodes{2}, Nodes{3}, Nodes{4}, Nodes{8}));
INSTANTIATE_TEST_SUITE_P(OverTcp, GroupOfRanks,
                         testing::Values(Nodes{1, 1}, Nodes{1, 1, 1}, Nodes{2, 2}, Nodes{3, 1, 2},
                                         Nodes{4, 4}));

TEST(MemoryTransport, ARankThatDoesNotComeEndsTheWorld) {
  auto transports = MakeMemoryTransports(3, milliseconds(50));
  OnThreads(3, [&](size_t rank) {
    if (rank == 2) return;
    Group group(*transports[rank], {0, 1, 2});
    std::vector<float> values(10);
    const Status status = group.AllReduce(std::span(values));
    EXPECT_EQ(status.code(), StatusCode::kPeer);
    EXPECT_THAT(status.message(), testing::HasSubstr("rank 2"));
  });
}

TEST(MemoryTransport, AbortWakesWhoeverWaits) {
  auto transports = MakeMemoryTransports(2, seconds(60));
  OnThreads(2, [&](size_t rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(20));
      return transports[rank]->Abort(DeviceError("GPU 1 fell off the bus"));
    }
    Group group(*transports[rank], {0, 1});
    std::vector<float> values(10);
    EXPECT_THAT(group.AllReduce(std::span(values)).message(), testing::HasSubstr("fell off"));
    EXPECT_FALSE(group.AllReduce(std::span(values)).ok());
  });
}

}  // namespace
}  // namespace fathom::comm
