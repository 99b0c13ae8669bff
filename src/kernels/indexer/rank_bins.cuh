// Counts of ranks (ranks.cuh) in bins, in shared memory, and narrowing a range of ranks to few by
// them. A warp sums its bins, so that one finds the k-th among its own: what is counted costs one
// addition, and all warps looking for it would queue for the shuffles. Device code only.
#pragma once

#include "kernels/indexer/ranks.cuh"

namespace fathom::kernels {

// The bin in which the count from the top reaches what was wanted: of its `count`, the `missing`
// best are within that. Where there are fewer in all bins than wanted: the lowest bin, and count <
// missing.
struct FoundBin {
  int bin, missing, count;
};

// Of a block of kThreads threads; all of them call these.
template <int kThreads>
struct RankBins {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kOwn = kRankBins / kThreads;  // of a thread
  static_assert(kRankBins % kThreads == 0 && kOwn % 4 == 0 && kWarps <= 32);

  alignas(16) int bins[kRankBins];
  int warp_sums[kWarps];
  FoundBin found;

  // A __syncthreads has to follow.
  __device__ void Clear() {
#pragma unroll
    for (int i = threadIdx.x; i < kRankBins / 4; i += kThreads) {
      reinterpret_cast<int4*>(bins)[i] = int4{0, 0, 0, 0};
    }
  }
  __device__ void Count(int bin) { atomicAdd(bins + bin, 1); }

  // When all have been counted. Nothing is cleared before another __syncthreads.
  __device__ FoundBin Find(int wanted) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Downwards: lane 0 has the top of a warp's.
    const int first = (warp * 32 + 31 - lane) * kOwn;
    int counts[kOwn], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const int4 four = reinterpret_cast<const int4*>(bins)[(first + i) / 4];
      counts[i] = four.x, counts[i + 1] = four.y, counts[i + 2] = four.z, counts[i + 3] = four.w;
      sum += four.x + four.y + four.z + four.w;
    }
    const int through = WarpInclusiveSum(sum);
    if (lane == 31) warp_sums[warp] = through;
    __syncthreads();
    const int others = lane < kWarps ? warp_sums[lane] : 0;
    const int total = __reduce_add_sync(0xffffffffu, others);
    const int above = __reduce_add_sync(0xffffffffu, lane > warp ? others : 0);
    if (total < wanted) return {0, wanted - total + bins[0], bins[0]};
    int missing = wanted - above - (through - sum);
    if (missing > 0 && missing <= sum) {
#pragma unroll
      for (int i = kOwn - 1; i >= 0; --i) {
        if (missing > 0 && missing <= counts[i]) found = {first + i, missing, counts[i]};
        missing -= counts[i];
      }
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
