// What the kernels share whose blocks have all of their weights in shared memory at once, a row
// tile of some column blocks: those of the output products (output_alone_cuda.h,
// output_batch_cuda.h), the query products of four ranks
// (attention_prologue/queries_alone_cuda.h) and, but for where weights lie, the input products
// (input_alone_cuda.h). Device code only.
#pragma once

#include "kernels/gemm/output_alone_cuda.h"
#include "kernels/gemm/stream_products.cuh"
#include "kernels/gemm/weight_tiles.h"
#include "kernels/numbered_words.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kResidentThreads = 128;  // that multiply, a warpgroup
inline constexpr int kResidentBlocks = 8;     // column blocks, of one chain of sums
inline constexpr int kWeightTileBytes = TileMatrixBytes(TileKind::kFp8);  // as of kFp8AsBf16
// The first product's columns are four parts. Of two halves of the columns each has every other
// column block, as weight_stream.cuh gives them to pairs of warpgroups; where a rank has few rows a
// part is a quarter of the columns, and has one chain of sums after the other for the two pairs.
inline constexpr int kGroupedBlocks = kGroupedParts * kResidentBlocks;  // of a row
// The i-th column block of a part of so many chains.
template <int kChains>
__device__ __forceinline__ int BlockOfPart(int part, int i) {
  if (kChains == 1) return part / 2 * (2 * kResidentBlocks) + part % 2 + 2 * i;
  constexpr int kEach = kResidentBlocks / 2;
  return part * kResidentBlocks + i / kEach + i % kEach * 2;
}

// scales: of a row tile's first column block here.
template <int kCount>
__device__ __forceinline__ void LoadScales(const uint8_t* scales, float (&scale)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) scale[i] = Ue8m0Value(scales[i]);
}
// scales: of a row tile's column blocks.
template <int kChains>
__device__ __forceinline__ void LoadWideScales(const uint8_t* scales, int part,
                                               __nv_bfloat162 (&scale)[kResidentBlocks]) {
#pragma unroll
  for (int i = 0; i < kResidentBlocks; ++i) {
    scale[i] = WideScale(Ue8m0Value(scales[BlockOfPart<kChains>(part, i)]));
  }
}

template <int kPlaces>
struct WeightPlaces {
  alignas(1024) std::byte weights[kPlaces][kWeightTileBytes];
  uint64_t landed[kPlaces];

  // By one warp; others may use the barriers when the block has met. One lane does it, and all of
  // those for one arrival in one place: a barrier each would be slower, and what lanes do apart
  // becomes a loop over them, which racecheck cannot follow.
  template <typename... Barriers>
  __device__ void InitLanded(Barriers*... others) {
    if (threadIdx.x % 32 != 0) return;
    for (auto& barrier : landed) BarrierInit(&barrier, 1);
    (BarrierInit(others, 1), ...);
  }
  // By one thread.
  __device__ void Fetch(int place, const std::byte* from) {
    BarrierExpectBytes(&landed[place], kWeightTileBytes);
    BulkCopyOnce(weights[place], from, kWeightTileBytes, &landed[place]);
  }
};

// The first product's chains of a part's column blocks. a: the first kAhead of them widened, whose
// places the others take in turn. b(i, q): the activations of 16 columns of the i-th one.
template <int kAhead, int kChains, int kSums, typename Activations>
__device__ __forceinline__ void MultiplyWidened(WeightPlaces<kResidentBlocks>& s,
                                                const __nv_bfloat162 (&scale)[kResidentBlocks],
                                                uint32_t (&a)[kAhead][8][4], const Activations& b,
                                                float (&d)[kChains][kSums]) {
#pragma unroll
  for (int i = 0; i < kResidentBlocks; ++i) {
    if (i >= kAhead) {
      WgmmaWait<kAhead - 1>();
      BarrierWait(&s.landed[i], 0);
      WidenTile(s.weights[i], scale[i], a[i % kAhead]);
    }
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      Wgmma<WgmmaType::kBf16, 2 * kSums>::FromRegisters(d[i / (kResidentBlocks / kChains)],
                                                        a[i % kAhead][q], b(i, q), 1);
    }
    WgmmaCommit();
  }
  WgmmaWait<0>();
#pragma unroll
  for (float (&chain)[kSums] : d) ReadyRegisters(chain);
}

// One token's products of a block's column blocks, which have landed: a sum of each, or one of all.
template <WgmmaType kType, int kSums>
__device__ __forceinline__ void MultiplyLanded(
    const std::byte (&weights)[kResidentBlocks][kWeightTileBytes], uint64_t b,
    float (&sums)[kSums][4]) {
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < kResidentBlocks; ++i) {
    const uint64_t a = SmemDescriptor(SharedAddress(weights[i]));
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int accumulates = kSums == 1 || q != 0;
      Wgmma<kType, 8>::FromSmem(sums[i % kSums], a + 2 * q, b + i * 8 + q * 2, accumulates);
    }
  }
  WgmmaCommit();
}
// Of FP8: the sums of a thread's two rows, in lanes 0, 4, ….
__device__ __forceinline__ float2
MultiplyLandedFp8(const std::byte (&weights)[kResidentBlocks][kWeightTileBytes], uint64_t b,
                  const float (&scale)[kResidentBlocks], const float (&x_scales)[kResidentBlocks]) {
  float product[kResidentBlocks][4];
  MultiplyLanded<WgmmaType::kE4m3>(weights, b, product);
  float both[kResidentBlocks];
#pragma unroll
  for (int i = 0; i < kResidentBlocks; ++i) both[i] = scale[i] * x_scales[i];
  WgmmaWait<0>();
  float2 d{};
#pragma unroll
  for (int i = 0; i < kResidentBlocks; ++i) {
    ReadyRegisters(product[i]);
    d.x += product[i][0] * both[i];
    d.y += product[i][2] * both[i];
  }
  return d;
}

// The FP8 products of up to kN tokens with column blocks from `first` on, as these land. b: the
// tokens' column blocks, one after the other.
template <int kN, int kCount, int kPlaces>
__device__ __forceinline__ void MultiplyTokens(WeightPlaces<kPlaces>& s, int first, uint64_t b,
                                               float (&product)[kCount][kN / 2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int tile = first + i;
    BarrierWait(&s.landed[tile], 0);
    const uint64_t a = SmemDescriptor(SharedAddress(s.weights[tile]));
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<WgmmaType::kE4m3, kN>::FromSmem(product[i], a + 2 * q, b + tile * (kN * 8) + q * 2,
                                            q != 0);
    }
  }
  WgmmaCommit();
  WgmmaWait<0>();
}
// d += these, scaled, a chain. scale, x_scales: of all of the block's column
// blocks.
template <int kN, int kCount, int kAll>
__device__ __forceinline__ void AddTokens(float (&product)[kCount][kN / 2], int first,
                                          const float (&scale)[kAll],
                                          const float (&x_scales)[kAll][kN], float (&d)[kN / 2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    ReadyRegisters(product[i]);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(
          &x_scales[first + i][8 * j + static_cast<int>(threadIdx.x % 32) % 4 * 2]);
      const float2 v{scale[first + i] * x.x, scale[first + i] * x.y};
      d[4 * j] += product[i][4 * j] * v.x;
      d[4 * j + 1] += product[i][4 * j + 1] * v.y;
      d[4 * j + 2] += product[i][4 * j + 2] * v.x;
      d[4 * j + 3] += product[i][4 * j + 3] * v.y;
    }
  }
}

// One token's rows of a tile as BF16, or as words with the number. d: of rows lane / 4 of the
// warp's 16, and of the eighth after it, in lanes 0, 4, ….
__device__ inline void StoreRowTile(const GemmProblem& p, int tile, float2 d, uint32_t number) {
  const auto lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const float2 next{__shfl_down_sync(0xffffffffu, d.x, 4), __shfl_down_sync(0xffffffffu, d.y, 4)};
  if (lane % 8 != 0) return;
  const int pair = (tile * kTileMatrixRows + warp * 16 + lane / 4) / 2;
  const uint32_t low = PackBf16(d.x, next.x), high = PackBf16(d.y, next.y);
  if (p.output == GemmOutput::kNumbered) {
    auto* const y = static_cast<uint2*>(p.y);
    StoreNumbered(y + pair, low, number);
    StoreNumbered(y + pair + 4, high, number);
  } else {
    auto* const y = static_cast<uint32_t*>(p.y);
    y[pair] = low, y[pair + 4] = high;
  }
}

// A lane's four of a warp's 128 columns: rounded to BF16, then codes and all columns' scale.
struct Fp8Quad {
  uint32_t codes, scale;
};
__device__ inline Fp8Quad QuantizeQuad(float4 sum) {
  const float4 v{RoundBf16(sum.x), RoundBf16(sum.y), RoundBf16(sum.z), RoundBf16(sum.w)};
  const float largest =
      WarpMax(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
  const uint32_t scale = Fp8Scale(largest);
  const float inverse = Ue8m0Inverse(scale);
  return {Fp8Codes(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse), scale};
}

}  // namespace fathom::kernels
