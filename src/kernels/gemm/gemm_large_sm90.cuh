// The inner part of weight products of many tokens on sm_90a. A block multiplies 256 tokens by 128
// weight rows, one such tile after another: the tokens are A of wgmma, four tiles of 64, two for
// each of two warpgroups; the weights are B. So a token's FP8 scale is one factor for all that a
// thread adds to a sum. A third warpgroup streams both through a ring in shared memory by bulk
// copies, ahead of the sums and across tiles.
//   kFp8: sums of 128 columns are the tensor core's own, scaled and added up in FP32.
//   kBf16: FP32 sums of the tensor core.
// FP4 weights are the experts' (grouped_gemm/fp4_multiplier.cuh), FP8 ones of BF16 activations
// gemm_widened.cu's.
#pragma once

#include <cuda_bf16.h>

#include "kernels/gemm/weight_tiles.h"
#include "kernels/gemm/wgmma.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kLargeTokens = 256;  // of a tile
inline constexpr int kLargeRows = 128;    // weight rows of a tile, two row tiles
inline constexpr int kLargeStages = 4;
inline constexpr int kMathWarpgroups = 2;
inline constexpr int kMathThreads = 128 * kMathWarpgroups;
inline constexpr int kLargeThreads = kMathThreads + 128;  // of the last ones one works

// The sums of a thread: of token tile (warpgroup + 2 i), rows and columns as wgmma.cuh lays out.
using LargeSums = float[2][64];

// What a block multiplies. A step is 128 bytes of the columns of x.
struct LargeTile {
  const std::byte* weights[2];  // its row tiles, at the first column block
  const uint8_t* scales[2];     // FP8 kinds: the scales of their 128 rows
  const std::byte* x;           // tiles of its tokens, at the first step
  const float* x_scales;        // FP8 activations
  int64_t x_step_bytes;         // from one step of x to the next; of its scales: 1 / 32 of it
  int num_steps;
  int token_tiles;  // of 64 tokens, 1 to 4
};

template <TileKind kKind>
struct LargeRing {
  static constexpr bool kFp8X = kKind == TileKind::kFp8;

  alignas(1024) std::byte x[kLargeStages][kLargeTokens * 128];
  std::byte weights[kLargeStages][kLargeRows * 128];
  float x_scales[kFp8X ? kLargeStages : 1][kFp8X ? kLargeTokens : 1];
  float exchanged[2][kFp8X ? kLargeTokens : 1];  // for the other block of a cluster
  uint64_t full[kLargeStages], empty[kLargeStages];
  uint64_t exchange[kMathWarpgroups];
};

// Walks the tiles first, first + stride, … of `work`: int count(), LargeTile tile(int index), and
// void Write(int index, LargeSums&) on the two warpgroups that add up. The ring is ready before
// Run; every thread of the block calls it once.
template <TileKind kKind, typename Work>
class LargeMultiplier {
 public:
  using Ring = LargeRing<kKind>;

  __device__ LargeMultiplier(Ring& ring, Work& work, int first, int stride)
      : ring_(ring), work_(work), first_(first), stride_(stride) {}

  __device__ static void Init(Ring& ring) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kLargeStages; ++i) {
        BarrierInit(&ring.full[i], 1);
        BarrierInit(&ring.empty[i], kMathThreads / 32 * kWarpArrivals);
      }
      for (uint64_t& exchange : ring.exchange) BarrierInit(&exchange, 1);
      BarrierInitFence();
    }
    __syncthreads();
  }

  __device__ void Run() {
    if (threadIdx.x >= kMathThreads) {
      GiveRegisters<56>();
      if (threadIdx.x == kMathThreads) Produce();
    } else {
      TakeRegisters<224>();
      Multiply();
    }
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x) % 128; }
  __device__ int warpgroup() const { return warpgroup_; }

  // One thread.
  __device__ void Produce() {
    int stage = 0;
    uint32_t parity = 1;
    for (int i = first_; i < work_.count(); i += stride_) {
      const LargeTile tile = work_.tile(i);
      const std::byte *x = tile.x, *first = tile.weights[0], *second = tile.weights[1];
      const float* x_scales = tile.x_scales;
      const auto bytes = static_cast<uint32_t>(tile.token_tiles) * 8192;
      const uint32_t scale_bytes = Ring::kFp8X ? static_cast<uint32_t>(tile.token_tiles) * 256 : 0;
      for (int k = 0; k < tile.num_steps; ++k) {
        uint64_t* const full = &ring_.full[stage];
        BarrierWait(&ring_.empty[stage], parity);
        BarrierExpectBytes(full, bytes + scale_bytes + kLargeRows * 128);
        BulkCopy(ring_.x[stage], x, bytes, full);
        BulkCopy(ring_.weights[stage], first, 8192, full);
        BulkCopy(ring_.weights[stage] + 8192, second, 8192, full);
        if constexpr (Ring::kFp8X) {
          BulkCopy(ring_.x_scales[stage], x_scales, scale_bytes, full);
          x_scales += tile.x_step_bytes / 128;
        }
        x += tile.x_step_bytes, first += 8192, second += 8192;
        if (++stage == kLargeStages) stage = 0, parity ^= 1;
      }
    }
  }

  // The warpgroups that add up.
  __device__ void Multiply() {
    int step = 0;
    LargeSums d;
    for (int i = first_; i < work_.count(); i += stride_) {
      const LargeTile tile = work_.tile(i);
      for (auto& sums : d) {
        for (float& x : sums) x = 0;
      }
      const int mine = (tile.token_tiles - warpgroup() + kMathWarpgroups - 1) / kMathWarpgroups;
      if (mine == 2) {
        AddSteps<2>(tile, step, d);
      } else if (mine == 1) {
        AddSteps<1>(tile, step, d);
      } else {
        AddSteps<0>(tile, step, d);
      }
      step += tile.num_steps;
      work_.Write(i, d);
    }
  }

  // kMine: of the four token tiles.
  template <int kMine>
  __device__ void AddSteps(const LargeTile& tile, int step, LargeSums& d) {
    uint32_t next[2] = {ScaleByte(tile, 0, 0), ScaleByte(tile, 1, 0)};
    for (int k = 0; k < tile.num_steps; ++k, ++step) {
      const int stage = step % kLargeStages;
      const float scales[2] = {Ue8m0Value(next[0]), Ue8m0Value(next[1])};
      next[0] = ScaleByte(tile, 0, k + 1);
      next[1] = ScaleByte(tile, 1, k + 1);
      BarrierWait(&ring_.full[stage], step / kLargeStages & 1);
      if constexpr (kMine == 0) {
        Release(stage);
      } else if constexpr (Ring::kFp8X) {
        AddScaledStep<kMine>(stage, scales, d);
      } else {
        AddStep<kMine>(stage, d);
      }
    }
  }

  __device__ uint64_t XDescriptor(int stage, int token_tile) {
    return SmemDescriptor(SharedAddress(ring_.x[stage] + token_tile * 8192));
  }
  __device__ uint64_t WeightDescriptor(int stage) {
    return SmemDescriptor(SharedAddress(ring_.weights[stage]));
  }
  // Behind what multiplies from there.
  __device__ void Release(int stage) { WarpArrive(&ring_.empty[stage]); }

  template <int kMine>
  __device__ void AddStep(int stage, LargeSums& d) {
    const uint64_t weights = WeightDescriptor(stage);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const uint64_t x = XDescriptor(stage, warpgroup() + kMathWarpgroups * i);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        Wgmma<WgmmaType::kBf16, kLargeRows>::FromSmem(d[i], x + 2 * q, weights + 2 * q, 1);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    Release(stage);
  }

  __device__ static uint32_t ScaleByte(const LargeTile& tile, int half, int k) {
    return kKind == TileKind::kFp8 && k < tile.num_steps ? __ldg(tile.scales[half] + k) : 127u;
  }

  template <int kMine>
  __device__ void AddScaledStep(int stage, const float (&scales)[2], LargeSums& d) {
    const float* x_scales = ring_.x_scales[stage] + thread() / 32 * 16 + thread() % 32 / 4;
    const uint64_t weights = WeightDescriptor(stage);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int token_tile = warpgroup() + kMathWarpgroups * i;
      const float low = x_scales[token_tile * 64], high = x_scales[token_tile * 64 + 8];
      const uint64_t x = XDescriptor(stage, token_tile);
      float product[64];
      WgmmaFence();
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        Wgmma<WgmmaType::kE4m3, kLargeRows>::FromSmem(product, x + 2 * q, weights + 2 * q, q != 0);
      }
      WgmmaCommit();
      WgmmaWait<0>();
      if (i == kMine - 1) {
        WarpHandBackBehind(&ring_.empty[stage], true, low, high, UnknownZero());
      }
      AddScaled(product, low, high, scales, d[i]);
    }
  }

  __device__ static void AddScaled(const float (&product)[64], float low, float high,
                                   const float (&scales)[2], float (&d)[64]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float low_scale = low * scales[h], high_scale = high * scales[h];
#pragma unroll
      for (int j = 8 * h; j < 8 * h + 8; ++j) {
        d[4 * j] += product[4 * j] * low_scale;
        d[4 * j + 1] += product[4 * j + 1] * low_scale;
        d[4 * j + 2] += product[4 * j + 2] * high_scale;
        d[4 * j + 3] += product[4 * j + 3] * high_scale;
      }
    }
  }

  Ring& ring_;
  Work& work_;
  const int first_, stride_;
  // A shuffle's result is the same in all lanes, for the compiler, too.
  const int warpgroup_ = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
};

}  // namespace fathom::kernels
