// LaunchKernel: the one way a CUDA kernel is enqueued. Kernels are launched with programmatic
// dependent launch: a kernel may start while its predecessor in the stream still runs, so every
// kernel waits (WaitForPredecessor(), on every thread that touches what an earlier kernel wrote or
// reads, or before a barrier that these threads pass), and may then call AllowSuccessor() to let
// the next one get ready. A boundary whose input comes as packets awaits these and waits for its
// predecessor at its end: what follows it comes behind both. A kernel that allows its successor
// only after its own wait lets that one read, before it waits, what the kernel before this one
// wrote: hyper_connection does, and attention the queries behind a selection. One that allows it
// earlier says so (hyper_connection, the attention prologue, attention's CombineKernel): what
// follows it reads before it waits only weights and what is older than these two, and allows its
// own successor after its wait. Output products of few tokens with resident weights on a rank allow
// theirs before they wait, too: what follows reads before it waits only weights and what is older
// than attention. So does routing that awaits a boundary's words (route_alone.cuh), which tells the
// experts behind it when that has ended. Query products beside which entries are selected allow it,
// too: the selection awaits that they have waited, and ends with its own wait. So do those behind a
// selection, whose input is older than it; one of their blocks ends with the wait for it. And
// attention that awaits what both tell as words, and ends with its wait; and attention of ratio 128
// on a rank, behind which the output products of one token come. The narrow tiles of routed experts
// (experts_large_fp4.cu) do not wait before they read: they run beside the launch before, which has
// waited for the same, and end with their wait. A launch that fails is a bug of ours (shapes are
// checked at load): it ends the process with the kernel's file, the grid and CUDA's message. On a
// device that is broken nothing is launched any more: who waits for the stream learns why.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "device/cuda/cuda_fault.h"
#include "device/cuda/kernel_memory.h"
#include "device/device.h"

namespace fathom::kernels {

// Waits until all earlier kernels of the stream have ended and their writes are visible.
__device__ __forceinline__ void WaitForPredecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void AllowSuccessor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

inline constexpr int kMaxCluster = 16;                // blocks; above 8 a kernel has to ask for it
inline constexpr size_t kMaxSharedBytes = 227 << 10;  // of a block
// What a block asks for so that two of its launch do not share a multiprocessor: more than half of
// the 228 KB of shared memory, 1 KB of which each block takes besides.
inline constexpr size_t kAloneSharedBytes = (113 << 10) + 128;

// Blocks of one cluster follow each other along x; grid.x is a multiple of `cluster`.
// `shared_bytes` of dynamic shared memory. Arguments convert to the kernel's parameter types.
template <typename... Params, typename... Args>
void LaunchClusters(void (*kernel)(Params...), dim3 grid, unsigned cluster, dim3 block,
                    size_t shared_bytes, device::Stream& stream, Args&&... args) {
  cudaError_t error =
      device::AllowSharedMemory(reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.native_handle());
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  if (error == cudaSuccess) {
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...);
  }
  if (error == cudaSuccess || device::IsDeviceFault(error)) return;
  const char* name = "?";
  cudaFuncGetName(&name, reinterpret_cast<const void*>(kernel));
  CheckFailed(__FILE__, __LINE__,
              std::string(name) + " <<<(" + std::to_string(grid.x) + ", " + std::to_string(grid.y) +
                  ", " + std::to_string(grid.z) + "), " + std::to_string(block.x) + ", " +
                  std::to_string(shared_bytes) + ">>>: " + cudaGetErrorString(error));
}

template <typename... Params, typename... Args>
void LaunchKernel(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                  device::Stream& stream, Args&&... args) {
  LaunchClusters(kernel, grid, 1, block, shared_bytes, stream, std::forward<Args>(args)...);
}

// Clusters of the kernel that run at once; 0 on a device that is broken.
template <typename... Params>
int MaxClusters(void (*kernel)(Params...), unsigned cluster, unsigned threads,
                size_t shared_bytes) {
  device::CheckCuda(device::AllowSharedMemory(reinterpret_cast<const void*>(kernel), shared_bytes),
                    __FILE__, __LINE__);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = cluster;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  device::CheckCuda(cudaOccupancyMaxActiveClusters(&count, kernel, &config), __FILE__, __LINE__);
  return count;
}

// Of the current GPU; 1 on a device that is broken.
inline int NumMultiprocessors() {
  static const int count = [] {
    int device = 0, value = 0;
    device::CheckCuda(cudaGetDevice(&device), __FILE__, __LINE__);
    device::CheckCuda(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device),
                      __FILE__, __LINE__);
    return std::max(value, 1);
  }();
  return count;
}

}  // namespace fathom::kernels
