// Counts of ranks (ranks.cuh) in bins, in shared memory, and narrowing a range of ranks to few by
// them. Bins are counted one by one and 64 at a time, so that a warp finds the bin of the k-th for
// itself; where a block has many, one does it for all, as their instructions take turns. Device
// code only.
#pragma once

#include "kernels/indexer/ranks.cuh"

namespace fathom::kernels {

// The bin in which the count from the top reaches what was wanted: of its `count`, the `missing`
// best are within that. Where there are fewer in all bins than wanted: the lowest bin, and count <
// missing.
struct FoundBin {
  int bin, missing, count;
};

// Of 64 counts. Lane l of the warp has the pair of bins 62 - 2 l and 63 - 2 l.
__device__ __forceinline__ FoundBin FindOf64(int2 two, int wanted) {
  const int first = 62 - 2 * static_cast<int>(threadIdx.x % 32);
  const int above = WarpInclusiveSum(two.x + two.y) - two.x - two.y;
  const bool upper = above + two.y >= wanted;
  const int missing = wanted - above - (upper ? 0 : two.y), count = upper ? two.y : two.x;
  const int at = 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, above < wanted)));
  return {__shfl_sync(0xffffffffu, first + (upper ? 1 : 0), at),
          __shfl_sync(0xffffffffu, missing, at), __shfl_sync(0xffffffffu, count, at)};
}
// The lane's pair.
__device__ __forceinline__ int2 PairOf64(const int* counts) {
  return reinterpret_cast<const int2*>(counts)[31 - threadIdx.x % 32];
}

// Of a block of kThreads threads; all of them call these.
template <int kThreads>
struct RankBins {
  static_assert(kThreads >= kRankBins / 64);

  alignas(16) int bins[kRankBins];
  alignas(8) int sums[kRankBins / 64];  // of the bins
  FoundBin found;

  // A __syncthreads has to follow.
  __device__ void Clear() {
#pragma unroll
    for (int i = threadIdx.x; i < kRankBins / 4; i += kThreads) {
      reinterpret_cast<int4*>(bins)[i] = int4{0, 0, 0, 0};
    }
    if (threadIdx.x < kRankBins / 64) sums[threadIdx.x] = 0;
  }
  __device__ void Count(int bin) {
    atomicAdd(bins + bin, 1);
    atomicAdd(sums + static_cast<unsigned>(bin) / 64, 1);
  }

  // When all have been counted. By a warp.
  __device__ FoundBin FindByWarp(int wanted) const {
    const FoundBin group = FindOf64(PairOf64(sums), wanted);
    FoundBin of_group = FindOf64(PairOf64(bins + group.bin * 64), group.missing);
    of_group.bin += group.bin * 64;
    return of_group;
  }
  // The same by the first warp, for all. Nothing is cleared before another __syncthreads.
  __device__ FoundBin Find(int wanted) {
    if (threadIdx.x < 32) {
      const FoundBin by_warp = FindByWarp(wanted);
      if (threadIdx.x == 0) found = by_warp;
    }
    __syncthreads();
    return found;
  }
};

// Cuts the range, of which the `missing` best of `count` are wanted, until `enough` says so of what
// is left. for_each(body): body(rank) for the thread's ranks, of entries below num_entries. By all
// kThreads threads of a block.
template <int kThreads, typename Enough, typename ForEach>
__device__ inline void Narrow(RankBins<kThreads>& bins, RankRange& range, FoundBin& found,
                              int num_entries, const Enough& enough, const ForEach& for_each) {
#pragma unroll 1
  while (!enough(found)) {
    range = range.Without(num_entries);
    const int shift = range.ShiftForBins(kRankBins);
    __syncthreads();
    bins.Clear();
    __syncthreads();
    for_each([&](uint64_t rank) {
      if (range.Contains(rank)) bins.Count(static_cast<int>((rank - range.low) >> shift));
    });
    __syncthreads();
    found = bins.Find(found.missing);
    range = range.Bin(found.bin, shift);
  }
}

}  // namespace fathom::kernels
