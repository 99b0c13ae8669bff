#include <cuda_runtime.h>

#include <utility>

#include "comm/cuda_collective_kinds.h"
#include "comm/cuda_staging.h"

namespace fathom::comm {
namespace {

// Small finite numbers, whatever they are read as: 1 in FP8, 4e-5 in BF16 and FP32.
constexpr int kMadeUpByte = 0x38;

class LoneRank final : public CudaCollectives {
 public:
  LoneRank(int rank, int size, std::shared_ptr<std::byte> shared)
      : CudaCollectives(rank, size, shared.get()), shared_(std::move(shared)) {}

  bool has_others() const override { return false; }
  bool is_captured() const override { return true; }
  Status Gather(std::span<const kernels::GatheredMatrix>, device::Stream&) override {
    return OkStatus();
  }
  Status Check() override { return OkStatus(); }

 private:
  const std::shared_ptr<std::byte> shared_;
};

}  // namespace

Result<std::shared_ptr<CudaCollectives>> MakeLoneRank(int rank, int size, int gpu,
                                                      const CudaGroupOptions& options) {
  RETURN_IF_ERROR(CheckGroupSize(size));
  if (cudaSetDevice(gpu) != cudaSuccess) return DeviceError("cudaSetDevice failed");
  auto shared = AllocateOnGpu(options.shared_bytes);
  if (shared == nullptr) return NoRoomOnGpu(gpu, options.shared_bytes);
  if (cudaMemset(shared.get(), kMadeUpByte, static_cast<size_t>(options.shared_bytes)) !=
          cudaSuccess ||
      cudaDeviceSynchronize() != cudaSuccess) {
    return DeviceError("cudaMemset failed");
  }
  return std::shared_ptr<CudaCollectives>(
      std::make_shared<LoneRank>(rank, size, std::move(shared)));
}

}  // namespace fathom::comm
