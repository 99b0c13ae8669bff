// FP4 weights (weight_tiles.h) times FP8 activations by one warpgroup, both in shared memory, up to
// 16 tokens, two, or one alone: the codes become e4m3 in registers. Device code only.
#pragma once

#include "kernels/gemm/stream_products.cuh"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

// 2^(the exponent in bits 23 to 30 - 127); 2^-127 counts as 0.
__device__ __forceinline__ float ScaleOf(uint32_t bits) {
  return __uint_as_float(bits & 0x7f800000u);
}

// Of byte q.
__device__ __forceinline__ float ScaleOfByte(uint32_t bytes, int q) {
  return ScaleOf(q == 3 ? bytes >> 1 : bytes << (23 - 8 * q));
}

// A thread's part of a tile to the A registers of four products, one for each group.
__device__ __forceinline__ void ExpandFp4Tile(const uint4 (&codes)[2], uint32_t (&a)[4][4]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    ExpandFp4(codes[c].x, a[2 * c][0], a[2 * c][2]);
    ExpandFp4(codes[c].y, a[2 * c][1], a[2 * c][3]);
    ExpandFp4(codes[c].z, a[2 * c + 1][0], a[2 * c + 1][2]);
    ExpandFp4(codes[c].w, a[2 * c + 1][1], a[2 * c + 1][3]);
  }
}

// The same, before whatever comes behind it.
__device__ __forceinline__ void ExpandToStay(const uint4 (&codes)[2], uint32_t (&a)[4][4]) {
  ExpandFp4Tile(codes, a);
#pragma unroll
  for (uint32_t (&group)[4] : a) {
#pragma unroll
    for (uint32_t& word : group) asm volatile("" : "+r"(word)::"memory");
  }
}

inline constexpr int kFp4TileBytes = 4352;

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
  // d += the products, scaled.
  __device__ __forceinline__ void Add(const float (&products)[4][kN / 2],
                                      float (&d)[kN / 2]) const {
    float sums[kN / 2];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float first = ScaleOfByte(low, q), second = ScaleOfByte(high, q);
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
  for (int i = 0; i < kBlocks; ++i) {
    tiles[i].Load(weights + i * 2 * kFp4TileBytes, x_scales + i * 2 * kN);
  }
  ExpandFp4Tile(tiles[0].codes, a[0]);
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
    if (i + 1 < kBlocks) ExpandToStay(tiles[i + 1].codes, a[i + 1]);
    WgmmaWait<0>();
#pragma unroll
    for (int q = 0; q < 4; ++q) ReadyRegisters(products[q]);
    tiles[i].Add(products, d);
  }
}

// One token, whose groups of 32 columns take the eight columns of the products: group q of the
// i-th of two column blocks is row 4 i + q of the block's tile of x, whose other rows are zero
// there. So each group's sum comes to a place of its own, and a thread scales two for a row of
// weights instead of all eight.
//
// Where the 16 bytes `unit` of the i-th block's 128 lie in its swizzled tile.
__device__ __forceinline__ int Fp4AloneOffset(int i, int unit) {
  const int row = 4 * i + unit / 2;
  return row * 128 + (unit ^ row) * 16;
}

// A warpgroup takes stage after stage of a row tile's column blocks, two of each stage, kApart
// apart. A block is expanded while the one before is multiplied, of this stage or of the last.
template <int kApart>
class Fp4AloneProducts {
 public:
  // Begins with a stage: its weights from this warpgroup's first block on, x and its scales (a
  // float a block) likewise. `await_x()` is called when weights are expanded, which x may come
  // behind; then `end_last()`, which calls End, before the products begin.
  template <typename AwaitX, typename EndLast>
  __device__ __forceinline__ void Begin(const std::byte* weights, const std::byte* x,
                                        const float* x_scales, const AwaitX& await_x,
                                        const EndLast& end_last) {
    const int thread = ThreadOfGroup();
    uint4 codes[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* tile = reinterpret_cast<const uint4*>(weights + i * kApart * kFp4TileBytes);
      codes[i][0] = tile[thread], codes[i][1] = tile[thread + 128];
    }
    const uint64_t b = SmemDescriptor(__shfl_sync(0xffffffffu, SharedAddress(x), 0));
    ExpandToStay(codes[0], a_[0]);
    await_x();
    end_last();
    Multiply(a_[0], b, 0);
    LoadScales(weights, x_scales);
    ExpandToStay(codes[1], a_[1]);
    Multiply(a_[1], b + kApart * 64, 1);
    WgmmaWait<1>();  // a_[0] is free
  }
  // The same in two steps, the first one without x, where no stage was begun before.
  __device__ __forceinline__ void Expand(const std::byte* weights) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* tile = reinterpret_cast<const uint4*>(weights + i * kApart * kFp4TileBytes);
      const uint4 codes[2] = {tile[ThreadOfGroup()], tile[ThreadOfGroup() + 128]};
      ExpandToStay(codes, a_[i]);
    }
  }
  __device__ __forceinline__ void BeginExpanded(const std::byte* weights, const std::byte* x,
                                                const float* x_scales) {
    const uint64_t b = SmemDescriptor(__shfl_sync(0xffffffffu, SharedAddress(x), 0));
    Multiply(a_[0], b, 0);
    Multiply(a_[1], b + kApart * 64, 1);
    LoadScales(weights, x_scales);
    WgmmaWait<1>();  // a_[0] is free
  }
  // d[0] += this thread's groups of row g, d[2] of row g + 8, of the stage that was begun, if any.
  __device__ __forceinline__ void End(float (&d)[4]) { Add(x_scale_, Sums(), d); }
  // The first two of every four threads add the first block's, then the second's.
  __device__ __forceinline__ void EndInTurn(float (&d)[4]) {
    const float2 sums = Sums();
    const auto other = [](float x) { return __shfl_xor_sync(0xffffffffu, x, 2); };
    Add(x_scale_, sums, d);
    Add(other(x_scale_), {other(sums.x), other(sums.y)}, d);
  }

 private:
  // This thread's, of its two groups of one block.
  __device__ __forceinline__ void LoadScales(const std::byte* weights, const float* x_scales) {
    const int thread = ThreadOfGroup(), own = thread % 4 / 2;
    const auto* scales =
        reinterpret_cast<const uint16_t*>(weights + own * kApart * kFp4TileBytes + 4096) +
        thread / 32 * 32 + thread % 32 / 4 * 2 + thread % 2;
    low_ = scales[0], high_ = scales[16];
    x_scale_ = x_scales[own * kApart];
  }
  // Of rows g and g + 8, by the weights' scales.
  __device__ __forceinline__ float2 Sums() {
    WgmmaWait<0>();
    ReadyRegisters(sums_);
    return {Scaled(low_, sums_[0], sums_[1]), Scaled(high_, sums_[2], sums_[3])};
  }
  __device__ __forceinline__ static float Scaled(uint32_t scales, float first, float second) {
    return __fmaf_rn(ScaleOf(scales << 23), first, __fmul_rn(ScaleOf(scales << 15), second));
  }
  __device__ __forceinline__ static void Add(float x_scale, float2 sums, float (&d)[4]) {
    d[0] = __fmaf_rn(x_scale, sums.x, d[0]);
    d[2] = __fmaf_rn(x_scale, sums.y, d[2]);
  }
  __device__ __forceinline__ void Multiply(const uint32_t (&a)[4][4], uint64_t b, int accumulate) {
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<WgmmaType::kE4m3, 8>::FromRegisters(sums_, a[q], b + 2 * q, q == 0 ? accumulate : 1);
    }
    WgmmaCommit();
  }

  uint32_t a_[2][4][4];
  float sums_[4] = {};  // each group's has a place of its own, to which the others add zero
  uint32_t low_ = 0, high_ = 0;
  float x_scale_ = 0;
};

// One or two tokens, of whose groups of 32 columns each likewise takes columns of the products of
// its own: in group q's 32 bytes token e is row 2 q + e of the block's tile of x, whose other rows
// are zero there. So a thread has one group's sums of both, and scales two for a row of weights.
//
// Where the 16 bytes `unit` of token e's 128 lie in the swizzled tile.
__device__ __forceinline__ int Fp4PairOffset(int e, int unit) {
  const int row = unit / 2 * 2 + e;
  return row * 128 + (unit ^ row) * 16;
}

// d += a group's products of rows g and g + 8 with two tokens, scaled.
__device__ __forceinline__ void AddGroup(float low, float high, float2 x_scale,
                                         const float (&products)[4], float (&d)[4]) {
  d[0] = __fmaf_rn(x_scale.x, __fmul_rn(low, products[0]), d[0]);
  d[1] = __fmaf_rn(x_scale.y, __fmul_rn(low, products[1]), d[1]);
  d[2] = __fmaf_rn(x_scale.x, __fmul_rn(high, products[2]), d[2]);
  d[3] = __fmaf_rn(x_scale.y, __fmul_rn(high, products[3]), d[3]);
}

// A column block of up to eight tokens in the order of these: each group's sums are its own.
// thread: of the warpgroup.
__device__ __forceinline__ void MultiplyFp4Groups(const std::byte* weights, const std::byte* x,
                                                  const float* x_scales, int thread,
                                                  float (&d)[4][4]) {
  const auto* tile = reinterpret_cast<const uint4*>(weights);
  const uint4 codes[2] = {tile[thread], tile[thread + 128]};
  uint32_t a[4][4];
  float products[4][4];
  ExpandToStay(codes, a);
  const uint64_t b = SmemDescriptor(__shfl_sync(0xffffffffu, SharedAddress(x), 0));
  WgmmaFence();
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    Wgmma<WgmmaType::kE4m3, 8>::FromRegisters(products[q], a[q], b + 2 * q, 0);
  }
  WgmmaCommit();
  const auto* scales =
      reinterpret_cast<const uint32_t*>(weights + 4096) + thread / 32 * 16 + thread % 32 / 4;
  const uint32_t low = scales[0], high = scales[8];
  const float2 x_scale = *reinterpret_cast<const float2*>(x_scales + thread % 4 * 2);
  WgmmaWait<0>();
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    ReadyRegisters(products[q]);
    AddGroup(ScaleOfByte(low, q), ScaleOfByte(high, q), x_scale, products[q], d[q]);
  }
}

// As Fp4AloneProducts, with sums of each block: a column block of x is kTileBytes long.
template <int kApart>
class Fp4PairProducts {
 public:
  __device__ explicit Fp4PairProducts(int thread) : thread_(thread) {}  // of the warpgroup

  template <typename AwaitX, typename EndLast>
  __device__ __forceinline__ void Begin(const std::byte* weights, const std::byte* x,
                                        const float* x_scales, const AwaitX& await_x,
                                        const EndLast& end_last) {
    const uint64_t b = SmemDescriptor(__shfl_sync(0xffffffffu, SharedAddress(x), 0));
    Expand(0, weights);
    await_x();
    end_last();
    Multiply(0, b);
    Expand(1, weights);
    LoadScales(weights, x_scales);
    Multiply(1, b + kApart * (kTileBytes / 16));
    WgmmaWait<1>();  // a_[0] is free
  }
  // d += this thread's group of rows g and g + 8, two tokens each, of the stage that was begun, if
  // any.
  __device__ __forceinline__ void End(float (&d)[4]) {
    WgmmaWait<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ReadyRegisters(sums_[i]);
      AddGroup(ScaleOf(low_[i] << 23), ScaleOf(high_[i] << 23), x_scales_[i], sums_[i], d);
    }
  }

 private:
  __device__ __forceinline__ void Expand(int i, const std::byte* weights) {
    const auto* tile = reinterpret_cast<const uint4*>(weights + i * kApart * kFp4TileBytes);
    const uint4 codes[2] = {tile[thread_], tile[thread_ + 128]};
    ExpandToStay(codes, a_[i]);
  }
  __device__ __forceinline__ void LoadScales(const std::byte* weights, const float* x_scales) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* scales =
          reinterpret_cast<const uint8_t*>(weights + i * kApart * kFp4TileBytes + 4096) +
          thread_ / 32 * 64 + thread_ % 32;
      low_[i] = scales[0], high_[i] = scales[32];
      x_scales_[i] = *reinterpret_cast<const float2*>(x_scales + i * kApart * kTileRows);
    }
  }
  __device__ __forceinline__ void Multiply(int i, uint64_t b) {
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<WgmmaType::kE4m3, 8>::FromRegisters(sums_[i], a_[i][q], b + 2 * q, q != 0);
    }
    WgmmaCommit();
  }

  const int thread_;
  uint32_t a_[2][4][4];
  float sums_[2][4] = {};
  uint32_t low_[2] = {}, high_[2] = {};
  float2 x_scales_[2] = {};
};

}  // namespace fathom::kernels
