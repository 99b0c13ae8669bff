#include "kernels/collective/peer_view.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace fathom::kernels {
namespace {

TEST(GoesAsPackets, UpToTheBytesThatARankSends) {
  EXPECT_TRUE(GoesAsPackets(255, 4096, 2));  // 4 MB
  EXPECT_FALSE(GoesAsPackets(256, 4096, 2));
  EXPECT_TRUE(GoesAsPackets(128, 4096, 4));  // 6 MiB
  EXPECT_FALSE(GoesAsPackets(129, 4096, 4));
  EXPECT_TRUE(GoesAsPackets(16, 7168, 8));
  EXPECT_FALSE(GoesAsPackets(64, 7168, 8));
}

TEST(SplitTwoPhase, CoversEveryValueOnceWithAtMostOneChunkABlock) {
  for (const int size : {2, 3, 4, 8}) {
    for (const int64_t tokens : {1, 2, 255, 256, 300, 2048, 8192, 16384}) {
      for (const int64_t hidden : {256, 4096, 7168}) {
        const int64_t count = tokens * hidden;
        const TwoPhaseSplit split = SplitTwoPhase(count, size);
        EXPECT_GE(split.num_chunks, 1);
        EXPECT_LE(split.num_chunks, kMaxChunks);
        EXPECT_EQ(split.chunk % kChunkUnit, 0);
        EXPECT_EQ(split.slice, split.num_chunks * split.chunk);
        EXPECT_GE(split.slice * size, count);
      }
    }
  }
}

TEST(PeerLayout, HoldsEverySumUpToItsLargest) {
  for (const int size : {2, 3, 4, 8}) {
    for (const int64_t hidden : {256, 4096, 7168}) {
      constexpr int64_t kMaxTokens = 8192;
      const PeerLayout layout = MakePeerLayout(size, hidden, kMaxTokens);
      for (int64_t tokens = 1; tokens <= kMaxTokens; tokens = tokens * 5 / 4 + 1) {
        EXPECT_LE(SplitTwoPhase(tokens * hidden, size).slice, layout.max_slice);
      }
      EXPECT_LE(SplitTwoPhase(kMaxTokens * hidden, size).slice, layout.max_slice);
      EXPECT_EQ(layout.num_packets * kPacketValues, kMaxPacketTokens * hidden);
    }
  }
}

TEST(PeerLayout, PiecesAreApartAndAligned) {
  const int size = 4;
  const PeerLayout l = MakePeerLayout(size, 4096, 8192);
  EXPECT_GE(l.scatter_offset, 2 * size * l.num_packets * kPacketBytes);
  EXPECT_GE(l.sums_offset, l.scatter_offset + size * l.max_slice * 2);
  EXPECT_GE(l.flags_offset, l.sums_offset + l.max_values * 2);
  EXPECT_GE(l.bytes, l.flags_offset + 2 * size * kMaxChunks * 8);
  for (const int64_t offset : {l.scatter_offset, l.sums_offset, l.flags_offset}) {
    EXPECT_EQ(offset % 1024, 0);
  }
  EXPECT_EQ(l.max_slice % 8, 0);  // rows of 16 bytes
}

}  // namespace
}  // namespace fathom::kernels
