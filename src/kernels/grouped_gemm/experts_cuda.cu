#include "base/check.h"
#include "kernels/grouped_gemm/experts_cuda.h"
#include "kernels/grouped_gemm/experts_large.h"
#include "kernels/grouped_gemm/experts_stream_cuda.h"

namespace fathom::kernels {
namespace {

void Run(const CudaExpertParams& p, bool gate_up, bool down, device::Stream& stream) {
  if (p.num_tokens == 0) return;
  CHECK_EQ(p.hidden % 128, 0);
  CHECK_EQ(p.intermediate % 128, 0);
  if (!p.plan.is_large) return LaunchStream(p, gate_up, down, stream);
  if (gate_up) LaunchGateUpLarge(p, stream);
  if (down) LaunchDownLarge(p, stream);
}

}  // namespace

void Launch(const CudaExpertParams& p, device::Stream& stream) { Run(p, true, true, stream); }

void Launch(const CudaExpertParams& p, const ExpertRank& rank, device::Stream& stream) {
  const PeerView& peers = rank.exchange.peers;
  CHECK(!p.plan.is_large && p.num_tokens > 0);
  CHECK_EQ(p.hidden % 128, 0);
  CHECK_EQ(rank.down_rows % 128, 0);
  CHECK_EQ(rank.blocks.begin[peers.size] * 128, p.intermediate);
  // Else somebody would wait for nobody, or nobody for somebody.
  CHECK_GT(rank.blocks.least(peers.size), 0);
  CHECK_GT(rank.down_rows, 0);
  const int64_t tiles = p.t.row_groups * (p.intermediate / 128);
  CHECK(IsShared(peers, p.t.codes, tiles * kTileBytes));
  CHECK(IsShared(peers, p.t.scales, tiles * kTileRows * int64_t{sizeof(float)}));
  const int64_t flags = NumArrivals(p.num_tokens, p.num_experts, p.num_chosen, p.intermediate);
  CHECK(p.num_tokens > 1 ||
        IsShared(peers, p.t_packets, NumPackets(p.num_chosen, p.intermediate) * kPacketBytes));
  CHECK(IsShared(peers, rank.arrived, flags * int64_t{sizeof(uint64_t)}));
  LaunchStream(p, rank, stream);
}

void LaunchGateUp(const CudaExpertParams& p, device::Stream& stream) {
  Run(p, true, false, stream);
}
void LaunchDown(const CudaExpertParams& p, device::Stream& stream) { Run(p, false, true, stream); }

}  // namespace fathom::kernels
