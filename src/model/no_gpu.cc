#include "model/no_gpu.h"

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
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
  std::mutex mutex;
  std::vector<std::string> resource_calls;  // guarded by mutex

  // What the GPUs have from here on, of one allocation; 0: it is not theirs.
  size_t BytesOnGpu(const void* from) const {
    auto* const at = static_cast<std::byte*>(const_cast<void*>(from));
    auto after = memory.upper_bound(at);
    if (after == memory.begin()) return 0;
    --after;
    std::byte* const end = after->first + after->second;
    return at < end ? static_cast<size_t>(end - at) : 0;
  }
  bool IsOnGpu(const void* at) const { return BytesOnGpu(at) > 0; }
};
Runtime& Get() {
  static Runtime runtime;
  return runtime;
}

cudaError_t Tell(const void* kernel, dim3 grid, dim3 block, unsigned cluster, size_t bytes) {
  const auto size = [](dim3 d) { return Launched::Size{d.x, d.y, d.z}; };
  if (Get().told) Get().told({Get().names[kernel], size(grid), size(block), cluster, bytes});
  return cudaSuccess;
}

void TellResource(const char* call) {
  const std::lock_guard lock(Get().mutex);
  Get().resource_calls.emplace_back(call);
}

// Of a copy's `bytes`, from the first to the last, on each side.
void CheckCopy(const void* to, size_t to_bytes, const void* from, size_t from_bytes) {
  const auto is_beyond = [](const void* place, size_t bytes) {
    return Get().IsOnGpu(place) && Get().BytesOnGpu(place) < bytes;
  };
  if (is_beyond(to, to_bytes) || is_beyond(from, from_bytes)) {
    TellResource("a copy beyond its memory");
  }
}

int EagerLoading(int* mode) {
  *mode = 1;
  return 0;
}

}  // namespace

void OnLaunch(std::function<void(const Launched&)> told) { Get().told = std::move(told); }
std::vector<std::string> TakeResourceCalls() {
  const std::lock_guard lock(Get().mutex);
  return std::exchange(Get().resource_calls, {});
}
void SetComputeCapability(int major, int minor) { Get().major = major, Get().minor = minor; }

// The linker's --wrap sends the runtime's callers here. NOLINTBEGIN(bugprone-reserved-identifier)
#define RUNTIME(name, ...) extern "C" cudaError_t __wrap_##name(__VA_ARGS__)
#define DOES_NOTHING(name, ...) \
  RUNTIME(name, __VA_ARGS__) { return cudaSuccess; }
#define IS_TOLD(name, ...)     \
  RUNTIME(name, __VA_ARGS__) { \
    TellResource(#name);       \
    return cudaSuccess;        \
  }

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
  TellResource("cudaMalloc");
  *data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*data == MAP_FAILED) return cudaErrorMemoryAllocation;
  Get().memory[static_cast<std::byte*>(*data)] = bytes;
  return cudaSuccess;
}
RUNTIME(cudaFree, void* data) {
  TellResource("cudaFree");
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
  TellResource("cudaHostAlloc");
  *data = std::malloc(bytes);
  return cudaSuccess;
}
RUNTIME(cudaMallocHost, void** data, size_t bytes) {
  TellResource("cudaMallocHost");
  *data = std::malloc(bytes);
  return cudaSuccess;
}
RUNTIME(cudaFreeHost, void* data) {
  TellResource("cudaFreeHost");
  std::free(data);
  return cudaSuccess;
}
// What comes from a GPU is zero.
RUNTIME(cudaMemcpyAsync, void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  CheckCopy(to, bytes, from, bytes);
  if (!Get().IsOnGpu(to)) std::memset(to, 0, bytes);
  return cudaSuccess;
}
RUNTIME(cudaMemcpy2DAsync, void* to, size_t pitch, const void* from, size_t from_pitch,
        size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  if (height > 0) {
    CheckCopy(to, (height - 1) * pitch + width, from, (height - 1) * from_pitch + width);
  }
  if (Get().IsOnGpu(to)) return cudaSuccess;
  for (size_t row = 0; row < height; ++row) {
    std::memset(static_cast<std::byte*>(to) + row * pitch, 0, width);
  }
  return cudaSuccess;
}

// The first eight are called by nobody: where there is a GPU, nothing else would notice who does.
IS_TOLD(cudaMallocAsync, void**, size_t, cudaStream_t)
IS_TOLD(cudaFreeAsync, void*, cudaStream_t)
IS_TOLD(cudaMallocManaged, void**, size_t, unsigned)
IS_TOLD(cudaHostRegister, void*, size_t, unsigned)
IS_TOLD(cudaHostUnregister, void*)
IS_TOLD(cudaStreamCreate, cudaStream_t*)
IS_TOLD(cudaStreamCreateWithPriority, cudaStream_t*, unsigned, int)
IS_TOLD(cudaEventCreate, cudaEvent_t*)
IS_TOLD(cudaStreamCreateWithFlags, cudaStream_t*, unsigned)
IS_TOLD(cudaStreamDestroy, cudaStream_t)
IS_TOLD(cudaEventCreateWithFlags, cudaEvent_t*, unsigned)
IS_TOLD(cudaEventDestroy, cudaEvent_t)

// A graph is an address, and holds nothing.
DOES_NOTHING(cudaStreamBeginCapture, cudaStream_t, cudaStreamCaptureMode)
RUNTIME(cudaStreamEndCapture, cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(&Get());
  return cudaSuccess;
}
RUNTIME(cudaGraphInstantiate, cudaGraphExec_t* made, cudaGraph_t, unsigned long long) {
  TellResource("cudaGraphInstantiate");
  *made = reinterpret_cast<cudaGraphExec_t>(&Get());
  return cudaSuccess;
}
DOES_NOTHING(cudaGraphDestroy, cudaGraph_t)
IS_TOLD(cudaGraphExecDestroy, cudaGraphExec_t)
DOES_NOTHING(cudaGraphLaunch, cudaGraphExec_t, cudaStream_t)

DOES_NOTHING(cudaMemcpy, void*, const void*, size_t, cudaMemcpyKind)
DOES_NOTHING(cudaMemset, void*, int, size_t)
DOES_NOTHING(cudaMemsetAsync, void*, int, size_t, cudaStream_t)
DOES_NOTHING(cudaDeviceEnablePeerAccess, int, unsigned)
DOES_NOTHING(cudaDeviceSynchronize)
DOES_NOTHING(cudaStreamSynchronize, cudaStream_t)
DOES_NOTHING(cudaStreamQuery, cudaStream_t)
DOES_NOTHING(cudaEventRecord, cudaEvent_t, cudaStream_t)
DOES_NOTHING(cudaEventSynchronize, cudaEvent_t)
DOES_NOTHING(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
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
