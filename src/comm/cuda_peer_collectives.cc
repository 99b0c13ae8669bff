#include <cuda_runtime.h>

#include <utility>

#include "comm/cuda_collective_kinds.h"

namespace fathom::comm {
namespace {

class PeerCollectives final : public CudaCollectives {
 public:
  PeerCollectives(std::shared_ptr<const CudaPeers> peers, int rank, int64_t max_boundary_tokens)
      : CudaCollectives(rank, peers->view(rank).size),
        peers_(std::move(peers)),
        view_(peers_->view(rank)),
        max_boundary_tokens_(max_boundary_tokens) {}

  bool is_captured() const override { return true; }

  Result<kernels::SublayerOutput> Sum(const kernels::CudaCombineParams& combine,
                                      device::Stream& stream) override {
    const kernels::PeerExchange exchange = Next();
    if (kernels::GoesAsPackets(combine.num_tokens, combine.hidden, size())) {
      kernels::Launch(kernels::CudaPacketSumParams{exchange, combine}, stream);
      return kernels::SublayerOutput{.y = combine.y};
    }
    kernels::Launch(kernels::CudaTwoPhaseSumParams{exchange, combine}, stream);
    return kernels::SublayerOutput{.y = kernels::TwoPhaseSums(view_)};
  }

  kernels::PeerExchange SumInBoundary(int64_t num_tokens) override {
    return num_tokens <= max_boundary_tokens_ ? Next() : kernels::PeerExchange{};
  }

  Status GatherColumns(float* values, int64_t num_rows, const kernels::GatheredColumns& columns,
                       device::Stream& stream) override {
    const kernels::CudaGatherColumnsParams params{.exchange = {view_, num_exchanges_},
                                                  .values = values,
                                                  .num_rows = num_rows,
                                                  .columns = columns};
    num_exchanges_ += static_cast<uint32_t>(kernels::NumGatherExchanges(params));
    kernels::Launch(params, stream);
    return OkStatus();
  }

  void EndStep(device::Stream& stream) override {
    kernels::Launch(kernels::CudaEndExchangesParams{view_, std::exchange(num_exchanges_, 0u)},
                    stream);
  }

  Status Check() override { return peers_->Check(rank()); }

 private:
  kernels::PeerExchange Next() { return {view_, num_exchanges_++}; }

  const std::shared_ptr<const CudaPeers> peers_;
  const kernels::PeerView& view_;
  const int64_t max_boundary_tokens_;
  uint32_t num_exchanges_ = 0;  // of the step that is being enqueued
};

}  // namespace

Result<CudaGroup> MakePeerGroup(std::span<const int> gpus, const CudaGroupOptions& options) {
  ASSIGN_OR_RETURN(auto made,
                   CudaPeers::Make(gpus, options.hidden, options.max_tokens, options.timeout));
  const std::shared_ptr<const CudaPeers> peers = std::move(made);
  CudaGroup group;
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    if (cudaSetDevice(gpus[rank]) != cudaSuccess) return DeviceError("cudaSetDevice failed");
    group.push_back(std::make_shared<PeerCollectives>(peers, static_cast<int>(rank),
                                                      kernels::MaxExchangeTokens(options.hidden)));
  }
  return group;
}

}  // namespace fathom::comm
