#include "comm/cuda_expert_ranks.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "comm/cuda_expert_kinds.h"
#include "comm/cuda_peers.h"
#include "device/cuda/multi_gpu.h"

namespace fathom::comm {

kernels::ExpertExchangeLayout ExpertLayout(size_t num_ranks, const CudaExpertOptions& options) {
  const int size = static_cast<int>(num_ranks), tensor_ranks = options.num_tensor_ranks;
  CHECK_EQ(size % tensor_ranks, 0);
  return kernels::MakeExpertExchangeLayout(size / tensor_ranks, tensor_ranks, options.max_tokens,
                                           options.hidden, options.num_chosen);
}

Status WritePairRows(int gpu, const kernels::ExpertExchangeLayout& layout, std::byte* memory) {
  std::vector<int32_t> rows(static_cast<size_t>(layout.max_slots * layout.num_chosen));
  std::iota(rows.begin(), rows.end(), static_cast<int32_t>(layout.shared_rows()));
  cudaError_t error = cudaSetDevice(gpu);
  if (error == cudaSuccess) {
    error = cudaMemcpy(memory + layout.pair_of_offset, rows.data(), rows.size() * sizeof(int32_t),
                       cudaMemcpyHostToDevice);
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return OkStatus();
  (void)cudaGetLastError();
  return DeviceError(fmt::format("writing to GPU {} failed: {}", gpu, cudaGetErrorString(error)));
}

Result<std::vector<std::shared_ptr<CudaExpertRanks>>> MakeCudaExpertRanks(
    std::span<const int> gpus, const CudaExpertOptions& options) {
  if (options.custom_all_reduce && AllReachAll(gpus)) {
    LogInfo("{}; ranks with whole experts write to each other's memory",
            device::DescribeTopology(gpus, device::ProbePeerLink));
    return MakePeerExpertRanks(gpus, options);
  }
  LogWarning(
      "ranks with whole experts gather all tokens and outputs, which is slow: faster are GPUs "
      "that reach each other's memory, without --disable-custom-all-reduce");
  ASSIGN_OR_RETURN(const CudaGroup all,
                   MakeCudaGroup(gpus, ExpertGroupOptions(gpus.size(), options)));
  return MakeGatheredExpertRanks(all, gpus, options);
}

}  // namespace fathom::comm
