// A row tile of the product that one token's index queries are, by a block of the selection that
// reads them: its weights are there before it waits, and its rows go to all blocks as numbered
// words (numbered_words.cuh), so that no launch lies between the product and the selection. The
// sums have the order of gemm_cuda.h's products: the same bits. Device code only.
#pragma once

#include "kernels/gemm/resident_weights.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {

struct QueryTileShared {
  alignas(128) std::byte x[kResidentBlocks * 128 + kBehindToken];
  float x_scales[kResidentBlocks];
  uint64_t landed[kResidentBlocks];
};

class QueryTile {
 public:
  using Weights = std::byte[kResidentBlocks][kWeightTileBytes];  // at a multiple of 1,024 bytes

  __device__ QueryTile(const GemmProblem& p, int tile, QueryTileShared& shared, Weights& weights)
      : p_(p), tile_(tile), s_(shared), weights_(weights) {}

  __device__ bool exists() const { return tile_ < p_.w.row_tiles(); }
  // By the first warp, before the wait. A __syncthreads has to follow.
  __device__ void Prefetch() const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (lane == 0) {
      for (uint64_t& barrier : s_.landed) BarrierInit(&barrier, 1);
      BarrierInitFence();
    }
    __syncwarp();
    if (lane >= kResidentBlocks) return;
    const std::byte* from =
        p_.w.tiles + (int64_t{tile_} * kResidentBlocks + lane) * kWeightTileBytes;
    BarrierExpectBytes(&s_.landed[lane], kWeightTileBytes);
    BulkCopyOnce(weights_[lane], from, kWeightTileBytes, &s_.landed[lane]);
  }
  // Nobody may leave before.
  __device__ void AwaitWeights() const {
    for (uint64_t& landed : s_.landed) BarrierWait(&landed, 0);
  }
  // By the first kResidentThreads threads, behind the wait.
  __device__ void Multiply(uint32_t number) const {
    const auto thread = static_cast<int>(threadIdx.x);
    const Fp8Tiles& x = p_.x_fp8;
    if (thread < kResidentBlocks * 8) {
      reinterpret_cast<uint4*>(s_.x)[thread] =
          *reinterpret_cast<const uint4*>(x.codes + Fp8TileOffset(0, thread * 16, x.row_groups));
    } else if (thread < kResidentBlocks * 9) {
      const int block = thread - kResidentBlocks * 8;
      s_.x_scales[block] = x.scales[block * x.row_groups * 8];
    }
    float scale[kResidentBlocks];
    LoadScales(p_.w.scales + tile_ / 2 * kResidentBlocks, scale);
    FenceSharedForWgmma();
    NamedBarrier(1, kResidentThreads);
    AwaitWeights();
    const float2 sums = MultiplyLandedFp8(weights_, TokenDescriptor(s_.x), scale, s_.x_scales);
    StoreRowTile(p_, tile_, sums, number);
  }

 private:
  const GemmProblem& p_;
  const int tile_;
  QueryTileShared& s_;
  Weights& weights_;
};

}  // namespace fathom::kernels
