// Ranks of scored entries: (score, entry) as one number, the better the larger; ranges of ranks,
// which histograms cut into bins; sums over a block. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/ordered.cuh"
#include "kernels/warp_sums.cuh"

namespace fathom::kernels {

inline constexpr int kRankBins = 4096;

// The score's bin: 64 to a power of two between 2^-16 and 2^16.
inline constexpr int kScoreBinShift = 17, kFirstScoreStep = 111 << 6;
__device__ __forceinline__ int ScoreBin(float score) {
  const uint32_t u = __float_as_uint(score + 0.0f);
  const int step = static_cast<int>((u & 0x7fffffffu) >> kScoreBinShift) - kFirstScoreStep;
  return 2048 + (min(max(step, 0), 2047) ^ static_cast<int>(u) >> 31);
}

__device__ __forceinline__ uint64_t RankKey(uint32_t ordered, int entry) {
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(entry));
}
__device__ __forceinline__ uint64_t RankOf(float score, int entry) {
  return RankKey(OrderedKey(score), entry);
}

__device__ __forceinline__ uint32_t High(uint64_t rank) {
  return static_cast<uint32_t>(rank >> 32);
}
__device__ __forceinline__ uint32_t Low(uint64_t rank) { return static_cast<uint32_t>(rank); }
__device__ __forceinline__ uint64_t RankOfHalves(uint32_t high, uint32_t low) {
  return uint64_t{high} << 32 | low;
}
__device__ __forceinline__ int EntryOf(uint64_t rank) {
  return static_cast<int>(0xffffffffu - Low(rank));
}

// Ranks from low to high, both included.
struct RankRange {
  uint64_t low, high;

  // Of the scores in a bin of ScoreBin.
  __device__ static RankRange OfBin(int bin) {
    const bool positive = bin >= 2048;
    const int step = positive ? bin - 2048 : 2047 - bin;
    const uint32_t least =
        step == 0 ? 0 : static_cast<uint32_t>(step + kFirstScoreStep) << kScoreBinShift;
    const uint32_t most =
        step == 2047 ? 0x7fffffffu
                     : (static_cast<uint32_t>(step + 1 + kFirstScoreStep) << kScoreBinShift) - 1;
    const uint32_t low = positive ? least | 0x80000000u : ~(most | 0x80000000u);
    const uint32_t high = positive ? most | 0x80000000u : ~(least | 0x80000000u);
    return {uint64_t{low} << 32, uint64_t{high} << 32 | 0xffffffffu};
  }

  __device__ bool Contains(uint64_t rank) const { return rank >= low && rank <= high; }
  // Without ranks of entries that do not exist, where that is easily said.
  __device__ RankRange Without(int num_entries) const {
    if (low >> 32 != high >> 32) return *this;
    return {max(low, RankKey(static_cast<uint32_t>(low >> 32), num_entries - 1)), high};
  }
  // Bin i of `bins`, a power of two, are the ranks with (rank - low) >> shift = i.
  __device__ int ShiftForBins(int bins) const {
    return max(0, 64 - __clzll(static_cast<int64_t>(high - low)) - (31 - __clz(bins)));
  }
  __device__ RankRange Bin(int i, int shift) const {
    const uint64_t from = low + (static_cast<uint64_t>(i) << shift);
    return {from, min(high, from + (uint64_t{1} << shift) - 1)};
  }
};

// The sum of x over threads before this one, and over all kWarps warps of the block in `total`.
template <int kWarps>
__device__ int BlockScan(int x, int* warp_sums, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int inclusive = WarpInclusiveSum(x);
  __syncthreads();
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  const int warps = WarpInclusiveSum(lane < kWarps ? warp_sums[lane] : 0);
  total = __shfl_sync(0xffffffffu, warps, 31);
  const int before = __shfl_sync(0xffffffffu, warps, (warp + 31) % 32);
  return (warp == 0 ? 0 : before) + inclusive - x;
}

}  // namespace fathom::kernels
