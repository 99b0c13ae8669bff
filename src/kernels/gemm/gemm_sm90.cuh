// The inner part of weight products of some tens to some hundreds of tokens on sm_90a
// (weight_stream.cuh has fewer, gemm_large_sm90.cuh more): one block multiplies
// kWarpgroups * kTiles consecutive tiles of 64 weight rows by up to kN tokens over a range of
// column blocks; warpgroup w takes the tiles w, w + kWarpgroups, …. One warp streams weights and
// activations through a ring in shared memory by bulk copies; the warpgroups multiply: the weights
// are A of wgmma, the tokens B, so that few tokens waste little. Weights do not depend on earlier
// kernels: their first stages are fetched before the block waits for its predecessor.
#pragma once

#include <cuda_bf16.h>

#include "kernels/gemm/stream_products.cuh"
#include "kernels/gemm/weight_tiles.h"
#include "kernels/gemm/wgmma.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kMaxColBlocks = 512;  // of one block's range

// What a block multiplies. Uniform over the block.
struct TileProduct {
  TileKind kind;
  const std::byte* weights;     // of its first row tile, at the first column block of the matrix
  int64_t row_tile_bytes;       // from one row tile to the next
  const uint8_t* scales;        // FP8 kinds: of its first 128 rows; else null
  int64_t scales_stride;        // to those of the next 128 rows
  const std::byte* x;           // tiles of its tokens, at the first column block
  const float* x_scales;        // FP8 activations: of its tokens, likewise
  int64_t x_block_bytes;        // from one column block of x to the next
  int64_t x_scales_stride;      // likewise, floats
  int first_block, num_blocks;  // of the matrix's column blocks
};

// The shared memory of a block. kBlocks column blocks a stage. kWideX: the weights are kFp8AsBf16,
// and a column block of x is two of BF16 tiles; else all other kinds.
template <int kN, int kRowTiles, int kBlocks, int kStages, bool kWideX>
struct Ring {
  static constexpr int kScaleRows = (kRowTiles + 1) / 2;
  static constexpr int kWeightBytes = kRowTiles * kBlocks * 8192;
  static constexpr int kXBlockBytes = kN * 128 * (kWideX ? 2 : 1);
  static constexpr int kXBytes = kBlocks * kXBlockBytes;
  static constexpr int kStageBytes = kWeightBytes + kXBytes;
  static constexpr int kOutStride = kRowTiles * 64 + 4;  // floats; spreads the banks

  alignas(1024) std::byte stages[kStages][kStageBytes];
  float x_scales[kStages][kBlocks * kN];
  float weight_scales[kScaleRows][kMaxColBlocks];
  uint64_t full[kStages], empty[kStages];

  __device__ std::byte* weights(int stage, int row_tile) {
    return stages[stage] + row_tile * kBlocks * 8192;
  }
  __device__ std::byte* x(int stage) { return stages[stage] + kWeightBytes; }
  // The result, once every stage has been used: [kN][kOutStride] floats.
  __device__ float* out() { return reinterpret_cast<float*>(stages); }
  static_assert(kN * kOutStride * 4 <= kStages * kStageBytes);
};

template <int kN, int kWarpgroups, int kTiles, int kBlocks, int kStages, bool kWideX>
class TileMultiplier {
 public:
  static constexpr int kRowTiles = kWarpgroups * kTiles;
  using Shared = Ring<kN, kRowTiles, kBlocks, kStages, kWideX>;
  static constexpr int kConsumers = kWarpgroups * 128;
  // Many tokens need more registers than all threads could have: the last warpgroup, of which one
  // thread works, gives its own to the others.
  static constexpr bool kMovesRegisters = kN >= 128;
  static constexpr int kThreads = kConsumers + (kMovesRegisters ? 128 : 32);
  static constexpr int kAccumulators = kN / 2;
  using Sums = float[kTiles][kAccumulators];

  __device__ explicit TileMultiplier(Shared& ring) : ring_(ring) {}

  // All threads, once, before anything else.
  __device__ void Init() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        BarrierInit(&ring_.full[i], 1);
        BarrierInit(&ring_.empty[i], kConsumers / 32);
      }
      BarrierInitFence();
    }
    __syncthreads();
  }

  // The threads from kConsumers.
  __device__ void Produce(const TileProduct& p) {
    if constexpr (kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x != kConsumers) return;
    const int num_stages = (p.num_blocks + kBlocks - 1) / kBlocks;
    const int ahead = min(num_stages, kStages);
    for (int i = 0; i < ahead; ++i) FetchWeights(p, i, i);
    WaitForPredecessor();
    AllowSuccessor();
    for (int i = 0; i < ahead; ++i) FetchX(p, i, i);
    for (int i = ahead; i < num_stages; ++i) {
      const int stage = i % kStages;
      BarrierWait(&ring_.empty[stage], (i / kStages - 1) & 1);
      FetchWeights(p, i, stage);
      FetchX(p, i, stage);
    }
  }

  // The warpgroups: d becomes the sums of (weight row, token) as wgmma.cuh lays them out.
  __device__ void Consume(const TileProduct& p, Sums& d) {
    if constexpr (kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    for (auto& tile : d) {
      for (float& x : tile) x = 0;
    }
    if (p.scales != nullptr) LoadWeightScales(p);
    const int num_stages = (p.num_blocks + kBlocks - 1) / kBlocks;
    for (int i = 0; i < num_stages; ++i) {
      const int stage = i % kStages;
      BarrierWait(&ring_.full[stage], (i / kStages) & 1);
      const int count = min(kBlocks, p.num_blocks - i * kBlocks);
      if (count == kBlocks) {
        Multiply<kBlocks>(p.kind, stage, 0, i * kBlocks, d);
      } else {
        for (int b = 0; b < count; ++b) Multiply<1>(p.kind, stage, b, i * kBlocks + b, d);
      }
      if (threadIdx.x % 32 == 0) BarrierArrive(&ring_.empty[stage]);
    }
  }

  // The warpgroups, after Consume: d into ring.out(), token-major.
  __device__ void StoreSums(const Sums& d) {
    NamedBarrier(1, kConsumers);
    const int row =
        static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
    float* out = ring_.out() + threadIdx.x % 4 * 2 * Shared::kOutStride + row;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        float* column = out + i * kConsumers / 2 + j * 8 * Shared::kOutStride;
        column[0] = d[i][4 * j];
        column[Shared::kOutStride] = d[i][4 * j + 1];
        column[8] = d[i][4 * j + 2];
        column[Shared::kOutStride + 8] = d[i][4 * j + 3];
      }
    }
    NamedBarrier(1, kConsumers);
  }

 private:
  __device__ static int XBlockBytes(TileKind kind) {
    return kind == TileKind::kFp8AsBf16 ? kN * 256 : kN * 128;
  }
  __device__ static bool HasXScales(TileKind kind) {
    return kind == TileKind::kFp8 || kind == TileKind::kFp4;
  }

  __device__ void FetchWeights(const TileProduct& p, int i, int stage) {
    const int count = min(kBlocks, p.num_blocks - i * kBlocks);
    const auto tile_bytes = static_cast<uint32_t>(TileMatrixBytes(p.kind));
    const uint32_t scale_bytes = HasXScales(p.kind) ? kN * 4 : 0;
    BarrierExpectBytes(&ring_.full[stage],
                       count * (kRowTiles * tile_bytes + XBlockBytes(p.kind) + scale_bytes));
    for (int r = 0; r < kRowTiles; ++r) {
      const std::byte* from =
          p.weights + r * p.row_tile_bytes + int64_t{p.first_block + i * kBlocks} * tile_bytes;
      BulkCopy(ring_.weights(stage, r), from, count * tile_bytes, &ring_.full[stage]);
    }
  }

  __device__ void FetchX(const TileProduct& p, int i, int stage) {
    const int count = min(kBlocks, p.num_blocks - i * kBlocks);
    for (int b = 0; b < count; ++b) {
      const int block = p.first_block + i * kBlocks + b;
      if (p.kind == TileKind::kFp8AsBf16) {  // 128 columns are two blocks of BF16 tiles
        for (int half = 0; half < 2; ++half) {
          BulkCopy(ring_.x(stage) + b * Shared::kXBlockBytes + half * kN * 128,
                   p.x + (2 * block + half) * p.x_block_bytes, kN * 128, &ring_.full[stage]);
        }
        continue;
      }
      BulkCopy(ring_.x(stage) + b * Shared::kXBlockBytes, p.x + block * p.x_block_bytes, kN * 128,
               &ring_.full[stage]);
      if (HasXScales(p.kind)) {
        BulkCopy(&ring_.x_scales[stage][b * kN], p.x_scales + block * p.x_scales_stride, kN * 4,
                 &ring_.full[stage]);
      }
    }
  }

  __device__ void LoadWeightScales(const TileProduct& p) {
    for (int r = 0; r < Shared::kScaleRows; ++r) {
      for (int i = static_cast<int>(threadIdx.x); i < p.num_blocks; i += kConsumers) {
        ring_.weight_scales[r][i] = Ue8m0Value(p.scales[r * p.scales_stride + p.first_block + i]);
      }
    }
    NamedBarrier(1, kConsumers);
  }

  template <int kCount>
  __device__ void Multiply(TileKind kind, int stage, int b, int block, Sums& d) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int tile = i * kWarpgroups + static_cast<int>(threadIdx.x) / 128;
      if constexpr (kWideX) {
        for (int c = 0; c < kCount; ++c) {
          MultiplyWide<kN>(ring_.weights(stage, tile) + (b + c) * 8192,
                           ring_.x(stage) + (b + c) * Shared::kXBlockBytes,
                           ring_.weight_scales[tile / 2][block + c], d[i]);
        }
      } else if (kind == TileKind::kFp8) {
        Fp8Blocks<kCount>(stage, tile, b, block, d[i]);
      } else if (kind == TileKind::kFp4) {
        for (int c = 0; c < kCount; ++c) Fp4Block(stage, tile, b + c, d[i]);
      } else {
        MultiplyBf16<kN, kCount>(ring_.weights(stage, tile) + b * 8192,
                                 ring_.x(stage) + b * Shared::kXBlockBytes, d[i]);
      }
    }
  }

  __device__ int thread() const { return static_cast<int>(threadIdx.x) % 128; }
  __device__ uint64_t WeightDescriptor(int stage, int tile, int b) {
    return SmemDescriptor(SharedAddress(ring_.weights(stage, tile) + b * 8192));
  }
  __device__ uint64_t XDescriptor(int stage, int b) {
    return SmemDescriptor(SharedAddress(ring_.x(stage) + b * Shared::kXBlockBytes));
  }

  // d += product * row_scale * (the tokens' scales).
  __device__ void AddScaled(const float* product, const float* x_scales, float low_rows,
                            float high_rows, float (&d)[kAccumulators]) {
    const float* scales = x_scales + thread() % 4 * 2;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float2 s = *reinterpret_cast<const float2*>(scales + j * 8);
      d[4 * j] += product[4 * j] * (low_rows * s.x);
      d[4 * j + 1] += product[4 * j + 1] * (low_rows * s.y);
      d[4 * j + 2] += product[4 * j + 2] * (high_rows * s.x);
      d[4 * j + 3] += product[4 * j + 3] * (high_rows * s.y);
    }
  }

  template <int kCount>
  __device__ void Fp8Blocks(int stage, int tile, int b, int block, float (&d)[kAccumulators]) {
    float product[kCount][kAccumulators];
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint64_t weights = WeightDescriptor(stage, tile, b + i);
      const uint64_t x = XDescriptor(stage, b + i);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        Wgmma<WgmmaType::kE4m3, kN>::FromSmem(product[i], weights + 2 * q, x + 2 * q, q != 0);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float scale = ring_.weight_scales[tile / 2][block + i];
      AddScaled(product[i], &ring_.x_scales[stage][(b + i) * kN], scale, scale, d);
    }
  }

  // Eight FP4 codes to two registers of e4m3 codes times 2^shift.
  __device__ static void Expand(uint32_t word, int shift, uint32_t& first, uint32_t& second) {
    const uint32_t low = 0x3c383000u + static_cast<uint32_t>(shift) * 0x08080800u;
    const uint32_t high = 0x4c484440u + static_cast<uint32_t>(shift) * 0x08080808u;
    const uint32_t magnitudes = word & 0x77777777u;
    first = __byte_perm(low, high, magnitudes) | (word & 0x80808080u);
    second = __byte_perm(low, high, magnitudes >> 16) | ((word << 4) & 0x80808080u);
  }

  __device__ static int LargestByte(uint32_t bytes) {
    const uint32_t pairs = __vmaxu4(bytes, bytes >> 16);
    return static_cast<int>(__vmaxu4(pairs, pairs >> 8) & 255u);
  }

  // FP4 weights: the scales of four groups of 32 columns are folded into the e4m3 codes, relative
  // to the largest of them: exact down to 2^-11 of it.
  __device__ void Fp4Block(int stage, int tile, int b, float (&d)[kAccumulators]) {
    const std::byte* data = ring_.weights(stage, tile) + b * 4352;
    const auto* codes = reinterpret_cast<const uint4*>(data) + thread();
    const auto* scales =
        reinterpret_cast<const uint32_t*>(data + 4096) + thread() / 32 * 16 + thread() % 32 / 4;
    const uint32_t low_scales = scales[0], high_scales = scales[8];
    const int low_max = LargestByte(low_scales), high_max = LargestByte(high_scales);
    uint32_t a[4][4];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint4 chunk = codes[c * 128];
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int q = 2 * c + i;
        const int low_shift = static_cast<int>(low_scales >> (8 * q) & 255u) - low_max + 6;
        const int high_shift = static_cast<int>(high_scales >> (8 * q) & 255u) - high_max + 6;
        Expand(words[2 * i], max(low_shift, -5), a[q][0], a[q][2]);
        Expand(words[2 * i + 1], max(high_shift, -5), a[q][1], a[q][3]);
      }
    }
    const uint64_t x = XDescriptor(stage, b);
    float product[kAccumulators];
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<WgmmaType::kE4m3, kN>::FromRegisters(product, a[q], x + 2 * q, q != 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    AddScaled(product, &ring_.x_scales[stage][b * kN], Ue8m0Value(low_max) * 0x1p-6f,
              Ue8m0Value(high_max) * 0x1p-6f, d);
  }

  Shared& ring_;
};

// The sum at `p` over the blocks of a cluster that shared the columns, in rank order.
__device__ inline float ClusterSum(const float* p, int split) {
  if (split == 1) return *p;
  float sum = LoadFromBlock(p, 0);
  for (int rank = 1; rank < split; ++rank) sum += LoadFromBlock(p, static_cast<uint32_t>(rank));
  return sum;
}

}  // namespace fathom::kernels
