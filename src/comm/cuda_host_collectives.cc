#include <cuda_runtime.h>
#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "comm/cuda_collective_kinds.h"
#include "comm/cuda_staging.h"
#include "comm/group.h"

namespace fathom::comm {
namespace {

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Between two uses of the host memory the stream has ended what the first enqueued.
class HostCollectives final : public CudaCollectives {
 public:
  HostCollectives(std::shared_ptr<Transport> transport, std::shared_ptr<std::byte> shared,
                  std::shared_ptr<std::byte> host, int64_t host_bytes)
      : CudaCollectives(transport->rank(), transport->size(), shared.get()),
        transport_(std::move(transport)),
        group_(*transport_, AllRanks(transport_->size())),
        shared_(std::move(shared)),
        host_(std::move(host)),
        host_bytes_(host_bytes) {}

  bool is_captured() const override { return false; }

  Status Gather(std::span<const kernels::GatheredMatrix> matrices,
                device::Stream& stream) override {
    const auto exchange = [&](const std::vector<Group::Range>& ranges) -> Status {
      RETURN_IF_ERROR(stream.Synchronize());
      return group_.AllGather({host_.get(), static_cast<size_t>(ranges.back().end)}, ranges);
    };
    for (const kernels::GatheredMatrix& matrix : matrices) {
      RETURN_IF_ERROR(
          GatherPacked(matrix, rank(), size(), host_.get(), host_bytes_, stream, exchange));
    }
    return OkStatus();
  }

  Status Check() override { return OkStatus(); }  // an exchange says so itself

 private:
  const std::shared_ptr<Transport> transport_;
  Group group_;
  const std::shared_ptr<std::byte> shared_, host_;
  const int64_t host_bytes_;
};

}  // namespace

Result<std::shared_ptr<CudaCollectives>> MakeHostCollectives(std::shared_ptr<Transport> transport,
                                                             int gpu,
                                                             const CudaGroupOptions& options) {
  const int64_t bytes = StagingBytes(options);
  void* host = nullptr;
  if (cudaHostAlloc(&host, static_cast<size_t>(bytes), cudaHostAllocPortable) != cudaSuccess) {
    (void)cudaGetLastError();
    return OutOfMemory(
        fmt::format("cannot pin {} bytes of host memory for what ranks exchange", bytes));
  }
  const auto free_host = [](std::byte* memory) { cudaFreeHost(memory); };
  std::shared_ptr<std::byte> staging(static_cast<std::byte*>(host), free_host);
  if (cudaSetDevice(gpu) != cudaSuccess) return DeviceError("cudaSetDevice failed");
  auto shared = AllocateOnGpu(options.shared_bytes);
  if (shared == nullptr) return NoRoomOnGpu(gpu, options.shared_bytes);
  return std::shared_ptr<CudaCollectives>(std::make_shared<HostCollectives>(
      std::move(transport), std::move(shared), std::move(staging), bytes));
}

}  // namespace fathom::comm
