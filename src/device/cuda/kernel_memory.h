// AllowSharedMemory: what a launch needs of a kernel before it may ask for more shared memory than
// every kernel may. A kernel's limit on a GPU only grows, as threads that share a GPU launch it
// with different sizes at the same time. Any thread; the GPU is the thread's current one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace fathom::device {

// From now on `kernel` may be launched with so many bytes of dynamic shared memory, and its blocks
// divide the first-level cache as all others do: in favour of shared memory, for blocks of two
// kernels run side by side only when both divide it alike.
cudaError_t AllowSharedMemory(const void* kernel, size_t bytes);

}  // namespace fathom::device
