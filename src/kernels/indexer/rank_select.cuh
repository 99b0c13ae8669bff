// The exact topk of a token's scores by one block, however many there are: higher score first, then
// the lower entry. A histogram of monotone bins finds the bin of the k-th score; while too many
// share it, so does a histogram of that bin alone; the few that are left are compared. Equal scores
// cost rounds, never a longer list. Chosen entries are bits in shared memory until they are
// emitted, ascending. Loops are not unrolled: they run a few times, and fetching instructions takes
// longer. Device code only.
#pragma once

#include "kernels/indexer/ranks.cuh"
#include "kernels/indexer/selected.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kSelectThreads = 512;
inline constexpr int kSelectCandidates = 512;  // at most, that are listed

struct RankSelectShared {
  uint64_t candidates[kSelectCandidates];
  uint64_t few[64];
  int bin, missing, count;  // the bin of the k-th, how many of its `count` are chosen
  int num_candidates, num_few;
  int warp_sums[kSelectThreads / 32];
};

class RankSelect {
 public:
  // Of scores of entries [0, size), more than topk. `bins`, kRankBins, at a multiple of 16 bytes,
  // and `bits`, a bit an entry: shared memory.
  __device__ RankSelect(RankSelectShared& shared, int* bins, uint32_t* bits, const float* scores,
                        int size, int topk)
      : s_(shared), bins_(bins), bits_(bits), scores_(scores), size_(size), topk_(topk) {}

  // Counts the scores, where the caller has not: clears the bins first.
  __device__ void CountScores() {
    ClearBins<kRankBins>();
    constexpr int kStep = kSelectThreads;
    int i = threadIdx.x;
    for (; i + 7 * kStep < size_; i += 8 * kStep) {
      float scores[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) scores[k] = scores_[i + k * kStep];
#pragma unroll
      for (int k = 0; k < 8; ++k) atomicAdd(bins_ + ScoreBin(scores[k]), 1);
    }
    for (; i < size_; i += kStep) atomicAdd(bins_ + ScoreBin(scores_[i]), 1);
  }

  // The bins count the ScoreBin of the scores.
  __device__ void Run(const Selected& selected) {
    if (threadIdx.x == 0) s_.num_candidates = s_.num_few = 0;
    __syncthreads();
    FindBin<kRankBins>(topk_);
    RankRange range = RankRange::OfBin(s_.bin);
    while (s_.count > s_.missing && s_.count > kSelectCandidates) {
      range = range.Without(size_);
      const int shift = range.ShiftForBins(kRankBins), missing = s_.missing;
      __syncthreads();
      ClearBins<kRankBins>();
#pragma unroll 1
      for (int i = threadIdx.x; i < size_; i += kSelectThreads) {
        Count(RankOf(scores_[i], i), range, shift);
      }
      __syncthreads();
      FindBin<kRankBins>(missing);
      range = range.Bin(s_.bin, shift);
    }
    // Too many to be listed: all of them are chosen.
    num_listed_ = s_.count <= kSelectCandidates ? s_.count : 0;
    Collect(range);
    Emit(ChosenCandidate(range), selected);
  }

 private:
  static constexpr int kWarps = kSelectThreads / 32;

  template <int kBins>
  __device__ void ClearBins() {
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kSelectThreads) bins_[i] = 0;
    __syncthreads();
  }
  __device__ void Count(uint64_t rank, const RankRange& range, int shift) {
    if (range.Contains(rank)) atomicAdd(bins_ + static_cast<int>((rank - range.low) >> shift), 1);
  }
  // The bin in which the count from the top reaches `wanted`.
  template <int kBins>
  __device__ void FindBin(int wanted) {
    constexpr int kEach = kBins / kSelectThreads;
    const int first = kBins - (static_cast<int>(threadIdx.x) + 1) * kEach;  // downwards
    alignas(16) int counts[kEach];
    int mine = 0, total;
    if constexpr (kEach % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kEach; i += 4) {
        *reinterpret_cast<int4*>(counts + i) = *reinterpret_cast<const int4*>(bins_ + first + i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) counts[i] = bins_[first + i];
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) mine += counts[i];
    int above = BlockScan<kWarps>(mine, s_.warp_sums, total);
    if (above < wanted && above + mine >= wanted) {
#pragma unroll
      for (int i = kEach - 1; i >= 0; --i) {
        if (above < wanted && above + counts[i] >= wanted) {
          s_.bin = first + i, s_.missing = wanted - above, s_.count = counts[i];
        }
        above += counts[i];
      }
    }
    __syncthreads();
  }

  // Ranks above the range become bits, those within it are listed; or, where there
  // are too many for that, all are chosen and become bits.
  __device__ void Collect(const RankRange& range) {
    const bool list = num_listed_ > 0;
    const auto low = static_cast<uint32_t>(range.low >> 32);
    const auto high = static_cast<uint32_t>(range.high >> 32);
    const int lane = threadIdx.x % 32, words = num_words();
#pragma unroll 1
    for (int word = threadIdx.x / 32; word < words; word += kWarps) {
      const int i = word * 32 + lane;
      const uint32_t ordered = i < size_ ? OrderedKey(scores_[i]) : 0;
      bool sure = i < size_ && ordered > high;
      if (i < size_ && ordered >= low && !sure) {
        const uint64_t rank = RankKey(ordered, i);
        if (!range.Contains(rank)) {
          sure = rank > range.high;
        } else if (list) {
          s_.candidates[atomicAdd(&s_.num_candidates, 1)] = rank;
        } else {
          sure = true;
        }
      }
      const uint32_t bits = __ballot_sync(0xffffffffu, sure);
      if (lane == 0) bits_[word] = bits;
    }
    __syncthreads();
  }
  __device__ int num_words() const { return (size_ + 31) / 32; }

  // The thread's candidate if it is one of the listed ones in the range of which `missing` are
  // chosen, those with the highest ranks; else 0.
  __device__ uint64_t ChosenCandidate(RankRange range) {
    static_assert(kSelectCandidates <= kSelectThreads);
    constexpr int kFew = sizeof(RankSelectShared::few) / 8;
    const int thread = static_cast<int>(threadIdx.x);
    const uint64_t rank = thread < num_listed_ ? s_.candidates[thread] : 0;
    int count = s_.count, missing = s_.missing;
    const uint64_t* few = s_.candidates;
    if (count > missing && count > kFew) {
      for (; count > missing && count > kFew; count = s_.count, missing = s_.missing) {
        range = range.Without(size_);
        const int shift = range.ShiftForBins(kSelectThreads);
        __syncthreads();
        ClearBins<kSelectThreads>();
        if (thread < num_listed_) Count(rank, range, shift);
        __syncthreads();
        FindBin<kSelectThreads>(missing);
        range = range.Bin(s_.bin, shift);
      }
      few = s_.few;
      if (count > missing && rank != 0 && range.Contains(rank)) {
        s_.few[atomicAdd(&s_.num_few, 1)] = rank;
      }
      __syncthreads();
    }
    if (rank < range.low || rank == 0) return 0;
    if (count == missing || rank > range.high) return rank;
    int above = 0;
#pragma unroll 4
    for (int i = 0; i < count; ++i) above += few[i] > rank;
    return above < missing ? rank : 0;
  }

  __device__ void Emit(uint64_t candidate, const Selected& selected) {
    if (candidate != 0) {
      const int entry = EntryOf(candidate);
      atomicOr(bits_ + entry / 32, 1u << (entry % 32));
    }
    __syncthreads();
    // A thread emits entries that follow each other, as few as make it one round of all threads: a
    // field of bits, within a word.
    const int size = num_words() * 32;
    const int shift = min(5, 32 - __clz((size - 1) / kSelectThreads)), width = 1 << shift;
    const int fields = size >> shift, each = (fields + kSelectThreads - 1) / kSelectThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, fields);
    const int end = min(begin + each, fields);
    const auto field = [&](int i) {
      return bits_[i << shift >> 5] >> (i << shift & 31) & 0xffffffffu >> (32 - width);
    };
    int count = 0, total;
#pragma unroll 1
    for (int i = begin; i < end; ++i) count += __popc(field(i));
    int place = BlockScan<kWarps>(count, s_.warp_sums, total);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
#pragma unroll 1
      for (uint32_t left = field(i); left != 0; left &= left - 1) {
        selected.Store(place++, (i << shift) + __ffs(left) - 1);
      }
    }
  }

  RankSelectShared& s_;
  int* bins_;
  uint32_t* bits_;
  const float* scores_;
  int size_, topk_;
  int num_listed_ = 0;
};

}  // namespace fathom::kernels
