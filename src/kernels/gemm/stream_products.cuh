// The products of weight_stream.cuh and gemm_sm90.cuh, of one warpgroup: d += a row tile's column
// blocks times kN tokens, both in shared memory (weight_tiles.h; tokens in tiles of 128-byte rows).
// What the tensor cores cannot read as it is, is widened in registers.
#pragma once

#include <cuda_bf16.h>

#include "kernels/gemm/weight_codes.cuh"
#include "kernels/gemm/wgmma.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

__device__ __forceinline__ int ThreadOfGroup() { return static_cast<int>(threadIdx.x) % 128; }

// Results of wgmma may only be read below the wait for them.
template <int kCount>
__device__ __forceinline__ void ReadyRegisters(float (&values)[kCount]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value)::"memory");
}

// FP8 codes on both sides. weight_scales: of each block, two apart; x_scales [kBlocks][kN].
template <int kN, int kBlocks>
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
  float2 s[kBlocks][kN / 8];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const float w = weight_scales[2 * i];
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float2 v = *reinterpret_cast<const float2*>(scales + i * kN + j * 8);
      s[i][j] = {w * v.x, w * v.y};
    }
  }
  WgmmaWait<0>();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    ReadyRegisters(product[i]);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      d[4 * j] += product[i][4 * j] * s[i][j].x;
      d[4 * j + 1] += product[i][4 * j + 1] * s[i][j].y;
      d[4 * j + 2] += product[i][4 * j + 2] * s[i][j].x;
      d[4 * j + 3] += product[i][4 * j + 3] * s[i][j].y;
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

// FP8 weights times BF16 activations, one column block: the codes become exact BF16 values in
// registers. x: its two halves.
template <int kN>
__device__ __forceinline__ void MultiplyWide(const std::byte* weights, const std::byte* x,
                                             float weight_scale, float (&d)[kN / 2]) {
  const auto* chunks = reinterpret_cast<const uint4*>(weights) + ThreadOfGroup();
  const __nv_bfloat162 scale = WideScale(weight_scale);
  uint32_t a[8][4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const uint4 chunk = chunks[c * 128];
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      a[2 * c + w / 2][w % 2 * 2] = WidenFp8<0>(words[w], scale);
      a[2 * c + w / 2][w % 2 * 2 + 1] = WidenFp8<1>(words[w], scale);
    }
  }
  const uint64_t b = SmemDescriptor(SharedAddress(x));
  WgmmaFence();
#pragma unroll
  for (int q = 0; q < 8; ++q) {
    Wgmma<WgmmaType::kBf16, kN>::FromRegisters(d, a[q], b + q / 4 * (kN * 128 / 16) + q % 4 * 2, 1);
  }
  WgmmaCommit();
  WgmmaWait<0>();
  ReadyRegisters(d);
}

// FP4 weights: two groups of 32 columns of a block, as a thread of the warpgroup has them.
template <int kN>
class Fp4Half {
 public:
  // Expands the codes and issues a product for each group.
  __device__ __forceinline__ void Start(const std::byte* weights, const std::byte* x, int half) {
    const int thread = ThreadOfGroup();
    const uint4 chunk = reinterpret_cast<const uint4*>(weights)[thread + half * 128];
    const auto* scales =
        reinterpret_cast<const uint32_t*>(weights + 4096) + thread / 32 * 16 + thread % 32 / 4;
    low_ = scales[0] >> (16 * half), high_ = scales[8] >> (16 * half);
    ExpandFp4(chunk.x, a_[0][0], a_[0][2]);
    ExpandFp4(chunk.y, a_[0][1], a_[0][3]);
    ExpandFp4(chunk.z, a_[1][0], a_[1][2]);
    ExpandFp4(chunk.w, a_[1][1], a_[1][3]);
    const uint64_t b = SmemDescriptor(SharedAddress(x)) + 4 * half;
    WgmmaFence();
    Wgmma<WgmmaType::kE4m3, kN>::FromRegisters(products_[0], a_[0], b, 0);
    Wgmma<WgmmaType::kE4m3, kN>::FromRegisters(products_[1], a_[1], b + 2, 0);
    WgmmaCommit();
  }
  // Once they are complete: sums += the products, scaled.
  __device__ __forceinline__ void Finish(float (&sums)[kN / 2]) {
    ReadyRegisters(products_[0]);
    ReadyRegisters(products_[1]);
    const float low[2] = {First(low_), Second(low_)}, high[2] = {First(high_), Second(high_)};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float (&s)[2] = i % 4 < 2 ? low : high;
      sums[i] += s[0] * products_[0][i] + s[1] * products_[1][i];
    }
  }

 private:
  // 2^(byte - 127) of the two low bytes; 2^-127 counts as 0.
  __device__ static float First(uint32_t bytes) {
    return __uint_as_float(bytes << 23 & 0x7f800000u);
  }
  __device__ static float Second(uint32_t bytes) {
    return __uint_as_float(bytes << 15 & 0x7f800000u);
  }

  uint32_t a_[2][4];
  uint32_t low_, high_;  // scales of rows g and g + 8
  float products_[2][kN / 2];
};

// FP4 weights times FP8 activations, one column block: a product for each group of 32 columns,
// scaled afterwards. The second half is expanded while the first is multiplied. x_scales [kN].
template <int kN>
__device__ __forceinline__ void MultiplyFp4(const std::byte* weights, const std::byte* x,
                                            const float* x_scales, float (&d)[kN / 2]) {
  Fp4Half<kN> first, second;
  first.Start(weights, x, 0);
  second.Start(weights, x, 1);
  float sums[kN / 2] = {};
  WgmmaWait<1>();
  first.Finish(sums);
  WgmmaWait<0>();
  second.Finish(sums);
  const float* scales = x_scales + ThreadOfGroup() % 4 * 2;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const float2 s = *reinterpret_cast<const float2*>(scales + j * 8);
    d[4 * j] += s.x * sums[4 * j];
    d[4 * j + 1] += s.y * sums[4 * j + 1];
    d[4 * j + 2] += s.x * sums[4 * j + 2];
    d[4 * j + 3] += s.y * sums[4 * j + 3];
  }
}

}  // namespace fathom::kernels
