#include "kernels/collective/peer_view.h"

#include <gtest/gtest.h>

#include <vector>

namespace fathom::kernels {
namespace {

TEST(RankParts, MostAndLeast) {
  const RankParts parts{.begin = {0, 2, 2, 7}};
  EXPECT_EQ(parts.count(1), 0);
  EXPECT_EQ(parts.most(3), 5);
  EXPECT_EQ(parts.least(3), 0);
  EXPECT_EQ(parts.least(1), 2);
}

TEST(GoesAsPackets, BetweenTwoRanksUpToTheBytesThatOneSends) {
  EXPECT_TRUE(GoesAsPackets(12'288, 2));
  EXPECT_FALSE(GoesAsPackets(12'289, 2));
  EXPECT_FALSE(GoesAsPackets(1, 3));
}

TEST(PeerLayout, PiecesAreApartAndAligned) {
  for (const int size : {2, 3, 8}) {
    constexpr int64_t kShared = 12'345;
    const PeerLayout l = MakePeerLayout(size, kShared);
    EXPECT_GE(l.landing_offset, 2 * size * kMaxPackets * kPacketBytes);
    EXPECT_GE(l.shared_offset, l.landing_offset + 2 * kLandingBytes);
    EXPECT_GE(l.flags_offset, l.shared_offset + kShared);
    EXPECT_GE(l.bytes, l.flags_offset + int64_t{size} * kMaxGatherBlocks * 8);
    for (const int64_t offset : {l.landing_offset, l.shared_offset, l.flags_offset})
      EXPECT_EQ(offset % 1024, 0);
  }
}

TEST(PeerView, SharedMemoryLiesBetweenTheLandingsAndTheFlags) {
  constexpr int64_t kShared = 4096;
  PeerView peers{.rank = 1, .size = 2, .layout = MakePeerLayout(2, kShared)};
  std::vector<std::byte> memory(static_cast<size_t>(peers.layout.bytes));
  peers.memory[1] = memory.data();
  const std::byte* const shared = memory.data() + peers.layout.shared_offset;
  EXPECT_TRUE(IsShared(peers, shared, kShared));
  EXPECT_FALSE(IsShared(peers, shared, kShared + 1));
  EXPECT_FALSE(IsShared(peers, shared - 16, 16));
  EXPECT_FALSE(IsShared(peers, shared + 8, 16));
}

}  // namespace
}  // namespace fathom::kernels
