// What the ranks of this process do together on GPUs: the collectives of tensor ranks
// (cuda_collectives.h), and how ranks share whole experts (cuda_expert_ranks.h); one object for
// each GPU. Made once, by one thread, before any work is enqueued. Needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "comm/transport.h"

namespace fathom::comm {

class CudaCollectives;
class CudaExpertRanks;

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

// One of `size` ranks without the others, for benchmarks: it runs the kernels of one that has them,
// waits for nobody, and reads made-up values, or what it sent itself, where others would have
// written. kDevice, kOutOfMemory.
Result<std::shared_ptr<CudaCollectives>> MakeLoneRank(int rank, int size, int gpu,
                                                      const CudaGroupOptions& options);

struct CudaExpertOptions {
  int64_t hidden = 0;
  int num_experts = 0;
  int num_chosen = 0;        // experts of a token
  int64_t max_tokens = 0;    // of a data rank in a step
  int num_tensor_ranks = 1;  // of each data rank
  bool custom_all_reduce = true;
  Duration timeout = std::chrono::seconds(5);
};

// In the order of `gpus`: the ranks of a stage, tensor rank fastest, that have some of the experts
// each, given out evenly (checkpoint/shard.h). What carries their exchanges is chosen as for
// MakeCudaGroup, and logged. kDevice, kOutOfMemory.
Result<std::vector<std::shared_ptr<CudaExpertRanks>>> MakeCudaExpertRanks(
    std::span<const int> gpus, const CudaExpertOptions& options);

// The same over peer memory for the only rank of this process; all `members`, ranks of the
// transport and processes of one host, call it. kPeer, too: as Transport.
Result<std::shared_ptr<CudaCollectives>> JoinCudaGroup(Transport& transport,
                                                       std::span<const int> members, int gpu,
                                                       const CudaGroupOptions& options);
Result<std::shared_ptr<CudaExpertRanks>> JoinCudaExpertRanks(Transport& transport,
                                                             std::span<const int> members, int gpu,
                                                             const CudaExpertOptions& options);

}  // namespace fathom::comm
