#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "comm/cuda_collective_kinds.h"
#include "comm/cuda_peer_copies.h"

namespace fathom::comm {
namespace {

class PeerCollectives final : public CudaCollectives {
 public:
  PeerCollectives(std::shared_ptr<const CudaPeers> peers, int rank, int64_t max_boundary_tokens)
      : CudaCollectives(rank, peers->view(rank).size,
                        peers->view(rank).memory[rank] + peers->view(rank).layout.shared_offset),
        peers_(std::move(peers)),
        view_(peers_->view(rank)),
        copies_(view_),
        max_boundary_tokens_(max_boundary_tokens) {}

  bool is_captured() const override { return true; }

  kernels::Mirrors mirrors() const override {
    kernels::Mirrors mirrors;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      mirrors.offsets[mirrors.count++] = view_.memory[r] - view_.memory[rank()];
    }
    return mirrors;
  }

  kernels::PeerView peers() const override { return view_; }

  Status Gather(std::span<const kernels::GatheredMatrix> matrices,
                device::Stream& stream) override {
    copies_.End(stream);
    kernels::CudaGatherParams params;
    params.exchange = Next();
    CHECK_LE(matrices.size(), size_t{kernels::kMaxGatheredMatrices});
    std::copy(matrices.begin(), matrices.end(), params.matrices);
    params.num_matrices = static_cast<int>(matrices.size());
    kernels::Launch(params, stream);
    return OkStatus();
  }

  bool can_send_ahead() const override { return true; }
  void SendAhead(std::span<const kernels::GatheredMatrix> matrices,
                 device::Stream& stream) override {
    copies_.Begin(matrices, stream);
  }

  Status GatherTiles(const kernels::CudaGatherTilesParams& params,
                     device::Stream& stream) override {
    return Launch(params, 1, stream);
  }
  Status GatherOutput(const kernels::CudaGatherOutputParams& params,
                      device::Stream& stream) override {
    return Launch(params, 1, stream);
  }
  Status GatherLogits(const kernels::CudaGatherColumnsParams& params,
                      device::Stream& stream) override {
    kernels::CudaGatherColumnsParams sized = params;
    sized.exchange.peers = view_;
    return Launch(params, kernels::NumExchanges(sized), stream);
  }

  int64_t max_boundary_tokens() const override { return max_boundary_tokens_; }
  kernels::OutputExchange GatherInBoundary(const kernels::RankParts& columns,
                                           kernels::OutputExchange::Sent sent) override {
    if (columns.least(size()) == 0) return {};
    return {.exchange = Next(), .columns = columns, .sent = sent};
  }

  kernels::PeerExchange GatherInExperts(int64_t /*num_tokens*/, const kernels::RankParts& blocks,
                                        const kernels::RankParts& outputs) override {
    if (blocks.least(size()) == 0 || outputs.least(size()) == 0) return {};
    return Next();
  }

  void EndStep(device::Stream& stream) override {
    kernels::Launch(kernels::CudaEndExchangesParams{view_, std::exchange(num_exchanges_, 0u)},
                    stream);
  }

  Status Check() override { return peers_->Check(rank()); }

 private:
  kernels::PeerExchange Next() { return {view_, num_exchanges_++}; }

  template <typename Params>
  Status Launch(Params params, int64_t num_exchanges, device::Stream& stream) {
    params.exchange = {view_, num_exchanges_};
    num_exchanges_ += static_cast<uint32_t>(num_exchanges);
    kernels::Launch(params, stream);
    return OkStatus();
  }

  const std::shared_ptr<const CudaPeers> peers_;
  const kernels::PeerView& view_;
  PeerCopies copies_;
  const int64_t max_boundary_tokens_;
  uint32_t num_exchanges_ = 0;  // of the step that is being enqueued
};

}  // namespace

Result<CudaGroup> MakePeerGroup(std::span<const int> gpus, const CudaGroupOptions& options) {
  ASSIGN_OR_RETURN(auto made, CudaPeers::Make(gpus, options.shared_bytes, options.timeout));
  const std::shared_ptr<const CudaPeers> peers = std::move(made);
  CudaGroup group;
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    if (cudaSetDevice(gpus[rank]) != cudaSuccess) return DeviceError("cudaSetDevice failed");
    group.push_back(std::make_shared<PeerCollectives>(peers, static_cast<int>(rank),
                                                      kernels::MaxExchangeTokens(options.hidden)));
  }
  return group;
}

Result<std::shared_ptr<CudaCollectives>> JoinCudaGroup(Transport& transport,
                                                       std::span<const int> members, int gpu,
                                                       const CudaGroupOptions& options) {
  if (!options.custom_all_reduce) {
    return InvalidArgument(
        "--disable-custom-all-reduce needs tensor ranks of one process on GPUs: leave it out, or "
        "--nnodes");
  }
  ASSIGN_OR_RETURN(auto made,
                   CudaPeers::Join(transport, members, gpu, options.shared_bytes, options.timeout));
  const std::shared_ptr<const CudaPeers> peers = std::move(made);
  return std::shared_ptr<CudaCollectives>(std::make_shared<PeerCollectives>(
      peers, peers->only_rank(), kernels::MaxExchangeTokens(options.hidden)));
}

}  // namespace fathom::comm
