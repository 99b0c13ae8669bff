// The exact topk of some thousand scores by one block that holds them in shared memory: higher
// score first, then the lower entry. As rank_select.cuh, with fewer steps behind each other: bins
// are counted one by one and 64 at a time, so that each warp finds the bin of the k-th score for
// itself, and each finds for itself how many entries are chosen before its own. Device code only.
#pragma once

#include "kernels/indexer/rank_bins.cuh"

namespace fathom::kernels {

inline constexpr int kMaxFewEntries = 4096;
inline constexpr int kFewCandidates = 256;

// By a block of kThreads, at least kFewCandidates.
template <int kThreads>
class FewSelect {
 public:
  // Scores are taken so many at a time.
  static constexpr int kRound = 4 * kThreads;
  __host__ __device__ static constexpr int RoundUp(int size) {
    return (size + kRound - 1) / kRound * kRound;
  }

  struct Shared {
    alignas(16) float scores[RoundUp(kMaxFewEntries)];
    RankBins<kThreads> bins;
    uint32_t chosen[RoundUp(kMaxFewEntries) / 32];  // a bit an entry
    uint64_t candidates[kFewCandidates];
    int num_candidates;
  };

  // Of `size` of the shared scores, more than topk.
  __device__ FewSelect(Shared& shared, int size, int topk) : s_(shared), size_(size), topk_(topk) {}

  // Before the scores are there. A __syncthreads() has to follow.
  __device__ void Prepare() {
    Clear();
    // Behind the last score: no other is lower, and of equal ones the lower entry goes first.
    for (int i = size_ + static_cast<int>(threadIdx.x); i < RoundUp(size_); i += kThreads) {
      s_.scores[i] = -__builtin_huge_valf();
    }
  }

  __device__ void Run(int32_t* selected) {
    ForEachFour([&](int, const float (&scores)[4]) {
#pragma unroll
      for (const float score : scores) s_.bins.Count(ScoreBin(score));
    });
    __syncthreads();
    FoundBin found = s_.bins.FindByWarp(topk_);
    RankRange range = RankRange::OfBin(found.bin);
    while (found.count > found.missing && found.count > kFewCandidates) {
      range = range.Without(size_);
      const int shift = range.ShiftForBins(kRankBins);
      __syncthreads();
      Clear();
      __syncthreads();
      ForEachFour([&](int first, const float (&scores)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint64_t rank = RankOf(scores[k], first + k * kThreads);
          if (range.Contains(rank)) s_.bins.Count(static_cast<int>((rank - range.low) >> shift));
        }
      });
      __syncthreads();
      found = s_.bins.FindByWarp(found.missing);
      range = range.Bin(found.bin, shift);
    }
    Choose(range, found);
    Emit(selected);
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  __device__ void Clear() {
    s_.bins.Clear();
    if (threadIdx.x == 0) s_.num_candidates = 0;
  }
  // body(i, scores of entries i, i + kThreads, ..), the thread's.
  template <typename Body>
  __device__ void ForEachFour(const Body& body) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < RoundUp(size_); i += kRound) {
      float scores[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) scores[k] = s_.scores[i + k * kThreads];
      body(i, scores);
    }
  }
  // A bit for each chosen entry: those above the range, and the best of those in it.
  __device__ void Choose(const RankRange& range, const FoundBin& found) {
    const bool all = found.count == found.missing;
    ForEachFour([&](int first, const float (&scores)[4]) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int i = first + k * kThreads;
        const uint64_t rank = RankOf(scores[k], i);
        const bool in_range = range.Contains(rank);
        const uint32_t bits = __ballot_sync(0xffffffffu, rank > range.high || (all && in_range));
        if (threadIdx.x % 32 == 0) s_.chosen[i / 32] = bits;
        if (in_range && !all) s_.candidates[atomicAdd(&s_.num_candidates, 1)] = rank;
      }
    });
    __syncthreads();
    if (!all && static_cast<int>(threadIdx.x) < found.count) {
      const uint64_t rank = s_.candidates[threadIdx.x];
      int above = 0;
#pragma unroll 4
      for (int i = 0; i < found.count; ++i) above += s_.candidates[i] > rank;
      const uint32_t entry = 0xffffffffu - static_cast<uint32_t>(rank);
      if (above < found.missing) atomicOr(s_.chosen + entry / 32, 1u << (entry % 32));
    }
    __syncthreads();
  }

  // Ascending; a warp has words that follow each other.
  __device__ void Emit(int32_t* selected) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int words = (size_ + 31) / 32, each = (words + kWarps - 1) / kWarps;
    const int first = warp * each, end = min(first + each, words);
    int before = 0;
#pragma unroll 1
    for (int word = lane; word < first; word += 32) before += __popc(s_.chosen[word]);
    before = __reduce_add_sync(0xffffffffu, before);
#pragma unroll 1
    for (int word = first; word < end; ++word) {
      const uint32_t bits = s_.chosen[word], mine = 1u << lane;
      if ((bits & mine) != 0) selected[before + __popc(bits & (mine - 1))] = word * 32 + lane;
      before += __popc(bits);
    }
  }

  Shared& s_;
  int size_, topk_;
};

}  // namespace fathom::kernels
