#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "comm/cuda_collective_kinds.h"
#include "comm/cuda_staging.h"

namespace fathom::comm {
namespace {

class NcclCollectives final : public CudaCollectives {
 public:
  NcclCollectives(const NcclLibrary& nccl, NcclCommunicator communicator, int rank, int size,
                  std::shared_ptr<float> staging, int64_t staging_values)
      : CudaCollectives(rank, size),
        nccl_(nccl),
        communicator_(communicator),
        staging_(std::move(staging)),
        staging_values_(staging_values) {}
  ~NcclCollectives() override { nccl_.CommAbort(communicator_); }

  bool is_captured() const override { return true; }

  Result<kernels::SublayerOutput> Sum(const kernels::CudaCombineParams& combine,
                                      device::Stream& stream) override {
    if (combine.output.y != combine.y) kernels::Launch(combine, stream);
    RETURN_IF_ERROR(StatusOf(nccl_.AllReduce(
        combine.y, combine.y, static_cast<size_t>(combine.num_tokens * combine.hidden),
        NcclType::kBF16, kNcclSum, communicator_,
        static_cast<cudaStream_t>(stream.native_handle()))));
    return kernels::SublayerOutput{.y = combine.y};
  }

  // All ranks send as many columns as the one that has most.
  Status GatherColumns(float* values, int64_t num_rows, const kernels::GatheredColumns& columns,
                       device::Stream& stream) override {
    const int64_t most = columns.most(size()), stride = columns.begin[size()];
    const int64_t rows_at_once = staging_values_ / ((size() + 1) * most);
    CHECK_GT(rows_at_once, 0);
    for (int64_t row = 0; row < num_rows; row += rows_at_once) {
      const int64_t rows = std::min(rows_at_once, num_rows - row);
      float* const to = values + row * stride;
      float* const sent = staging_.get();
      float* const received = sent + rows * most;
      CopyColumns(sent, most, to + columns.begin[rank()], stride, rows, columns.count(rank()),
                  stream);
      RETURN_IF_ERROR(StatusOf(nccl_.AllGather(sent, received, static_cast<size_t>(rows * most),
                                               NcclType::kF32, communicator_,
                                               static_cast<cudaStream_t>(stream.native_handle()))));
      for (int from = 0; from < size(); ++from) {
        if (from == rank()) continue;
        CopyColumns(to + columns.begin[from], stride, received + from * rows * most, most, rows,
                    columns.count(from), stream);
      }
    }
    return OkStatus();
  }

  Status Check() override {
    int result = kNcclSuccess;
    nccl_.CommGetAsyncError(communicator_, &result);
    return result == kNcclInProgress ? OkStatus() : StatusOf(result);
  }

 private:
  Status StatusOf(int result) const {
    if (result == kNcclSuccess) return OkStatus();
    return PeerError(
        fmt::format("NCCL failed on rank {}: {}", rank(), nccl_.GetErrorString(result)));
  }

  const NcclLibrary nccl_;
  const NcclCommunicator communicator_;
  const std::shared_ptr<float> staging_;
  const int64_t staging_values_;
};

}  // namespace

Result<CudaGroup> MakeNcclGroup(const NcclLibrary& nccl, std::span<const int> gpus,
                                const CudaGroupOptions& options) {
  const int size = static_cast<int>(gpus.size());
  std::vector<NcclCommunicator> communicators(gpus.size());
  if (const int result = nccl.CommInitAll(communicators.data(), size, gpus.data());
      result != kNcclSuccess) {
    return DeviceError(
        fmt::format("NCCL cannot connect {} GPUs: {}", size, nccl.GetErrorString(result)));
  }
  // Of the longest rows, each rank's part rounded up to the largest's, and that part once more.
  const int64_t values = kStagedRows * 2 * (options.max_row_values + 128 * size);
  CudaGroup group;
  Status status;
  for (int rank = 0; rank < size; ++rank) {
    const int gpu = gpus[static_cast<size_t>(rank)];
    void* staging = nullptr;
    if (cudaSetDevice(gpu) != cudaSuccess ||
        cudaMalloc(&staging, static_cast<size_t>(values) * sizeof(float)) != cudaSuccess) {
      (void)cudaGetLastError();
      status = OutOfMemory(
          fmt::format("cannot allocate {} bytes on GPU {} to gather logits", values * 4, gpu));
    }
    const auto free_staging = [gpu](float* memory) {
      cudaSetDevice(gpu);
      cudaFree(memory);
    };
    group.push_back(std::make_shared<NcclCollectives>(
        nccl, communicators[static_cast<size_t>(rank)], rank, size,
        std::shared_ptr<float>(static_cast<float*>(staging), free_staging), values));
  }
  RETURN_IF_ERROR(status);
  return group;
}

}  // namespace fathom::comm
