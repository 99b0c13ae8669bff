// Dynamic shared memory for tiles that wgmma or the copy engine swizzle. Device code only.
#pragma once

#include "kernels/sm90.cuh"

namespace fathom::kernels {

// A block's T at the first multiple of 1,024 bytes from `dynamic` on: kernels ask for as many more.
// Not by way of an integer: of a pointer made of one the compiler does not know that it is shared
// memory, and every access becomes a generic one.
template <typename T>
__device__ __forceinline__ T& AlignedShared(uint8_t* dynamic) {
  return *reinterpret_cast<T*>(dynamic + (0u - SharedAddress(dynamic)) % 1024);
}

}  // namespace fathom::kernels
