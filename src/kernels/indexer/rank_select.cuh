// The exact topk of a token's scores by several blocks, each of which holds a part of its entries:
// higher score first, then the lower entry. The blocks agree on the rank of the last chosen entry:
// a histogram of monotone bins over all parts finds the bin of the k-th score; while too many share
// it, so does a histogram of that bin alone; the few that are left are passed around. Equal scores
// cost rounds, never a longer list. Every block then emits its chosen entries, ascending, behind
// those of the blocks before it: they are bits in shared memory until then. Loops are not unrolled:
// they run a few times, and fetching instructions takes longer. Device code only.
#pragma once

#include "kernels/indexer/ranks.cuh"
#include "kernels/numbered_words.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kSelectThreads = 512;
inline constexpr int kSelectCandidates = 512;  // at most, that are passed around
inline constexpr int kMaxSelectParts = 256;    // blocks of all tokens that share them out

// What the blocks of one token share, in device memory: zero between launches. Nothing is fenced:
// merged bins are complete when they count as many entries as there are, and words are there when
// they are not zero.
struct SelectCounters {
  int bins[3][kRankBins];  // of rounds r, r + 1, r + 2
  int arrived, left;
  int unused[2];
};
// What a block tells the others of its token, most of it in the first 32 bytes.
struct alignas(32) SelectPart {
  uint64_t counts;  // entries chosen for sure, and one more, in the high half; candidates
  uint64_t candidates[kSelectCandidates];
};

struct RankSelectShared {
  alignas(16) int bins[kRankBins];
  uint64_t candidates[kSelectCandidates];
  uint64_t few[64];
  int before;               // chosen entries of the parts before this one
  int bin, missing, count;  // the bin of the k-th, how many of its `count` are chosen
  int above, num_candidates, num_gathered, num_few;
  bool last;                           // of the token's blocks to have read what all tell
  int candidates_of[kMaxSelectParts];  // blocks
  int warp_sums[kSelectThreads / 32];
};

// Where a token's selection goes: as entries, or as numbered words.
struct Selected {
  int32_t* entries = nullptr;
  uint2* words = nullptr;
  uint32_t number = 0;

  __device__ void Store(int place, int entry) const {
    if (words != nullptr) {
      StoreNumbered(words + place, static_cast<uint32_t>(entry), number);
    } else {
      entries[place] = entry;
    }
  }
};

class RankSelect {
 public:
  // The block is `part` of `parts` and holds scores[i - first] of entries [first, end); the token
  // has `size`, more than topk. `bits`: shared memory for a bit an entry of the block. One of one
  // part needs no counters nor exchange.
  __device__ RankSelect(RankSelectShared& shared, uint32_t* bits, const float* scores, int first,
                        int end, int size, int topk, int part = 0, int parts = 1,
                        SelectCounters* counters = nullptr, SelectPart* exchange = nullptr)
      : s_(shared),
        bits_(bits),
        scores_(scores),
        first_(first),
        end_(end),
        size_(size),
        topk_(topk),
        part_(part),
        parts_(parts),
        counters_(counters),
        exchange_(exchange) {}

  // Counts the block's scores, where the caller has not: clears the bins first.
  __device__ void CountScores() {
    ClearBins<kRankBins>();
    const int size = end_ - first_, step = kSelectThreads;
    int i = threadIdx.x;
    for (; i + 7 * step < size; i += 8 * step) {
      float scores[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) scores[k] = scores_[i + k * step];
#pragma unroll
      for (int k = 0; k < 8; ++k) atomicAdd(s_.bins + ScoreBin(scores[k]), 1);
    }
    for (; i < size; i += step) atomicAdd(s_.bins + ScoreBin(scores_[i]), 1);
  }

  // shared.bins counts the ScoreBin of the block's entries. `selected` is the token's.
  __device__ void Run(const Selected& selected) {
    if (threadIdx.x == 0) {
      s_.above = s_.num_candidates = s_.num_gathered = s_.num_few = s_.before = 0;
    }
    const int* merged = MergeBins(0);
    FindBin<kRankBins>(topk_, merged, size_);
    RankRange range = RankRange::OfBin(s_.bin);
    int rounds = 1;
    for (; s_.count > s_.missing && s_.count > kSelectCandidates; ++rounds) {
      range = range.Without(size_);
      const int shift = range.ShiftForBins(kRankBins);
      ClearBins<kRankBins>();
      ForEachRank([&](uint64_t rank) { Count(rank, range, shift); });
      const int missing = s_.missing, count = s_.count;
      merged = MergeBins(rounds);
      FindBin<kRankBins>(missing, merged, count);
      if (merged != nullptr) {
        // Its bins are used again by who has found this block's share of the round after this one.
        ClearRound(rounds - 1);
        __threadfence();
      }
      range = range.Bin(s_.bin, shift);
    }
    // Too many to be listed: all of them are chosen.
    num_listed_ = s_.count <= kSelectCandidates ? s_.count : 0;
    Collect(range);
    const int before = parts_ > 1 ? Exchange(rounds) : 0;
    const uint64_t candidate = ChosenCandidate(range);
    Emit(before, candidate, selected);
    if (parts_ > 1) Leave();
  }

 private:
  static constexpr int kWarps = kSelectThreads / 32;

  template <int kBins>
  __device__ void ClearBins() {
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kSelectThreads) s_.bins[i] = 0;
    __syncthreads();
  }
  __device__ void Count(uint64_t rank, const RankRange& range, int shift) {
    if (range.Contains(rank)) atomicAdd(s_.bins + static_cast<int>((rank - range.low) >> shift), 1);
  }
  template <typename Body>
  __device__ void ForEachRank(const Body& body) const {
#pragma unroll 1
    for (int i = first_ + static_cast<int>(threadIdx.x); i < end_; i += kSelectThreads) {
      body(RankOf(scores_[i - first_], i));
    }
  }

  // Adds up the bins of all blocks. Returns where they are then; null: in shared memory.
  __device__ const int* MergeBins(int round) {
    __syncthreads();
    if (parts_ == 1) return nullptr;
    int* bins = counters_->bins[round % 3];
#pragma unroll 1
    for (int i = threadIdx.x; i < kRankBins; i += kSelectThreads) {
      if (s_.bins[i] != 0) atomicAdd(bins + i, s_.bins[i]);
    }
    Await();
    return bins;
  }
  // Until all blocks have come here, so that few read bins before they are complete, and again.
  // Nothing is said to be visible.
  __device__ void Await() {
    __syncthreads();
    if (threadIdx.x == 0) {
      expected_ += parts_;
      atomicAdd(&counters_->arrived, 1);
      while (*const_cast<const volatile int*>(&counters_->arrived) < expected_) {
      }
    }
    __syncthreads();
  }
  // Of a round that all blocks have read, as what follows it is complete.
  __device__ void ClearRound(int round) const {
    int* bins = counters_->bins[round % 3];
#pragma unroll 1
    for (int i = part_ * kSelectThreads + static_cast<int>(threadIdx.x); i < kRankBins;
         i += parts_ * kSelectThreads) {
      bins[i] = 0;
    }
  }

  // The bin in which the count from the top reaches `wanted`: of merged bins, where there are any,
  // which count `size` entries.
  template <int kBins>
  __device__ void FindBin(int wanted, const int* merged, int size) {
    if (merged != nullptr) {
      FindBinOf<kBins>(
          wanted, [=](int i) { return __ldcg(reinterpret_cast<const int4*>(merged + i)); }, size);
    } else {
      FindBin<kBins>(wanted);
    }
  }
  template <int kBins>
  __device__ void FindBin(int wanted) {
    FindBinOf<kBins>(wanted, [this](int i) { return *reinterpret_cast<const int4*>(s_.bins + i); });
  }
  template <int kBins, typename Load>
  __device__ void FindBinOf(int wanted, const Load& load, int size = 0) {
    constexpr int kEach = kBins / kSelectThreads;
    const int first = kBins - (static_cast<int>(threadIdx.x) + 1) * kEach;  // downwards
    alignas(16) int counts[kEach];
    int mine, total, above;
#pragma unroll 1
    do {
      if constexpr (kEach % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kEach; i += 4) {
          *reinterpret_cast<int4*>(counts + i) = load(first + i);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kEach; ++i) counts[i] = s_.bins[first + i];
      }
      mine = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) mine += counts[i];
      above = BlockScan<kWarps>(mine, s_.warp_sums, total);
    } while (total < size);
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

  // Ranks above the range become bits and are counted, those within it are listed; or, where there
  // are too many for that, all are chosen and become bits.
  __device__ void Collect(const RankRange& range) {
    const bool list = num_listed_ > 0;
    const auto low = static_cast<uint32_t>(range.low >> 32);
    const auto high = static_cast<uint32_t>(range.high >> 32);
    const int lane = threadIdx.x % 32, words = num_words();
    int above = 0;
#pragma unroll 1
    for (int word = threadIdx.x / 32; word < words; word += kWarps) {
      const int i = first_ + word * 32 + lane;
      const uint32_t ordered = i < end_ ? OrderedKey(scores_[i - first_]) : 0;
      bool sure = i < end_ && ordered > high;
      if (i < end_ && ordered >= low && !sure) {
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
      above += __popc(bits);
    }
    if (lane == 0) atomicAdd(&s_.above, above);
    __syncthreads();
  }
  __device__ int num_words() const { return (end_ - first_ + 31) / 32; }

  // Gathers the candidates of all blocks, in any order. Returns the thread's share of what the
  // blocks before this one have chosen for sure.
  __device__ int Exchange(int rounds) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kPartLanes;
    SelectPart& mine = exchange_[part_];
    const int count = s_.num_candidates;
    if (thread == 0) StoreWord(&mine.counts, static_cast<uint64_t>(s_.above + 1) << 32 | count);
#pragma unroll 1
    for (int i = thread; i < count; i += kSelectThreads) {
      StoreWord(mine.candidates + i, s_.candidates[i]);
    }
    __syncthreads();
    int before = 0;
#pragma unroll 1
    for (int p = FirstPart(); p < parts_; p += kPartsAtOnce) {
      const SelectPart& part = exchange_[p];
      uint64_t counts, candidate;  // the first one is asked for before it is known whether it is
      int num_candidates;
      do {
        counts = LoadWord(&part.counts), candidate = LoadWord(part.candidates + lane);
        num_candidates = static_cast<int>(counts & 0xffffffffu);
      } while (counts == 0 || (lane < num_candidates && candidate == 0));
      if (lane == 0) s_.candidates_of[p] = num_candidates;
      if (lane == 0 && p < part_) before += static_cast<int>(counts >> 32) - 1;
#pragma unroll 1
      for (int i = lane; i < num_candidates; i += kPartLanes) {
        while (candidate == 0) candidate = LoadWord(part.candidates + i);
        s_.candidates[atomicAdd(&s_.num_gathered, 1)] = candidate;
        candidate = 0;
      }
    }
    __syncthreads();
    ClearRound(rounds - 1);
    if (thread == 0) left_ = atomicAdd(&counters_->left, 1);
    return before;
  }
  // The last block to have read what all told clears it.
  __device__ void Leave() {
    if (threadIdx.x == 0) s_.last = left_ == parts_ - 1;
    __syncthreads();
    if (!s_.last) return;
    if (threadIdx.x == 0) counters_->arrived = counters_->left = 0;
#pragma unroll 1
    for (int p = FirstPart(); p < parts_; p += kPartsAtOnce) {
      const int lane = threadIdx.x % kPartLanes;
      if (lane == 0) exchange_[p].counts = 0;
#pragma unroll 1
      for (int i = lane; i < s_.candidates_of[p]; i += kPartLanes) exchange_[p].candidates[i] = 0;
    }
  }
  // Parts are read by so many lanes each; there are seldom more candidates.
  static constexpr int kPartLanes = 3, kPartsAtOnce = kSelectThreads / kPartLanes;
  __device__ int FirstPart() const {
    const int p = static_cast<int>(threadIdx.x) / kPartLanes;
    return p < kPartsAtOnce ? p : parts_;
  }

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

  // Behind the entries of blocks before this one, chosen candidates among them.
  __device__ void Emit(int before, uint64_t candidate, const Selected& selected) {
    if (candidate != 0) {
      const auto entry = static_cast<int>(0xffffffffu - static_cast<uint32_t>(candidate));
      if (entry < first_) {
        ++before;
      } else if (entry < end_) {
        atomicOr(bits_ + (entry - first_) / 32, 1u << ((entry - first_) % 32));
      }
    }
    if (parts_ > 1) {
      before = __reduce_add_sync(0xffffffffu, before);
      if (threadIdx.x % 32 == 0) atomicAdd(&s_.before, before);
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
    const int place_in_block = BlockScan<kWarps>(count, s_.warp_sums, total);
    int place = place_in_block + (parts_ > 1 ? s_.before : 0);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
#pragma unroll 1
      for (uint32_t left = field(i); left != 0; left &= left - 1) {
        selected.Store(place++, first_ + (i << shift) + __ffs(left) - 1);
      }
    }
  }

  RankSelectShared& s_;
  uint32_t* bits_;
  const float* scores_;
  int first_, end_, size_, topk_;
  int part_, parts_;
  SelectCounters* counters_;
  SelectPart* exchange_;
  int num_listed_ = 0;  // candidates of all blocks
  int expected_ = 0;    // arrivals, thread 0 only
  int left_ = 0;        // blocks, before this one
};

}  // namespace fathom::kernels
