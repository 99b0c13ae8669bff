#include <cuda_runtime.h>
#include <fmt/format.h>

#include <utility>

#include "comm/cuda_collective_kinds.h"
#include "comm/cuda_staging.h"
#include "comm/nccl_watch.h"

namespace fathom::comm {
namespace {

class NcclCollectives final : public CudaCollectives {
 public:
  NcclCollectives(const NcclLibrary& nccl, std::shared_ptr<NcclWatch> watch, int rank, int size,
                  std::shared_ptr<std::byte> shared, std::shared_ptr<std::byte> staging,
                  int64_t staging_bytes)
      : CudaCollectives(rank, size, shared.get()),
        nccl_(nccl),
        watch_(std::move(watch)),
        shared_(std::move(shared)),
        staging_(std::move(staging)),
        staging_bytes_(staging_bytes) {}

  bool is_captured() const override { return true; }

  Status Gather(std::span<const kernels::GatheredMatrix> matrices,
                device::Stream& stream) override {
    RETURN_IF_ERROR(watch_->Check());
    watch_->Begin(rank(), stream);
    const auto exchange = [&](const std::vector<Group::Range>& ranges) {
      return Broadcast(ranges, static_cast<cudaStream_t>(stream.native_handle()));
    };
    for (const kernels::GatheredMatrix& matrix : matrices) {
      RETURN_IF_ERROR(
          GatherPacked(matrix, rank(), size(), staging_.get(), staging_bytes_, stream, exchange));
    }
    return OkStatus();
  }

  void EndStep(device::Stream& stream) override { watch_->EndStep(rank(), stream); }

  Status Check() override {
    RETURN_IF_ERROR(watch_->Check());
    int result = kNcclSuccess;
    nccl_.CommGetAsyncError(watch_->communicator(rank()), &result);
    return result == kNcclInProgress ? OkStatus() : StatusOf(result);
  }

  // Each rank's range of the staging memory to all others.
  Status Broadcast(const std::vector<Group::Range>& ranges, cudaStream_t stream) const {
    RETURN_IF_ERROR(StatusOf(nccl_.GroupStart()));
    Status status;
    for (size_t root = 0; root < ranges.size() && status.ok(); ++root) {
      const int64_t bytes = ranges[root].end - ranges[root].begin;
      std::byte* const place = staging_.get() + ranges[root].begin;
      if (bytes == 0) continue;
      status =
          StatusOf(nccl_.Broadcast(place, place, static_cast<size_t>(bytes), kNcclBytes,
                                   static_cast<int>(root), watch_->communicator(rank()), stream));
    }
    const int ended = nccl_.GroupEnd();
    return status.ok() ? StatusOf(ended) : status;
  }

 private:
  Status StatusOf(int result) const {
    if (result == kNcclSuccess) return OkStatus();
    return PeerError(
        fmt::format("NCCL failed on rank {}: {}", rank(), nccl_.GetErrorString(result)));
  }

  const NcclLibrary nccl_;
  const std::shared_ptr<NcclWatch> watch_;
  const std::shared_ptr<std::byte> shared_, staging_;
  const int64_t staging_bytes_;
};

// NCCL connects ranks when they first exchange something, which must not be while a graph is
// captured.
Status ConnectRanks(const NcclLibrary& nccl, std::span<const int> gpus,
                    std::span<const std::shared_ptr<NcclCollectives>> ranks) {
  std::vector<Group::Range> ranges;
  for (int64_t r = 0; r < static_cast<int64_t>(gpus.size()); ++r) {
    ranges.push_back({r << 20, (r + 1) << 20});
  }
  nccl.GroupStart();
  Status status;
  for (size_t r = 0; r < gpus.size() && status.ok(); ++r) {
    cudaSetDevice(gpus[r]);
    status = ranks[r]->Broadcast(ranges, nullptr);
  }
  const int ended = nccl.GroupEnd();
  RETURN_IF_ERROR(status);
  for (const int gpu : gpus) {
    if (ended == kNcclSuccess && cudaSetDevice(gpu) == cudaSuccess &&
        cudaDeviceSynchronize() == cudaSuccess) {
      continue;
    }
    return DeviceError(fmt::format("NCCL's first exchange failed: {}", nccl.GetErrorString(ended)));
  }
  return OkStatus();
}

}  // namespace

Result<CudaGroup> MakeNcclGroup(const NcclLibrary& nccl, std::span<const int> gpus,
                                const CudaGroupOptions& options) {
  const int size = static_cast<int>(gpus.size());
  ASSIGN_OR_RETURN(const auto watch, NcclWatch::Make(nccl, gpus, options.timeout));
  const int64_t staging_bytes = StagingBytes(options);
  std::vector<std::shared_ptr<NcclCollectives>> ranks;
  Status status;
  for (int rank = 0; rank < size; ++rank) {
    const int gpu = gpus[static_cast<size_t>(rank)];
    if (cudaSetDevice(gpu) != cudaSuccess) status = DeviceError("cudaSetDevice failed");
    auto shared = AllocateOnGpu(options.shared_bytes), staging = AllocateOnGpu(staging_bytes);
    if (shared == nullptr || staging == nullptr) {
      status = NoRoomOnGpu(gpu, options.shared_bytes + staging_bytes);
    }
    ranks.push_back(std::make_shared<NcclCollectives>(nccl, watch, rank, size, std::move(shared),
                                                      std::move(staging), staging_bytes));
  }
  RETURN_IF_ERROR(status);
  RETURN_IF_ERROR(ConnectRanks(nccl, gpus, ranks));
  return CudaGroup(ranks.begin(), ranks.end());
}

}  // namespace fathom::comm
