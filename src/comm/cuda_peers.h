// CudaPeers: memory on each GPU of a group that the others write to (kernels/collective), and what
// says that a rank was waited for in vain. Made and freed by one thread while nothing runs; views
// and Check by any.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "kernels/collective/peer_view.h"

namespace fathom::comm {

class CudaPeers {
 public:
  // With so much shared memory. All GPUs reach each other. kDevice: they do not, or kernels are
  // loaded lazily (device/cuda/multi_gpu.h); kOutOfMemory.
  static Result<std::unique_ptr<CudaPeers>> Make(std::span<const int> gpus, int64_t shared_bytes,
                                                 Duration timeout);
  ~CudaPeers();
  CudaPeers(const CudaPeers&) = delete;
  CudaPeers& operator=(const CudaPeers&) = delete;

  const kernels::PeerView& view(int rank) const { return views_[static_cast<size_t>(rank)]; }

  // kPeer names the rank that `rank` waited for in vain.
  Status Check(int rank) const;

 private:
  CudaPeers(std::span<const int> gpus, Duration timeout)
      : gpus_(gpus.begin(), gpus.end()), timeout_(timeout) {}
  Status Allocate(int64_t shared_bytes);
  Status EnableAccess() const;

  const std::vector<int> gpus_;
  const Duration timeout_;
  std::vector<kernels::PeerView> views_;
  uint32_t* timed_out_ = nullptr;  // pinned, one for each rank, kReportStride apart
};

}  // namespace fathom::comm
