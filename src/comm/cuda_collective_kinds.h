// The three kinds of CudaCollectives, one object a rank. cuda_group.h makes them, and a rank that
// is alone.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/cuda_collectives.h"
#include "comm/cuda_group.h"
#include "comm/cuda_peers.h"
#include "comm/nccl.h"
#include "comm/transport.h"

namespace fathom::comm {

using CudaGroup = std::vector<std::shared_ptr<CudaCollectives>>;

// Kernels that write to each other's memory. Errors as CudaPeers::Make.
Result<CudaGroup> MakePeerGroup(std::span<const int> gpus, const CudaGroupOptions& options);

// kDevice: NCCL's words.
Result<CudaGroup> MakeNcclGroup(const NcclLibrary& nccl, std::span<const int> gpus,
                                const CudaGroupOptions& options);

// Through pinned host memory and a transport, one a rank. The object keeps the transport. kDevice,
// kOutOfMemory.
Result<std::shared_ptr<CudaCollectives>> MakeHostCollectives(std::shared_ptr<Transport> transport,
                                                             int gpu,
                                                             const CudaGroupOptions& options);
Result<CudaGroup> MakeHostGroup(std::span<const int> gpus, const CudaGroupOptions& options);

// kDevice: more than kernels::kMaxPeers.
Status CheckGroupSize(int size);

// kOutOfMemory.
Status NoRoomOnGpu(int gpu, int64_t bytes);

}  // namespace fathom::comm
