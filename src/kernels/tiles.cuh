// Tiles: how activations lie in device memory for the tensor cores. A matrix [T, K] is cut into
// tiles of 8 rows by 128 bytes (128 FP8 codes or 64 BF16 values), 1 KB each, whose 16-byte chunks
// are swizzled as wgmma reads them from shared memory (chunk ^ row). Tiles of the same columns
// follow each other, so any 8 * n rows of one column block are one contiguous bulk copy:
//   tile(k, t) at ((k block) * row_groups + t / 8) * 1024 bytes, row_groups >= ceil(T / 8).
// FP8 scales: float [K / 128, row_groups * 8]. Rows past T are never read into a result of another
// row; they need not be initialized beyond being finite for FP8 (any code but NaN) and BF16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace fathom::kernels {

inline constexpr int kTileBytes = 1024;
inline constexpr int kTileRows = 8;

__host__ __device__ inline int64_t Fp8TileOffset(int64_t t, int64_t k, int64_t row_groups) {
  const int64_t row = t % 8;
  return (k / 128 * row_groups + t / 8) * kTileBytes + row * 128 + (((k % 128) / 16) ^ row) * 16 +
         k % 16;
}

// In bytes.
__host__ __device__ inline int64_t Bf16TileOffset(int64_t t, int64_t k, int64_t row_groups) {
  const int64_t row = t % 8;
  return (k / 64 * row_groups + t / 8) * kTileBytes + row * 128 + (((k % 64) / 8) ^ row) * 16 +
         k % 8 * 2;
}

// FP8 activations in tiles with their scales.
struct Fp8Tiles {
  uint8_t* codes = nullptr;
  float* scales = nullptr;  // [K / 128, row_groups * 8], powers of two
  int64_t row_groups = 0;
};

// BF16 activations in tiles.
struct Bf16Tiles {
  __nv_bfloat16* values = nullptr;
  int64_t row_groups = 0;
};

}  // namespace fathom::kernels
