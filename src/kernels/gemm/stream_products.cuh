// The products of weight_stream.cuh and of the experts, of one warpgroup: d += a row tile's column
// blocks times kN tokens, both in shared memory (weight_tiles.h; tokens in tiles of 128-byte rows).
// What the tensor cores cannot read as it is, is widened in registers.
#pragma once

#include <cuda_bf16.h>

#include "kernels/gemm/weight_codes.cuh"
#include "kernels/gemm/wgmma.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

__device__ __forceinline__ int ThreadOfGroup() { return static_cast<int>(threadIdx.x) % 128; }

// B of one token without swizzle, 16 bytes next to each other in K next to each other in memory. Of
// its eight rows, 16 bytes apart, the token is the first one; what the others hold, the token's
// next chunks and kBehindToken bytes behind its last one, gives sums that nobody reads.
inline constexpr int kBehindToken = 7 * 16;
__device__ __forceinline__ uint64_t TokenDescriptor(const void* x) {
  const uint32_t address = __shfl_sync(0xffffffffu, SharedAddress(x), 0);
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (1ull << 16) | (8ull << 32);
}

// FP8 codes on both sides. weight_scales: of each block, kApart apart; x_scales [kBlocks][kN].
template <int kN, int kBlocks, int kApart = 2>
__device__ __forceinline__ void MultiplyFp8(const std::byte* weights, const std::byte* x,
                                            const float* weight_scales, const float* x_scales,
                                            float (&d)[kN / 2]) {
  float product[kBlocks][kN / 2];
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const uint64_t a = SmemDescriptor(SharedAddress(weights + i * 8192));
    const uint64_t b = SmemDescriptor(SharedAddress(x + i * kN * 128));
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<WgmmaType::kE4m3, kN>::FromSmem(product[i], a + 2 * q, b + 2 * q, q != 0);
    }
  }
  WgmmaCommit();
  const float* scales = x_scales + ThreadOfGroup() % 4 * 2;
  const auto scale = [&](int i, int j) {
    const float2 v = *reinterpret_cast<const float2*>(scales + i * kN + j * 8);
    return float2{weight_scales[kApart * i] * v.x, weight_scales[kApart * i] * v.y};
  };
  constexpr bool kLoadAhead = kBlocks * kN < 128;  // while there are registers
  float2 s[kBlocks][kN / 8];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int j = 0; kLoadAhead && j < kN / 8; ++j) s[i][j] = scale(i, j);
  }
  WgmmaWait<0>();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    ReadyRegisters(product[i]);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float2 v = kLoadAhead ? s[i][j] : scale(i, j);
      d[4 * j] += product[i][4 * j] * v.x;
      d[4 * j + 1] += product[i][4 * j + 1] * v.y;
      d[4 * j + 2] += product[i][4 * j + 2] * v.x;
      d[4 * j + 3] += product[i][4 * j + 3] * v.y;
    }
  }
}

// BF16 on both sides, blocks of 64 columns.
template <int kN, int kBlocks>
__device__ __forceinline__ void MultiplyBf16(const std::byte* weights, const std::byte* x,
                                             float (&d)[kN / 2]) {
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const uint64_t a = SmemDescriptor(SharedAddress(weights + i * 8192));
    const uint64_t b = SmemDescriptor(SharedAddress(x + i * kN * 128));
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<WgmmaType::kBf16, kN>::FromSmem(d, a + 2 * q, b + 2 * q, 1);
    }
  }
  WgmmaCommit();
  WgmmaWait<0>();
  ReadyRegisters(d);
}

// This thread's registers of A for kSteps of the eight steps of an FP8 tile, an even number, as
// BF16: those from `first` on.
template <int kSteps>
__device__ __forceinline__ void WidenSteps(const std::byte* tile, int first, __nv_bfloat162 scale,
                                           uint32_t (&a)[kSteps][4]) {
  const auto* chunks = reinterpret_cast<const uint4*>(tile) + first / 2 * 128 + ThreadOfGroup();
#pragma unroll
  for (int c = 0; c < kSteps / 2; ++c) {
    const uint4 chunk = chunks[c * 128];
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      a[2 * c + w / 2][w % 2 * 2] = WidenFp8<0>(words[w], scale);
      a[2 * c + w / 2][w % 2 * 2 + 1] = WidenFp8<1>(words[w], scale);
    }
  }
}
__device__ __forceinline__ void WidenTile(const std::byte* tile, __nv_bfloat162 scale,
                                          uint32_t (&a)[8][4]) {
  WidenSteps<8>(tile, 0, scale, a);
}

// FP8 weights times BF16 activations, one column block: the codes become exact BF16 values in
// registers, half of them while the other half is multiplied. x: its two halves.
template <int kN>
__device__ __forceinline__ void MultiplyWide(const std::byte* weights, const std::byte* x,
                                             float weight_scale, float (&d)[kN / 2]) {
  uint32_t a[2][4][4];
  const __nv_bfloat162 scale = WideScale(weight_scale);
  // From a uniform register: else each product's descriptor is moved there on its own.
  const uint64_t b = SmemDescriptor(__shfl_sync(0xffffffffu, SharedAddress(x), 0));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    WidenSteps<4>(weights, 4 * half, scale, a[half]);
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<WgmmaType::kBf16, kN>::FromRegisters(d, a[half][q], b + half * (kN * 128 / 16) + q * 2,
                                                 1);
    }
    WgmmaCommit();
  }
  WgmmaWait<0>();
  ReadyRegisters(d);
}

}  // namespace fathom::kernels
