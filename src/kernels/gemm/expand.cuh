// FP8 weights in the order of wgmma's A registers (weight_tiles.h) into shared-memory tiles that
// wgmma reads as B: 64 rows of 128 bytes, swizzled, as BF16. One warpgroup;
// thread t holds what thread t of wgmma would. Device code only.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "kernels/gemm/weight_codes.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

// Four 8x8 matrices of 16-bit values; lane l names row l % 8 of matrix l / 8. Whoever reads them is
// told by a later fence and barrier.
__device__ inline void StoreMatrices(uint32_t address, const uint32_t (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}

// Where this lane's row of the A registers of step q (32 bytes of each row) lies in a tile.
__device__ inline uint32_t MatrixAddress(uint32_t tile, int thread, int q) {
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
  return tile + static_cast<uint32_t>(row * 128 + ((2 * q + lane / 16) ^ (lane % 8)) * 16);
}

// A kFp8AsBf16 tile's codes of this thread, columns 64 * half.., and to a tile of BF16. `scale`:
// WidenFp8's.
struct Fp8Fragment {
  uint4 chunks[2];
};
__device__ inline Fp8Fragment LoadFp8(const std::byte* raw, int half, int thread) {
  const auto* codes = reinterpret_cast<const uint4*>(raw) + half * 256 + thread;
  return {{codes[0], codes[128]}};
}
__device__ inline void WidenFp8Half(const Fp8Fragment& f, uint32_t tile, __nv_bfloat162 scale,
                                    int thread) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint4& chunk = f.chunks[q / 2];
    const uint32_t low = q % 2 == 0 ? chunk.x : chunk.z, high = q % 2 == 0 ? chunk.y : chunk.w;
    const uint32_t a[4] = {WidenFp8<0>(low, scale), WidenFp8<1>(low, scale),
                           WidenFp8<0>(high, scale), WidenFp8<1>(high, scale)};
    StoreMatrices(MatrixAddress(tile, thread, q), a);
  }
}

}  // namespace fathom::kernels
