// Weights in the order of wgmma's A registers (weight_tiles.h) into shared-memory tiles that wgmma
// reads as B: 64 rows of 128 bytes, swizzled. FP4 becomes e4m3, FP8 becomes BF16. One warpgroup;
// thread t holds what thread t of wgmma would. Device code only.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "kernels/gemm/weight_codes.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

// e4m3 codes of the eight FP4 magnitudes times 2^(6 - i), nearest even, entry i. What is 2^-15
// of the row's largest scale or less is rounded to e4m3's subnormals, below 2^-18 to zero.
inline constexpr int kFp4CodeTable = 256;
__device__ inline void MakeFp4CodeTable(uint2* table, int thread) {
  if (thread >= kFp4CodeTable) return;
  const float unit = exp2f(static_cast<float>(6 - thread));
  table[thread] = {Fp8Codes(0, 0.5f * unit) | Fp8Codes(unit, 1.5f * unit) << 16,
                   Fp8Codes(2 * unit, 3 * unit) | Fp8Codes(4 * unit, 6 * unit) << 16};
}

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

// A kFp4 tile's codes and scales of this thread: rows g and g + 8, g = thread / 32 * 16 +
// thread % 32 / 4.
struct Fp4Fragment {
  uint4 chunks[2];
  uint32_t scales[2];
};
__device__ inline Fp4Fragment LoadFp4(const std::byte* raw, int thread) {
  const auto* codes = reinterpret_cast<const uint4*>(raw) + thread;
  const auto* scales =
      reinterpret_cast<const uint32_t*>(raw + 4096) + thread / 32 * 16 + thread % 32 / 4;
  return {{codes[0], codes[128]}, {scales[0], scales[8]}};
}

// To a tile of e4m3. row_max: the largest scale of each of the two rows of the matrix, in all four
// bytes; the codes are relative to it, times 2^6.
__device__ inline void ExpandFp4Tile(const Fp4Fragment& f, uint32_t tile, const uint2* table,
                                     const uint32_t (&row_max)[2], int thread) {
  // Byte by byte: no scale is above its row's largest.
  const uint32_t below[2] = {row_max[0] - f.scales[0], row_max[1] - f.scales[1]};
  uint2 entries[4][2];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    for (int row = 0; row < 2; ++row) entries[q][row] = table[below[row] >> (8 * q) & 255u];
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint4& chunk = f.chunks[q / 2];
    const uint32_t words[2] = {q % 2 == 0 ? chunk.x : chunk.z, q % 2 == 0 ? chunk.y : chunk.w};
    uint32_t a[4];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint2 entry = entries[q][row];
      const uint32_t word = words[row], magnitudes = word & 0x77777777u;
      a[row] = __byte_perm(entry.x, entry.y, magnitudes) | (word & 0x80808080u);
      a[row + 2] = __byte_perm(entry.x, entry.y, magnitudes >> 16) | ((word << 4) & 0x80808080u);
    }
    StoreMatrices(MatrixAddress(tile, thread, q), a);
  }
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
