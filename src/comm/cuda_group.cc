#include "comm/cuda_group.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "base/log.h"
#include "comm/cuda_collective_kinds.h"
#include "comm/cuda_peers.h"
#include "comm/memory_transport.h"
#include "device/cuda/multi_gpu.h"

namespace fathom::comm {

Status CheckGroupSize(int size) {
  if (size <= kernels::kMaxPeers) return OkStatus();
  return DeviceError(
      fmt::format("{} GPUs are to be tensor ranks: at most {} can", size, kernels::kMaxPeers));
}

Status NoRoomOnGpu(int gpu, int64_t bytes) {
  return OutOfMemory(
      fmt::format("cannot allocate {} bytes on GPU {} for what ranks exchange (less with a smaller "
                  "--max-num-batched-tokens)",
                  bytes, gpu));
}

Result<CudaGroup> MakeHostGroup(std::span<const int> gpus, const CudaGroupOptions& options) {
  CudaGroup group;
  for (auto& transport : MakeMemoryTransports(static_cast<int>(gpus.size()), options.timeout)) {
    const int gpu = gpus[group.size()];
    ASSIGN_OR_RETURN(auto collectives, MakeHostCollectives(std::move(transport), gpu, options));
    group.push_back(std::move(collectives));
  }
  return group;
}

Result<std::vector<std::shared_ptr<CudaCollectives>>> MakeCudaGroup(
    std::span<const int> gpus, const CudaGroupOptions& options) {
  RETURN_IF_ERROR(CheckGroupSize(static_cast<int>(gpus.size())));
  const std::string topology = device::DescribeTopology(gpus, device::ProbePeerLink);
  const bool reachable = AllReachAll(gpus);
  if (options.custom_all_reduce && reachable) {
    LogInfo("{}; ranks write to each other's memory", topology);
    return MakePeerGroup(gpus, options);
  }
  const std::string reason = !options.custom_all_reduce ? "the custom all-reduce is off"
                                                        : "not all reach each other's memory";
  const auto nccl = LoadNccl();
  if (nccl.ok()) {
    int version = 0;
    nccl->GetVersion(&version);
    LogInfo("{}; {}: NCCL {}.{}.{} is used", topology, reason, version / 10000, version / 100 % 100,
            version % 100);
    return MakeNcclGroup(*nccl, gpus, options);
  }
  LogWarning("{}; {}, and {}: ranks exchange through host memory, which is slow", topology, reason,
             nccl.status().message());
  return MakeHostGroup(gpus, options);
}

}  // namespace fathom::comm
