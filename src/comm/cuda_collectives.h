// CudaCollectives: what the ranks of a group do together on their GPUs while the model runs: each
// has a part of something, and all get the whole. One object a rank, used by its thread; every rank
// calls the same with the same sizes in the same order. Work is enqueued, errors are told by Check.
// Three kinds (cuda_group.h says which is taken): kernels that write to each other's memory, NCCL,
// and host memory. All ranks have the bits that one would have.
#pragma once

#include <cstdint>
#include <span>

#include "base/check.h"
#include "base/status.h"
#include "device/device.h"
#include "kernels/collective/gather_cuda.h"

namespace fathom::comm {

class CudaCollectives {
 public:
  virtual ~CudaCollectives() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // CudaGroupOptions' shared_bytes on this rank's GPU, zero at first where ranks write to it.
  std::byte* shared_memory() const { return shared_memory_; }

  // Whether what the others would send is there; made up, it is finite numbers, but no choice of
  // experts.
  virtual bool has_others() const { return true; }

  // Whether an exchange may be captured into a graph; otherwise the host takes part.
  virtual bool is_captured() const = 0;

  // Where a kernel can write to shared memory of all ranks at once: then Gather of nothing makes it
  // known to them. Of none: it cannot.
  virtual kernels::Mirrors mirrors() const { return {}; }

  // For a kernel that itself tells all ranks what it has found, in shared memory, and awaits
  // theirs. Of size 1: it cannot.
  virtual kernels::PeerView peers() const { return {}; }

  // At most kMaxGatheredMatrices in shared memory, at the same places on every rank; none of that
  // memory is in two gathers in a row, what is sent ahead of them included.
  virtual Status Gather(std::span<const kernels::GatheredMatrix> matrices,
                        device::Stream& stream) = 0;

  // What `stream` has made of these by then goes to the others while it does something else; the
  // next Gather, of what else there is, comes behind it. Where it cannot, Gather has to.
  virtual bool can_send_ahead() const { return false; }
  virtual void SendAhead(std::span<const kernels::GatheredMatrix> /*matrices*/,
                         device::Stream& /*stream*/) {
    CHECK(can_send_ahead());
  }

  // The three below say what is to be gathered, not by which exchange. Tiles and y are in shared
  // memory; the logits need not be.
  virtual Status GatherTiles(const kernels::CudaGatherTilesParams& params, device::Stream& stream);
  virtual Status GatherOutput(const kernels::CudaGatherOutputParams& params,
                              device::Stream& stream);
  virtual Status GatherLogits(const kernels::CudaGatherColumnsParams& params,
                              device::Stream& stream);

  // kernels::MaxExchangeTokens of its GPU; 0: no boundary can complete its input itself.
  virtual int64_t max_boundary_tokens() const { return 0; }
  // For a boundary that does so, of what is sent. Of size 1: GatherOutput has to.
  virtual kernels::OutputExchange GatherInBoundary(const kernels::RankParts& /*columns*/,
                                                   kernels::OutputExchange::Sent /*sent*/) {
    return {};
  }

  // For the experts' products of so many tokens as one launch in which ranks write `blocks` of the
  // intermediates, by 128 columns, to each other, and then `outputs` (experts_cuda.h). Of size 1:
  // GatherTiles has to, between two launches.
  virtual kernels::PeerExchange GatherInExperts(int64_t /*num_tokens*/,
                                                const kernels::RankParts& /*blocks*/,
                                                const kernels::RankParts& /*outputs*/) {
    return {};
  }

  // At the end of every step.
  virtual void EndStep(device::Stream& /*stream*/) {}

  // kPeer: a rank was waited for in vain, and what was computed since means nothing. To be asked
  // when a step's work has ended, and before the next one.
  virtual Status Check() = 0;

 protected:
  CudaCollectives(int rank, int size, std::byte* shared_memory)
      : rank_(rank), size_(size), shared_memory_(shared_memory) {}

 private:
  const int rank_, size_;
  std::byte* const shared_memory_;
};

}  // namespace fathom::comm
