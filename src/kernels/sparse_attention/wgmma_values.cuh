// The product of probabilities and values: D[64, 128] += P[64, 16] * V[16, 128] by one warpgroup,
// BF16. P is in shared memory as gemm/wgmma.cuh says; V lies with its rows (keys) of 64 columns in
// 128-byte swizzled rows, `column_stride` bytes from one 64 columns to the next: its columns, not
// its keys, are contiguous, which wgmma calls transposed. D as in gemm/wgmma.cuh.
#pragma once

#include <cstdint>

#include "kernels/gemm/wgmma.cuh"

namespace fathom::kernels {

__device__ inline uint64_t TransposedDescriptor(uint32_t address, uint32_t column_stride) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         (static_cast<uint64_t>(column_stride >> 4) << 16) | (64ull << 32) | (1ull << 62);
}

__device__ inline void WgmmaValues(float (&d)[64], uint64_t p, uint64_t v) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FATHOM_WGMMA_NAMES64
      "}, %64, %65, p, 1, 1, 0, 1;\n}"
      : FATHOM_WGMMA_D64(0)
      : "l"(p), "l"(v));
}

// The same product turned around: D[64, 32] += V[16, 64]^T * P[32, 16]^T, columns of V by rows of
// P.
__device__ inline void WgmmaValues(float (&d)[16], uint64_t v, uint64_t p) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" FATHOM_WGMMA_NAMES16
      "}, %16, %17, p, 1, 1, 1, 0;\n}"
      : FATHOM_WGMMA_D16(0)
      : "l"(v), "l"(p));
}

}  // namespace fathom::kernels
