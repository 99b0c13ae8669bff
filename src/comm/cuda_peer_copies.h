// PeerCopies: a rank's part of matrices to the others of its group by the GPU's copy engines,
// beside what its multiprocessors do. Made with its device current, used by its thread; the
// view outlives it.
#pragma once

#include <cuda_runtime.h>

#include <span>
#include <vector>

#include "device/device.h"
#include "kernels/collective/gather_cuda.h"

namespace fathom::comm {

class PeerCopies {
 public:
  explicit PeerCopies(const kernels::PeerView& view);
  ~PeerCopies();
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  // Of matrices in shared memory, as `stream` has made them by then.
  void Begin(std::span<const kernels::GatheredMatrix> matrices, device::Stream& stream);
  // What `stream` is given from here on comes behind all that was begun.
  void End(device::Stream& stream);

 private:
  struct Way {
    int to = 0;
    cudaStream_t stream = nullptr;
    cudaEvent_t arrived = nullptr;
  };
  void Copy(const kernels::GatheredMatrix& matrix, const Way& way) const;

  const kernels::PeerView& view_;
  cudaEvent_t made_ = nullptr;
  std::vector<Way> ways_;
  bool has_begun_ = false;
};

}  // namespace fathom::comm
