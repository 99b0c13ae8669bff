// The collectives of ranks of this process (cuda_collectives.h), one for each GPU. Made once, by
// one thread, before any work is enqueued. Needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace fathom::comm {

class CudaCollectives;

struct CudaGroupOptions {
  int64_t hidden = 0;         // values of a token
  int64_t shared_bytes = 0;   // of each rank's shared memory
  int64_t max_row_bytes = 0;  // of a gathered matrix's row, all ranks' parts together
  bool custom_all_reduce = true;
  Duration timeout = std::chrono::seconds(5);  // that a rank waits for another
};

// In the order of `gpus`, at most kernels::kMaxPeers different ones. Kernels over peer memory where
// every GPU reaches every other's, unless custom_all_reduce is off; else NCCL where libnccl.so.2 is
// found; else host memory. The log says which and, where it is not the first, why. kDevice,
// kOutOfMemory.
Result<std::vector<std::shared_ptr<CudaCollectives>>> MakeCudaGroup(
    std::span<const int> gpus, const CudaGroupOptions& options);

}  // namespace fathom::comm
