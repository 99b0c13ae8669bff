// FP4 weights (weight_tiles.h) times FP8 activations by one warpgroup, both in shared memory, up to
// 16 tokens: the codes become e4m3 in registers. Device code only.
#pragma once

#include "kernels/gemm/stream_products.cuh"

namespace fathom::kernels {

// A thread's part of a tile, and of the tokens' scales.
template <int kN>
struct Fp4Tile {
  uint4 codes[2];
  uint32_t low, high;  // scales of rows g and g + 8, four groups of 32 columns each
  float2 x_scales[kN / 8];

  __device__ __forceinline__ void Load(const std::byte* tile, const float* scales) {
    const int thread = ThreadOfGroup();
    codes[0] = reinterpret_cast<const uint4*>(tile)[thread];
    codes[1] = reinterpret_cast<const uint4*>(tile)[thread + 128];
    const auto* bytes =
        reinterpret_cast<const uint32_t*>(tile + 4096) + thread / 32 * 16 + thread % 32 / 4;
    low = bytes[0], high = bytes[8];
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      x_scales[j] = *reinterpret_cast<const float2*>(scales + thread % 4 * 2 + j * 8);
    }
  }
  // To the A registers of four products, one for each group.
  __device__ __forceinline__ void Expand(uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      ExpandFp4(codes[c].x, a[2 * c][0], a[2 * c][2]);
      ExpandFp4(codes[c].y, a[2 * c][1], a[2 * c][3]);
      ExpandFp4(codes[c].z, a[2 * c + 1][0], a[2 * c + 1][2]);
      ExpandFp4(codes[c].w, a[2 * c + 1][1], a[2 * c + 1][3]);
    }
  }
  // d += the products, scaled.
  __device__ __forceinline__ void Add(const float (&products)[4][kN / 2],
                                      float (&d)[kN / 2]) const {
    float sums[kN / 2];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float first = Scale(low, q), second = Scale(high, q);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        const float scale = i % 4 < 2 ? first : second;
        sums[i] = q == 0 ? scale * products[0][i] : sums[i] + scale * products[q][i];
      }
    }
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      d[i] += (i % 2 == 0 ? x_scales[i / 4].x : x_scales[i / 4].y) * sums[i];
    }
  }

 private:
  // 2^(byte q - 127); 2^-127 counts as 0.
  __device__ static float Scale(uint32_t bytes, int q) {
    return __uint_as_float((q == 3 ? bytes >> 1 : bytes << (23 - 8 * q)) & 0x7f800000u);
  }
};

// Every second of 2 * kBlocks column blocks; x_scales [blocks][kN]. A tile is expanded while the
// one before is multiplied.
template <int kN, int kBlocks>
__device__ __forceinline__ void MultiplyFp4Blocks(const std::byte* weights, const std::byte* x,
                                                  const float* x_scales, float (&d)[kN / 2]) {
  Fp4Tile<kN> tiles[kBlocks];
  uint32_t a[kBlocks][4][4];
  float products[4][kN / 2];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) tiles[i].Load(weights + i * 2 * 4352, x_scales + i * 2 * kN);
  tiles[0].Expand(a[0]);
  const uint32_t address = __shfl_sync(0xffffffffu, SharedAddress(x), 0);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const uint64_t b = SmemDescriptor(address + i * 2 * kN * 128);
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<WgmmaType::kE4m3, kN>::FromRegisters(products[q], a[i][q], b + 2 * q, 0);
    }
    WgmmaCommit();
    if (i + 1 < kBlocks) {
      tiles[i + 1].Expand(a[i + 1]);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
#pragma unroll
        for (uint32_t& word : a[i + 1][q]) asm volatile("" : "+r"(word)::"memory");
      }
    }
    WgmmaWait<0>();
#pragma unroll
    for (int q = 0; q < 4; ++q) ReadyRegisters(products[q]);
    tiles[i].Add(products, d);
  }
}

}  // namespace fathom::kernels
