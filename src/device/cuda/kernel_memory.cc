#include "device/cuda/kernel_memory.h"

#include <array>
#include <map>
#include <mutex>
#include <utility>

namespace fathom::device {
namespace {

constexpr size_t kAlwaysAllowed = 48 << 10;

// A lock for each GPU of a host, so that ranks do not wait for each other.
struct Limits {
  std::mutex mutex;
  std::map<std::pair<int, const void*>, size_t> bytes;  // guarded
};

}  // namespace

cudaError_t AllowSharedMemory(const void* kernel, size_t bytes) {
  static std::array<Limits, 16> all;
  int gpu = 0;
  if (const cudaError_t error = cudaGetDevice(&gpu); error != cudaSuccess) return error;
  Limits& limits = all[static_cast<size_t>(gpu) % all.size()];
  const std::lock_guard lock(limits.mutex);
  const auto [limit, is_new] = limits.bytes.try_emplace({gpu, kernel}, kAlwaysAllowed);
  if (is_new) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
  }
  if (bytes <= limit->second) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) limit->second = bytes;
  return error;
}

}  // namespace fathom::device
