// CudaExpertRanks: what the ranks of a stage exchange so that each runs its own experts on the
// tokens of all (kernels/collective/expert_exchange_cuda.h): memory on each GPU that the others
// write to, and the numbers of the exchanges. One object a rank, used by its thread; every rank
// runs the same exchanges with the same sizes in the same order. cuda_group.h makes them.
#pragma once

#include <memory>

#include "base/status.h"
#include "comm/cuda_peers.h"
#include "device/device.h"
#include "kernels/collective/expert_exchange_cuda.h"

namespace fathom::comm {

class CudaExpertRanks {
 public:
  CudaExpertRanks(std::shared_ptr<const CudaPeers> peers, int rank,
                  const kernels::ExpertExchangeLayout& layout);

  int rank() const { return view_.rank; }
  int size() const { return view_.size; }
  int num_data_ranks() const { return layout_.data_ranks; }

  // The next exchange of the step, with so many places (kernels::ExpertSlots) for the tokens of
  // each data rank.
  kernels::ExpertExchange Next(int64_t slots) {
    return {{view_, num_exchanges_++}, layout_, slots};
  }
  // Of this rank's layout.
  std::byte* memory() const { return view_.memory[view_.rank] + view_.layout.shared_offset; }
  // Where the outputs of this rank's tokens are after an exchange of them.
  __nv_bfloat16* outputs() const {
    return reinterpret_cast<__nv_bfloat16*>(memory() + layout_.outputs_offset);
  }
  const int32_t* pair_of() const {
    return reinterpret_cast<const int32_t*>(memory() + layout_.pair_of_offset);
  }

  void EndStep(device::Stream& stream);
  // As CudaCollectives.
  Status Check() const { return peers_->Check(rank()); }

 private:
  const std::shared_ptr<const CudaPeers> peers_;
  const kernels::PeerView& view_;
  const kernels::ExpertExchangeLayout layout_;
  uint32_t num_exchanges_ = 0;  // of the step that is being enqueued
};

}  // namespace fathom::comm
