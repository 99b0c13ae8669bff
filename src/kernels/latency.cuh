// What kernels of few tokens share, whose time is that of instructions and exchanges that happen
// once. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/sm90.cuh"

namespace fathom::kernels {

// The sums of kValues values over a warp, a power of two of them: that of value i on the
// 32 / kValues lanes from i * 32 / kValues on.
template <int kValues>
__device__ __forceinline__ float TransposedSum(float (&v)[kValues]) {
  int stride = 16;
#pragma unroll
  for (int n = kValues / 2; n > 0; n /= 2, stride /= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(stride)) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float kept = upper ? v[i + n] : v[i], sent = upper ? v[i] : v[i + n];
      v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, stride);
    }
  }
  for (; stride > 0; stride /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], stride);
  return v[0];
}

// `value` to this block's address `p` in the shared memory of the cluster's block `rank`, where its
// four bytes count for this block's address `barrier`.
__device__ __forceinline__ void SendToBlock(float* p, float value, uint64_t* barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 p, b;\nmapa.shared::cluster.u32 p, %0, %3;\n"
      "mapa.shared::cluster.u32 b, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [p], %1, [b];\n}" ::"r"(
          SharedAddress(p)),
      "f"(value), "r"(SharedAddress(barrier)), "r"(rank)
      : "memory");
}

}  // namespace fathom::kernels
