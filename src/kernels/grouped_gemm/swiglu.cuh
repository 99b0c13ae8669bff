// What an expert does between its two products, for one value on the device, and how one block of
// a cluster tells the other its largest values.
#pragma once

#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

// b(weight * silu(b(gate)) * b(up)) with gate at most `limit` and up within it; 0: no limit.
__device__ __forceinline__ float Intermediate(float gate, float up, float weight, float limit) {
  gate = RoundBf16(gate);
  up = RoundBf16(up);
  if (limit > 0) {
    up = fminf(fmaxf(up, -limit), limit);
    gate = fminf(gate, limit);
  }
  const float silu = __fdividef(gate, 1.0f + __expf(-gate));  // 2^-17 off at most, BF16's is 2^-9
  return RoundBf16(weight * (silu * up));
}

// One float to this block's address `at` in the cluster's block `rank`; counts as 4 bytes on its
// barrier.
__device__ __forceinline__ void SendToBlock(const float* at, float value, const uint64_t* barrier,
                                            uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 a, b;\n"
      "mapa.shared::cluster.u32 a, %0, %3;\nmapa.shared::cluster.u32 b, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], %1, [b];\n}" ::"r"(
          SharedAddress(at)),
      "r"(__float_as_uint(value)), "r"(SharedAddress(barrier)), "r"(rank)
      : "memory");
}

}  // namespace fathom::kernels
