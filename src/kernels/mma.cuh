// The tensor core's product of one warp: D[16, 8] += A[16, 16] * B[16, 8], BF16, FP32 sums. Lane l
// holds, with g = l / 4 and c = 2 (l % 4): of D and A rows g and g + 8, of B column g; of D columns
// c, c + 1; of the 16 that are multiplied c, c + 1 and c + 8, c + 9. Device code only.
#pragma once

#include <cstdint>

namespace fathom::kernels {

__device__ __forceinline__ void WarpMultiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fathom::kernels
