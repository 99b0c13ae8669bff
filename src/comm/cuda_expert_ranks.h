// CudaExpertRanks: what the ranks of a stage exchange so that each runs its own experts on the
// tokens of all (kernels/collective/expert_exchange_cuda.h). One object a rank, used by its thread;
// every rank runs the same exchanges with the same sizes in the same order. Two kinds
// (cuda_group.h says which is taken): memory on each GPU that the others write to; and gathers by
// NCCL or over host memory (cuda_collectives.h), in which every rank gets the tokens, and then the
// outputs, of all. That is slow: of N ranks, N times the outputs pass.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/device.h"
#include "kernels/collective/expert_exchange_cuda.h"

namespace fathom::comm {

class CudaExpertRanks {
 public:
  virtual ~CudaExpertRanks() = default;

  int rank() const { return rank_; }
  int size() const { return layout_.data_ranks * layout_.tensor_ranks; }
  int num_data_ranks() const { return layout_.data_ranks; }

  // Whether a layer may be captured into a graph; otherwise the host takes part.
  virtual bool is_captured() const = 0;

  // A layer's three launches, in this order, with so many places (kernels::ExpertSlots) for the
  // tokens of each data rank. The params' exchanges are filled in. Errors are told by Check.
  virtual void Send(kernels::CudaSendTokensParams params, int64_t slots,
                    device::Stream& stream) = 0;
  virtual void Take(kernels::CudaTakeTokensParams params, int64_t slots,
                    device::Stream& stream) = 0;
  virtual void Return(kernels::CudaReturnOutputsParams params, int64_t slots,
                      device::Stream& stream) = 0;

  // Where the outputs of this rank's tokens are then.
  __nv_bfloat16* outputs() const { return At<__nv_bfloat16>(layout_.outputs_offset); }
  const int32_t* pair_of() const { return At<int32_t>(layout_.pair_of_offset); }

  // At the end of every step.
  virtual void EndStep(device::Stream& /*stream*/) {}
  // As CudaCollectives.
  virtual Status Check() const = 0;

 protected:
  // `memory`: the layout's, on this rank's GPU.
  CudaExpertRanks(int rank, const kernels::ExpertExchangeLayout& layout, std::byte* memory)
      : rank_(rank), layout_(layout), memory_(memory) {}

  const kernels::ExpertExchangeLayout& layout() const { return layout_; }
  template <typename U>
  U* At(int64_t offset) const {
    return reinterpret_cast<U*>(memory_ + offset);
  }

 private:
  const int rank_;
  const kernels::ExpertExchangeLayout layout_;
  std::byte* const memory_;
};

}  // namespace fathom::comm
