#include <gtest/gtest.h>

#include <vector>

#include "device/cuda/multi_gpu.h"

namespace fathom::device {
namespace {

PeerLink Nvlink(int, int) { return PeerLink::kNvlink; }

TEST(Topology, IsOneLine) {
  EXPECT_EQ(DescribeTopology({}, Nvlink), "no GPU");
  EXPECT_EQ(DescribeTopology(std::vector{3}, Nvlink), "GPU 3");
  EXPECT_EQ(DescribeTopology(std::vector{0, 1, 2, 3}, Nvlink), "GPUs 0-3: NVLink between all");
  EXPECT_EQ(DescribeTopology(std::vector{0, 2}, Nvlink), "GPUs 0, 2: NVLink between all");
}

TEST(Topology, NamesThePairsOfEachLink) {
  const auto islands = [](int a, int b) {
    if (a / 2 == b / 2) return PeerLink::kNvlink;
    return a == 0 && b == 3 ? PeerLink::kPcie : PeerLink::kNone;
  };
  EXPECT_EQ(DescribeTopology(std::vector{0, 1, 2, 3}, islands),
            "GPUs 0-3: NVLink 0-1 2-3, PCIe peer access 0-3, no peer access 0-2 1-2 1-3");
}

TEST(Topology, AGpuThatIsNotThereIsReachedByNobody) {
  EXPECT_EQ(ProbePeerLink(0, 1 << 20), PeerLink::kNone);
}

}  // namespace
}  // namespace fathom::device
