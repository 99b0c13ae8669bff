#include "comm/group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <numeric>
#include <thread>

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

// Parameter: the number of ranks on each node.
class GroupOfRanks : public testing::TestWithParam<std::vector<int>> {
 protected:
  static int NumRanks() { return std::accumulate(GetParam().begin(), GetParam().end(), 0); }
};

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
    Group alone(transport, {transport.rank()});
    for (int round = 0; round < 300; ++round) {
      std::vector<std::byte> own(1);
      ASSERT_TRUE(alone.AllGather(own, std::array{Group::Range{0, 1}}).ok());
      ASSERT_TRUE(GatherOnce(transport, round).ok());
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
  auto transports = MakeMemoryTransports(3, seconds(2));  // long enough for the other one to come
  OnThreads(3, [&](size_t rank) {
    if (rank == 2) return;
    const Status status = GatherOnce(*transports[rank]);
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
    EXPECT_THAT(GatherOnce(*transports[rank]).message(), testing::HasSubstr("fell off"));
    EXPECT_FALSE(GatherOnce(*transports[rank]).ok());
  });
}

}  // namespace
}  // namespace fathom::comm
