// The exact topk of a row of scores by one block: higher score first, then the lower entry; the
// chosen entries come out ascending. A histogram of 4096 monotone bins finds the bin of the k-th
// score; entries of higher bins are chosen at once, those of that bin are chosen by radix selection
// on (score, entry). Chosen entries are bits in shared memory. A long row may be shared out:
// several blocks sort its entries by bin, the last of them does the rest. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fathom::kernels {

inline constexpr int kTopkThreads = 1024;  // 32 warps of 32
inline constexpr int kTopkBins = 4096;
inline constexpr int kTopkCandidates = 4096;  // kept in shared memory; more are read again

// Sorts as the score does, NaN included; -0 is 0.
__device__ __forceinline__ uint32_t OrderedScore(float score) {
  const uint32_t u = __float_as_uint(score + 0.0f);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}
// The bin of an ordered score: 64 to a power of two between 2^-16 and 2^16.
__device__ __forceinline__ int ScoreBin(uint32_t ordered) {
  const bool positive = (ordered & 0x80000000u) != 0;
  const uint32_t magnitude = (positive ? ordered : ~ordered) & 0x7fffffffu;
  const int step = min(max(static_cast<int>(magnitude >> 17) - (111 << 6), 0), 2047);
  return positive ? 2048 + step : 2047 - step;
}
// (score, entry) as one number: the better, the larger.
__device__ __forceinline__ uint64_t RankKey(uint32_t ordered, int entry) {
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(entry));
}

struct TopkShared {
  int bins[kTopkBins];
  uint64_t candidates[kTopkCandidates];
  int warp_sums[kTopkThreads / 32];
  int num_candidates;
  int chosen_bin;  // of the k-th
  int missing;     // how many of that bin are chosen
};
// What the blocks of a shared row have in common, in device memory; zero between rows.
struct TopkCounters {
  int bins[kTopkBins];
  int num_candidates;
  int num_done;  // blocks
  int unused[2];
};

// The bits of `entries` entries follow.
inline size_t TopkSharedBytes(int entries) {
  return sizeof(TopkShared) + static_cast<size_t>((entries + 31) / 32) * 4;
}

__device__ __forceinline__ int WarpInclusiveSum(int x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, x, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) x += other;
  }
  return x;
}
// The sum of x over threads before this one, and over all in `total`.
__device__ inline int BlockScan(int x, int* warp_sums, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int inclusive = WarpInclusiveSum(x);
  __syncthreads();
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  const int warps = WarpInclusiveSum(warp_sums[lane]);  // as many warps as lanes
  total = __shfl_sync(0xffffffffu, warps, 31);
  const int before = __shfl_sync(0xffffffffu, warps, (warp + 31) % 32);
  return (warp == 0 ? 0 : before) + inclusive - x;
}

class TopkRow {
 public:
  __device__ TopkRow(const float* scores, int size, int topk, TopkShared& shared, uint32_t* bits)
      : scores_(scores), size_(size), topk_(topk), s_(shared), bits_(bits) {}

  __device__ void Run(int32_t* selected) {
    CountBins();
    FindBin(kTopkBins, topk_);
    SortByBin(0, num_words(), bits_);
    ChooseFromBin();
    Emit(selected);
  }

  // One block's part of a row whose bins are counted: words of 32 entries [first, end). True for
  // the last of `parts` blocks, which must Finish. `bits` and `candidates` are the row's, in device
  // memory.
  __device__ bool RunPart(TopkCounters& counters, int first, int end, int parts, uint32_t* bits,
                          uint64_t* candidates) {
    for (int i = threadIdx.x; i < kTopkBins; i += kTopkThreads) s_.bins[i] = counters.bins[i];
    if (threadIdx.x == 0) s_.num_candidates = 0;
    __syncthreads();
    FindBin(kTopkBins, topk_);
    SortByBin(first, end, bits);
    const int mine = s_.num_candidates;
    __shared__ int start, place;
    if (threadIdx.x == 0) start = atomicAdd(&counters.num_candidates, mine);
    __syncthreads();
    for (int i = threadIdx.x; i < min(mine, kTopkCandidates); i += kTopkThreads) {
      if (start + i < kTopkCandidates) candidates[start + i] = s_.candidates[i];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) place = atomicAdd(&counters.num_done, 1);
    __syncthreads();
    __threadfence();
    return place == parts - 1;
  }
  __device__ void Finish(TopkCounters& counters, const uint32_t* bits, const uint64_t* candidates,
                         int32_t* selected) {
    const int count = __ldcg(&counters.num_candidates);
    for (int i = threadIdx.x; i < num_words(); i += kTopkThreads) bits_[i] = __ldcg(bits + i);
    for (int i = threadIdx.x; i < min(count, kTopkCandidates); i += kTopkThreads) {
      s_.candidates[i] = __ldcg(reinterpret_cast<const unsigned long long*>(candidates + i));
    }
    __syncthreads();
    if (threadIdx.x == 0) s_.num_candidates = count;
    for (int i = threadIdx.x; i < kTopkBins; i += kTopkThreads) counters.bins[i] = 0;
    if (threadIdx.x == 0) counters.num_candidates = counters.num_done = 0;
    __syncthreads();
    ChooseFromBin();
    Emit(selected);
  }

 private:
  __device__ int num_words() const { return (size_ + 31) / 32; }

  __device__ void CountBins() {
    for (int i = threadIdx.x; i < kTopkBins; i += kTopkThreads) s_.bins[i] = 0;
    if (threadIdx.x == 0) s_.num_candidates = 0;
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < size_; i += kTopkThreads) {
      atomicAdd(s_.bins + ScoreBin(OrderedScore(scores_[i])), 1);
    }
    __syncthreads();
  }

  // The bin in which the count from the top reaches `wanted`: chosen_bin; missing of it are wanted.
  __device__ void FindBin(int num_bins, int wanted) {
    const int per_thread = (num_bins + kTopkThreads - 1) / kTopkThreads;
    const int first = num_bins - 1 - static_cast<int>(threadIdx.x) * per_thread;  // downwards
    int mine = 0;
    for (int i = 0; i < per_thread && first - i >= 0; ++i) mine += s_.bins[first - i];
    int total;
    int above = BlockScan(mine, s_.warp_sums, total);
    for (int i = 0; i < per_thread && first - i >= 0; ++i) {
      const int count = s_.bins[first - i];
      if (above < wanted && above + count >= wanted) {
        s_.chosen_bin = first - i;
        s_.missing = wanted - above;
      }
      above += count;
    }
    __syncthreads();
  }

  // Entries of higher bins become bits, those of the chosen bin candidates.
  __device__ void SortByBin(int first, int end, uint32_t* bits) {
    const int lane = threadIdx.x % 32, bin = s_.chosen_bin;
#pragma unroll 4
    for (int word = first + threadIdx.x / 32; word < end; word += kTopkThreads / 32) {
      const int i = word * 32 + lane;
      const uint32_t ordered = i < size_ ? OrderedScore(scores_[i]) : 0;
      const int mine = i < size_ ? ScoreBin(ordered) : -1;
      const uint32_t higher = __ballot_sync(0xffffffffu, mine > bin);
      if (lane == 0) bits[word] = higher;
      if (mine == bin) {
        const int slot = atomicAdd(&s_.num_candidates, 1);
        if (slot < kTopkCandidates) s_.candidates[slot] = RankKey(ordered, i);
      }
    }
    __syncthreads();
  }

  template <typename Body>
  __device__ void ForEachCandidate(int bin, const Body& body) const {
    if (s_.num_candidates <= kTopkCandidates) {
      for (int i = threadIdx.x; i < s_.num_candidates; i += kTopkThreads) body(s_.candidates[i]);
      return;
    }
    for (int i = threadIdx.x; i < size_; i += kTopkThreads) {
      const uint32_t ordered = OrderedScore(scores_[i]);
      if (ScoreBin(ordered) == bin) body(RankKey(ordered, i));
    }
  }

  // The `missing` largest candidates: finds the smallest of them digit by digit.
  __device__ void ChooseFromBin() {
    constexpr int kDigits = 256;
    const int bin = s_.chosen_bin;
    int missing = s_.missing, left = s_.num_candidates;
    uint64_t prefix = 0;
    int shift = 64;
    __syncthreads();
    while (left > missing) {
      shift -= 8;
      for (int i = threadIdx.x; i < kDigits; i += kTopkThreads) s_.bins[i] = 0;
      __syncthreads();
      ForEachCandidate(bin, [&](uint64_t key) {
        if (shift == 56 || key >> (shift + 8) == prefix) {
          atomicAdd(s_.bins + (key >> shift & (kDigits - 1)), 1);
        }
      });
      __syncthreads();
      FindBin(kDigits, missing);
      prefix = prefix << 8 | static_cast<uint64_t>(s_.chosen_bin);
      left = s_.bins[s_.chosen_bin];
      missing = s_.missing;
      __syncthreads();
    }
    ForEachCandidate(bin, [&](uint64_t key) {
      if (shift < 64 && key >> shift < prefix) return;
      const uint32_t entry = 0xffffffffu - static_cast<uint32_t>(key);
      atomicOr(bits_ + entry / 32, 1u << (entry % 32));
    });
    __syncthreads();
  }

  __device__ void Emit(int32_t* selected) const {
    const int words = num_words();
    const int per_thread = (words + kTopkThreads - 1) / kTopkThreads;
    const int first = threadIdx.x * per_thread, end = min(first + per_thread, words);
    int count = 0, total;
    for (int i = first; i < end; ++i) count += __popc(bits_[i]);
    int place = BlockScan(count, s_.warp_sums, total);
    for (int i = first; i < end; ++i) {
      for (uint32_t word = bits_[i]; word != 0; word &= word - 1) {
        selected[place++] = i * 32 + __ffs(word) - 1;
      }
    }
  }

  const float* scores_;
  int size_;
  int topk_;
  TopkShared& s_;
  uint32_t* bits_;
};

}  // namespace fathom::kernels
