#include "model/no_gpu.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

namespace fathom::model {
namespace {

constexpr int kGpus = 8, kMultiprocessors = 132;

struct Runtime {
  std::map<std::byte*, size_t> memory;  // of the GPUs
  std::map<const void*, const char*> names;
  std::function<void(const Launched&)> told;
  int gpu = 0;
  int major = 9, minor = 0;

  bool IsOnGpu(const void* at) const {
    auto after = memory.upper_bound(static_cast<std::byte*>(const_cast<void*>(at)));
    if (after == memory.begin()) return false;
    --after;
    return at < after->first + after->second;
  }
};
Runtime& Get() {
  static Runtime runtime;
  return runtime;
}

cudaError_t Tell(const void* kernel, dim3 grid, dim3 block, unsigned cluster, size_t bytes) {
  if (Get().told) Get().told({Get().names[kernel], grid, block, cluster, bytes});
  return cudaSuccess;
}

int EagerLoading(int* mode) {
  *mode = 1;
  return 0;
}

}  // namespace

void OnLaunch(std::function<void(const Launched&)> told) { Get().told = std::move(told); }
void SetComputeCapability(int major, int minor) { Get().major = major, Get().minor = minor; }

// The linker's --wrap sends the runtime's callers here. NOLINTBEGIN(bugprone-reserved-identifier)
#define RUNTIME(name, ...) extern "C" cudaError_t __wrap_##name(__VA_ARGS__)
#define DOES_NOTHING(name, ...) \
  RUNTIME(name, __VA_ARGS__) { return cudaSuccess; }

RUNTIME(cudaDriverGetVersion, int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
RUNTIME(cudaGetDeviceCount, int* count) {
  *count = kGpus;
  return cudaSuccess;
}
RUNTIME(cudaGetDevice, int* gpu) {
  *gpu = Get().gpu;
  return cudaSuccess;
}
RUNTIME(cudaSetDevice, int gpu) {
  Get().gpu = gpu;
  return cudaSuccess;
}
RUNTIME(cudaGetDeviceProperties, cudaDeviceProp* properties, int) {
  *properties = {};
  properties->major = Get().major, properties->minor = Get().minor;
  return cudaSuccess;
}
RUNTIME(cudaDeviceGetAttribute, int* value, cudaDeviceAttr, int) {
  *value = kMultiprocessors;
  return cudaSuccess;
}
RUNTIME(cudaDeviceCanAccessPeer, int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
RUNTIME(cudaDeviceGetP2PAttribute, int* value, cudaDeviceP2PAttr, int, int) {
  *value = 1;
  return cudaSuccess;
}
RUNTIME(cudaGetDriverEntryPointByVersion, const char*, void** entry, unsigned, unsigned long long,
        cudaDriverEntryPointQueryResult* result) {
  *entry = reinterpret_cast<void*>(EagerLoading);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

RUNTIME(cudaMalloc, void** data, size_t bytes) {
  *data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*data == MAP_FAILED) return cudaErrorMemoryAllocation;
  Get().memory[static_cast<std::byte*>(*data)] = bytes;
  return cudaSuccess;
}
RUNTIME(cudaFree, void* data) {
  const auto place = Get().memory.find(static_cast<std::byte*>(data));
  if (place == Get().memory.end()) return cudaSuccess;
  munmap(data, place->second);
  Get().memory.erase(place);
  return cudaSuccess;
}
RUNTIME(cudaMemGetInfo, size_t* free, size_t* total) {
  *free = *total = size_t{1} << 40;
  return cudaSuccess;
}
RUNTIME(cudaHostAlloc, void** data, size_t bytes, unsigned) {
  *data = std::malloc(bytes);
  return cudaSuccess;
}
RUNTIME(cudaMallocHost, void** data, size_t bytes) {
  *data = std::malloc(bytes);
  return cudaSuccess;
}
RUNTIME(cudaFreeHost, void* data) {
  std::free(data);
  return cudaSuccess;
}
// What comes from a GPU is zero.
RUNTIME(cudaMemcpyAsync, void* to, const void*, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (!Get().IsOnGpu(to)) std::memset(to, 0, bytes);
  return cudaSuccess;
}
DOES_NOTHING(cudaMemcpy, void*, const void*, size_t, cudaMemcpyKind)
DOES_NOTHING(cudaMemset, void*, int, size_t)
DOES_NOTHING(cudaMemsetAsync, void*, int, size_t, cudaStream_t)
DOES_NOTHING(cudaDeviceEnablePeerAccess, int, unsigned)
DOES_NOTHING(cudaDeviceSynchronize)
DOES_NOTHING(cudaStreamCreateWithFlags, cudaStream_t*, unsigned)
DOES_NOTHING(cudaStreamDestroy, cudaStream_t)
DOES_NOTHING(cudaStreamSynchronize, cudaStream_t)
DOES_NOTHING(cudaStreamQuery, cudaStream_t)
DOES_NOTHING(cudaEventCreateWithFlags, cudaEvent_t*, unsigned)
DOES_NOTHING(cudaEventDestroy, cudaEvent_t)
DOES_NOTHING(cudaEventRecord, cudaEvent_t, cudaStream_t)
DOES_NOTHING(cudaEventSynchronize, cudaEvent_t)
DOES_NOTHING(cudaGetLastError)
DOES_NOTHING(cudaFuncSetAttribute, const void*, cudaFuncAttribute, int)

RUNTIME(cudaOccupancyMaxActiveClusters, int* count, const void*, const cudaLaunchConfig_t* config) {
  *count = kMultiprocessors / static_cast<int>(config->attrs[0].val.clusterDim.x);
  return cudaSuccess;
}
RUNTIME(cudaLaunchKernelExC, const cudaLaunchConfig_t* config, const void* kernel, void**) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
    cluster = config->attrs[i].val.clusterDim.x;
  }
  return Tell(kernel, config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes);
}
RUNTIME(__cudaLaunchKernel, const void* kernel, dim3 grid, dim3 block, void**, size_t bytes,
        cudaStream_t) {
  return Tell(kernel, grid, block, 1, bytes);
}
extern "C" void __wrap___cudaRegisterFunction(void**, const char* kernel, char*, const char* name,
                                              int, uint3*, uint3*, dim3*, dim3*, int*) {
  Get().names[kernel] = name;
}
// NOLINTEND(bugprone-reserved-identifier)

}  // namespace fathom::model
