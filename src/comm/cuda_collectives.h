// CudaCollectives: what the tensor ranks of a group do together on their GPUs while the model runs.
// One object a rank, used by its thread; every rank calls the same with the same sizes in the same
// order. Work is enqueued, errors are told by Check. Three kinds (cuda_group.h says which is
// taken): kernels that write to each other's memory, NCCL, and host memory. Sums are in the order
// of the ranks, in FP32 and rounded once to BF16, as comm::Group's; NCCL's own order and roundings
// beyond two ranks. All ranks have the same bits.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/device.h"
#include "kernels/collective/all_reduce_cuda.h"

namespace fathom::comm {

class CudaCollectives {
 public:
  virtual ~CudaCollectives() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Whether an exchange may be captured into a graph; otherwise the host takes part.
  virtual bool is_captured() const = 0;

  // The sum over all ranks of combine.output. What is returned is read in its place, until the next
  // sum; combine.y [num_tokens, hidden] is memory for it, and may be output.y where that has no
  // pairs.
  virtual Result<kernels::SublayerOutput> Sum(const kernels::CudaCombineParams& combine,
                                              device::Stream& stream) = 0;

  // For a boundary of so many tokens or rows (hyper_connection_cuda.h) that makes the sum itself:
  // its exchange. Of size 1: Sum has to.
  virtual kernels::PeerExchange SumInBoundary(int64_t /*num_tokens*/) { return {}; }

  // Rank r's columns of `values` [num_rows, columns.begin[size]] to all others.
  virtual Status GatherColumns(float* values, int64_t num_rows,
                               const kernels::GatheredColumns& columns, device::Stream& stream) = 0;

  // At the end of every step.
  virtual void EndStep(device::Stream& /*stream*/) {}

  // kPeer: a rank was waited for in vain, and what was computed since means nothing. To be asked
  // when a step's work has ended, and before the next one.
  virtual Status Check() = 0;

 protected:
  CudaCollectives(int rank, int size) : rank_(rank), size_(size) {}

 private:
  const int rank_, size_;
};

}  // namespace fathom::comm
