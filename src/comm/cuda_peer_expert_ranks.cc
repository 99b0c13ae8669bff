#include <utility>

#include "comm/cuda_expert_kinds.h"
#include "comm/cuda_peers.h"
#include "kernels/collective/gather_cuda.h"

namespace fathom::comm {
namespace {

std::byte* SharedMemory(const CudaPeers& peers, int rank) {
  return peers.view(rank).memory[rank] + peers.view(rank).layout.shared_offset;
}

class PeerExpertRanks final : public CudaExpertRanks {
 public:
  PeerExpertRanks(std::shared_ptr<const CudaPeers> peers, int rank,
                  const kernels::ExpertExchangeLayout& layout)
      : CudaExpertRanks(rank, layout, SharedMemory(*peers, rank)),
        peers_(std::move(peers)),
        view_(peers_->view(rank)) {}

  bool is_captured() const override { return true; }

  void Send(kernels::CudaSendTokensParams params, int64_t slots, device::Stream& stream) override {
    params.to = Next(slots);
    kernels::Launch(params, stream);
  }
  // Of the exchange that Send began.
  void Take(kernels::CudaTakeTokensParams params, int64_t slots, device::Stream& stream) override {
    params.from = {{view_, num_exchanges_ - 1}, layout(), slots};
    kernels::Launch(params, stream);
  }
  void Return(kernels::CudaReturnOutputsParams params, int64_t slots,
              device::Stream& stream) override {
    params.to = Next(slots);
    kernels::Launch(params, stream);
  }

  void EndStep(device::Stream& stream) override {
    kernels::Launch(kernels::CudaEndExchangesParams{view_, std::exchange(num_exchanges_, 0u)},
                    stream);
  }
  Status Check() const override { return peers_->Check(rank()); }

 private:
  kernels::ExpertExchange Next(int64_t slots) {
    return {{view_, num_exchanges_++}, layout(), slots};
  }

  const std::shared_ptr<const CudaPeers> peers_;
  const kernels::PeerView& view_;
  uint32_t num_exchanges_ = 0;  // of the step that is being enqueued
};

}  // namespace

Result<CudaExpertGroup> MakePeerExpertRanks(std::span<const int> gpus,
                                            const CudaExpertOptions& options) {
  const auto layout = ExpertLayout(gpus.size(), options);
  ASSIGN_OR_RETURN(auto made, CudaPeers::Make(gpus, layout.bytes, options.timeout));
  const std::shared_ptr<const CudaPeers> peers = std::move(made);
  CudaExpertGroup ranks;
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    const int r = static_cast<int>(rank);
    RETURN_IF_ERROR(WritePairRows(gpus[rank], layout, SharedMemory(*peers, r)));
    ranks.push_back(std::make_shared<PeerExpertRanks>(peers, r, layout));
  }
  return ranks;
}

Result<std::shared_ptr<CudaExpertRanks>> JoinCudaExpertRanks(Transport& transport,
                                                             std::span<const int> members, int gpu,
                                                             const CudaExpertOptions& options) {
  if (!options.custom_all_reduce) {
    return InvalidArgument(
        "--disable-custom-all-reduce needs ranks with whole experts of one process on GPUs: leave "
        "it out, or --nnodes");
  }
  const auto layout = ExpertLayout(members.size(), options);
  ASSIGN_OR_RETURN(auto peers,
                   CudaPeers::Join(transport, members, gpu, layout.bytes, options.timeout));
  const int rank = peers->only_rank();
  RETURN_IF_ERROR(WritePairRows(gpu, layout, SharedMemory(*peers, rank)));
  return std::shared_ptr<CudaExpertRanks>(
      std::make_shared<PeerExpertRanks>(std::move(peers), rank, layout));
}

}  // namespace fathom::comm
