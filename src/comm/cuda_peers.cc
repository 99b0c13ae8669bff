#include "comm/cuda_peers.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <chrono>

#include "comm/cuda_collective_kinds.h"
#include "device/cuda/multi_gpu.h"

namespace fathom::comm {
namespace {

constexpr size_t kReportStride = 32;     // of 4 bytes: a cache line or two apart
constexpr int64_t kCounterBytes = 1024;  // behind a rank's memory: its own counters
constexpr uint64_t kFirstExchange = 1;   // 0 is what memory holds that nobody wrote

Status CudaError(const char* what, int gpu, cudaError_t error) {
  (void)cudaGetLastError();
  return DeviceError(fmt::format("{} on GPU {} failed: {}", what, gpu, cudaGetErrorString(error)));
}

#define RETURN_IF_CUDA_ERROR(what, gpu, expr)                       \
  do {                                                              \
    if (const cudaError_t error_ = (expr); error_ != cudaSuccess) { \
      return CudaError(what, gpu, error_);                          \
    }                                                               \
  } while (false)

}  // namespace

Result<std::unique_ptr<CudaPeers>> CudaPeers::Make(std::span<const int> gpus, int64_t shared_bytes,
                                                   Duration timeout) {
  if (gpus.size() > kernels::kMaxPeers) {
    return DeviceError(fmt::format("{} GPUs are to write to each other's memory: at most {} can",
                                   gpus.size(), kernels::kMaxPeers));
  }
  if (!device::KernelsAreLoadedEagerly()) {
    return DeviceError(
        "CUDA loads kernels when they are first used, which several ranks of a process cannot "
        "have: set CUDA_MODULE_LOADING=EAGER");
  }
  std::unique_ptr<CudaPeers> peers(new CudaPeers(gpus, timeout));
  RETURN_IF_ERROR(peers->EnableAccess());
  RETURN_IF_ERROR(peers->Allocate(shared_bytes));
  return peers;
}

Status CudaPeers::EnableAccess() const {
  for (const int from : gpus_) {
    RETURN_IF_CUDA_ERROR("cudaSetDevice", from, cudaSetDevice(from));
    for (const int to : gpus_) {
      if (from == to) continue;
      const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
      } else if (error != cudaSuccess) {
        return CudaError(fmt::format("reaching the memory of GPU {}", to).c_str(), from, error);
      }
    }
  }
  return OkStatus();
}

Status CudaPeers::Allocate(int64_t shared_bytes) {
  const int size = static_cast<int>(gpus_.size());
  const auto layout = kernels::MakePeerLayout(size, shared_bytes);
  const size_t bytes = static_cast<size_t>(layout.bytes + kCounterBytes);
  const size_t report_bytes = static_cast<size_t>(size) * kReportStride * sizeof(uint32_t);
  void* reports = nullptr;
  RETURN_IF_CUDA_ERROR("pinning host memory", gpus_.front(),
                       cudaHostAlloc(&reports, report_bytes, cudaHostAllocPortable));
  timed_out_ = static_cast<uint32_t*>(reports);
  std::fill_n(timed_out_, static_cast<size_t>(size) * kReportStride, 0u);
  const auto timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(timeout_);
  for (int rank = 0; rank < size; ++rank) {
    const int gpu = gpus_[static_cast<size_t>(rank)];
    RETURN_IF_CUDA_ERROR("cudaSetDevice", gpu, cudaSetDevice(gpu));
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
      (void)cudaGetLastError();
      return NoRoomOnGpu(gpu, static_cast<int64_t>(bytes));
    }
    auto* const base = static_cast<std::byte*>(memory);
    auto* const counters = reinterpret_cast<uint64_t*>(base + layout.bytes);
    views_.push_back({.rank = rank,
                      .size = size,
                      .layout = layout,
                      .exchanges = counters,
                      .failed = reinterpret_cast<uint32_t*>(counters + 16),
                      .timed_out = timed_out_ + static_cast<size_t>(rank) * kReportStride,
                      .timeout_ns = static_cast<uint64_t>(timeout.count())});
    views_.back().memory[rank] = base;
    RETURN_IF_CUDA_ERROR("cudaMemset", gpu, cudaMemset(memory, 0, bytes));
    RETURN_IF_CUDA_ERROR("cudaMemcpy", gpu,
                         cudaMemcpy(counters, &kFirstExchange, 8, cudaMemcpyHostToDevice));
    RETURN_IF_CUDA_ERROR("cudaDeviceSynchronize", gpu, cudaDeviceSynchronize());
  }
  for (kernels::PeerView& view : views_) {
    for (int rank = 0; rank < size; ++rank) {
      view.memory[rank] = views_[static_cast<size_t>(rank)].memory[rank];
    }
  }
  return OkStatus();
}

CudaPeers::~CudaPeers() {
  for (const kernels::PeerView& view : views_) {
    cudaSetDevice(gpus_[static_cast<size_t>(view.rank)]);
    cudaFree(view.memory[view.rank]);
  }
  cudaFreeHost(timed_out_);
}

Status CudaPeers::Check(int rank) const {
  const uint32_t missing = *view(rank).timed_out;
  if (missing == 0) return OkStatus();
  return PeerError(fmt::format("rank {} waited {:.3g} s for rank {} (GPU {}): it hangs, or is gone",
                               rank, Seconds(timeout_), missing - 1, gpus_[missing - 1]));
}

}  // namespace fathom::comm
