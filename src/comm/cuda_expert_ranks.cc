#include "comm/cuda_expert_ranks.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "comm/cuda_group.h"
#include "device/cuda/multi_gpu.h"
#include "kernels/collective/gather_cuda.h"

namespace fathom::comm {
namespace {

kernels::ExpertExchangeLayout LayoutOf(size_t num_ranks, const CudaExpertOptions& options) {
  const int size = static_cast<int>(num_ranks), tensor_ranks = options.num_tensor_ranks;
  CHECK_EQ(size % tensor_ranks, 0);
  return kernels::MakeExpertExchangeLayout(size / tensor_ranks, tensor_ranks, options.max_tokens,
                                           options.hidden, options.num_chosen);
}

// The rows of pairs never change.
Status WriteRows(int gpu, std::byte* memory, const kernels::ExpertExchangeLayout& layout) {
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

}  // namespace

CudaExpertRanks::CudaExpertRanks(std::shared_ptr<const CudaPeers> peers, int rank,
                                 const kernels::ExpertExchangeLayout& layout)
    : peers_(std::move(peers)), view_(peers_->view(rank)), layout_(layout) {}

void CudaExpertRanks::EndStep(device::Stream& stream) {
  kernels::Launch(kernels::CudaEndExchangesParams{view_, std::exchange(num_exchanges_, 0u)},
                  stream);
}

Result<std::vector<std::shared_ptr<CudaExpertRanks>>> MakeCudaExpertRanks(
    std::span<const int> gpus, const CudaExpertOptions& options) {
  const std::string topology = device::DescribeTopology(gpus, device::ProbePeerLink);
  if (!AllReachAll(gpus)) {
    return DeviceError(topology +
                       ": ranks with whole experts need to reach each other's memory; tensor "
                       "ranks without them and stages do not");
  }
  const auto layout = LayoutOf(gpus.size(), options);
  ASSIGN_OR_RETURN(auto made, CudaPeers::Make(gpus, layout.bytes, options.timeout));
  LogInfo("{}; ranks with whole experts write to each other's memory", topology);
  const std::shared_ptr<const CudaPeers> peers = std::move(made);
  std::vector<std::shared_ptr<CudaExpertRanks>> ranks;
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    ranks.push_back(std::make_shared<CudaExpertRanks>(peers, static_cast<int>(rank), layout));
    RETURN_IF_ERROR(WriteRows(gpus[rank], ranks.back()->memory(), layout));
  }
  return ranks;
}

Result<std::shared_ptr<CudaExpertRanks>> JoinCudaExpertRanks(Transport& transport,
                                                             std::span<const int> members, int gpu,
                                                             const CudaExpertOptions& options) {
  const auto layout = LayoutOf(members.size(), options);
  ASSIGN_OR_RETURN(auto peers,
                   CudaPeers::Join(transport, members, gpu, layout.bytes, options.timeout));
  const auto rank = std::find(members.begin(), members.end(), transport.rank()) - members.begin();
  auto joined = std::make_shared<CudaExpertRanks>(std::move(peers), static_cast<int>(rank), layout);
  RETURN_IF_ERROR(WriteRows(gpu, joined->memory(), layout));
  return joined;
}

}  // namespace fathom::comm
