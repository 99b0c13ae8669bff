// The products of weight_stream.cuh, of one warpgroup: d += a row tile's column blocks times kN
// tokens, both in shared memory (weight_tiles.h; tokens in tiles of 128-byte rows). What the tensor
// cores cannot read as it is, is widened in registers.
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

// FP4 weights times FP8 activations, one column block: a product for each group of 32 columns,
// scaled afterwards. x_scales [kN].
template <int kN>
__device__ __forceinline__ void MultiplyFp4(const std::byte* weights, const std::byte* x,
                                            const float* x_scales, float (&d)[kN / 2]) {
  const int thread = ThreadOfGroup();
  const auto* row_scales =
      reinterpret_cast<const uint32_t*>(weights + 4096) + thread / 32 * 16 + thread % 32 / 4;
  uint32_t a[4][4];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const uint4 chunk = reinterpret_cast<const uint4*>(weights)[thread + c * 128];
    ExpandFp4(chunk.x, a[2 * c][0], a[2 * c][2]);
    ExpandFp4(chunk.y, a[2 * c][1], a[2 * c][3]);
    ExpandFp4(chunk.z, a[2 * c + 1][0], a[2 * c + 1][2]);
    ExpandFp4(chunk.w, a[2 * c + 1][1], a[2 * c + 1][3]);
  }
  const uint64_t b = SmemDescriptor(SharedAddress(x));
  float product[4][kN / 2];
  WgmmaFence();
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    Wgmma<WgmmaType::kE4m3, kN>::FromRegisters(product[q], a[q], b + 2 * q, 0);
  }
  WgmmaCommit();
  const uint32_t low_bytes = row_scales[0], high_bytes = row_scales[8];
  float low[4], high[4];  // 2^(byte q - 127); 2^-127 counts as 0
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    low[q] = __uint_as_float((q < 3 ? low_bytes << (23 - 8 * q) : low_bytes >> 1) & 0x7f800000u);
    high[q] = __uint_as_float((q < 3 ? high_bytes << (23 - 8 * q) : high_bytes >> 1) & 0x7f800000u);
  }
  WgmmaWait<0>();
#pragma unroll
  for (auto& p : product) ReadyRegisters(p);
  const float* scales = x_scales + thread % 4 * 2;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const float2 x_scale = *reinterpret_cast<const float2*>(scales + j * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&s)[4] = i < 2 ? low : high;
      const int at = 4 * j + i;
      float sum = s[0] * product[0][at];
#pragma unroll
      for (int q = 1; q < 4; ++q) sum += s[q] * product[q][at];
      d[at] += (i % 2 == 0 ? x_scale.x : x_scale.y) * sum;
    }
  }
}

}  // namespace fathom::kernels
