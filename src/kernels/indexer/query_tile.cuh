// A row tile, half of a head, of the product that one token's index queries are, by a block of the
// selection that reads them: its weights and their scales are there before it waits, and its rows
// go to the first block of the cluster of two that has the head, so that no launch lies between the
// product and the selection. The sums have the order of gemm_cuda.h's products: the same bits.
// Device code only.
#pragma once

#include "kernels/gemm/resident_weights.cuh"
#include "kernels/indexer/index_query.cuh"
#include "kernels/launch.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kHeadTiles = kIndexDim / kTileMatrixRows;  // a cluster

struct QueryTileShared {
  alignas(128) std::byte x[kResidentBlocks * 128 + kBehindToken];
  float x_scales[kResidentBlocks], w_scales[kResidentBlocks];
  uint64_t landed;  // one for all: to look at each takes 50 cycles
  // Of the cluster's first block.
  alignas(8) uint32_t head[kIndexDim / 2];  // pairs of BF16
  uint64_t head_landed;
};

class QueryTile {
 public:
  using Weights = std::byte[kResidentBlocks][kWeightTileBytes];  // at a multiple of 1,024 bytes

  __device__ QueryTile(const GemmProblem& p, int tile, QueryTileShared& shared, Weights& weights)
      : p_(p), tile_(tile), s_(shared), weights_(weights) {}

  __device__ bool exists() const { return tile_ < p_.w.row_tiles(); }
  // By the first warp, before the wait. KeepScales, and then a ClusterSync, have to follow.
  __device__ void Prefetch() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (lane == 0) {
      BarrierInit(&s_.landed, 1);
      BarrierInit(&s_.head_landed, 1);
      BarrierInitFence();
      BarrierExpectBytes(&s_.landed, sizeof(Weights));
      BarrierExpectBytes(&s_.head_landed, sizeof(s_.head));
    }
    __syncwarp();
    if (lane >= kResidentBlocks) return;
    const std::byte* from =
        p_.w.tiles + (int64_t{tile_} * kResidentBlocks + lane) * kWeightTileBytes;
    BulkCopyOnce(weights_[lane], from, kWeightTileBytes, &s_.landed);
    scale_ = p_.w.scales[tile_ / 2 * kResidentBlocks + lane];
  }
  __device__ void KeepScales() const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (lane < kResidentBlocks) s_.w_scales[lane] = Ue8m0Value(scale_);
  }
  // Nobody may leave before.
  __device__ void AwaitWeights() const { BarrierWait(&s_.landed, 0); }
  // By the first kResidentThreads threads, behind the wait.
  __device__ void Multiply() const {
    const auto thread = static_cast<int>(threadIdx.x);
    const Fp8Tiles& x = p_.x_fp8;
    if (thread < kResidentBlocks * 8) {
      reinterpret_cast<uint4*>(s_.x)[thread] =
          *reinterpret_cast<const uint4*>(x.codes + Fp8TileOffset(0, thread * 16, x.row_groups));
    } else if (thread < kResidentBlocks * 9) {
      const int block = thread - kResidentBlocks * 8;
      s_.x_scales[block] = x.scales[block * x.row_groups * 8];
    }
    FenceSharedForWgmma();
    NamedBarrier(1, kResidentThreads);
    AwaitWeights();
    Send(MultiplyLandedFp8(weights_, TokenDescriptor(s_.x), s_.w_scales, s_.x_scales));
  }
  // By a warp of the cluster's first block: the lane's pairs of the head.
  __device__ void AwaitHead(uint32_t (&pairs)[2]) const {
    BarrierWaitCluster(&s_.head_landed, 0);
    const uint2 two = reinterpret_cast<const uint2*>(s_.head)[threadIdx.x % 32];
    pairs[0] = two.x, pairs[1] = two.y;
  }

 private:
  // sums: as StoreRowTile has them.
  __device__ void Send(float2 sums) const {
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const float2 next{__shfl_down_sync(0xffffffffu, sums.x, 4),
                      __shfl_down_sync(0xffffffffu, sums.y, 4)};
    if (lane % 8 != 0) return;
    const int row = tile_ % kHeadTiles * kTileMatrixRows + threadIdx.x / 32 * 16 + lane / 4;
    const uint32_t to = AddressInBlock(s_.head + row / 2, 0);
    const uint32_t landed = AddressInBlock(&s_.head_landed, 0);
    SendInCluster(to, __uint_as_float(PackBf16(sums.x, next.x)), landed);
    SendInCluster(to + 16, __uint_as_float(PackBf16(sums.y, next.y)), landed);
  }

  const GemmProblem& p_;
  const int tile_;
  QueryTileShared& s_;
  Weights& weights_;
  uint32_t scale_ = 0;  // of the lane's column block
};

}  // namespace fathom::kernels
