// The exact topk of a token's scores by several blocks, each of which holds a part of its entries:
// higher score first, then the lower entry. A block tells the others the best of its part, a few
// more than its share of topk, and the rank that all it has not told are below. All gather what was
// told, and find the k-th of it: unless a block may have more of the best, these are the chosen
// ones. Such blocks tell twice as many more, and so on: few can, as what they have told is among
// the best already. What is told carries the launch's number (numbered_words.cuh), so nothing is
// fenced or cleared. Equal scores cost rounds, never a longer list. Every block then emits its
// chosen entries: their places are the numbers of chosen entries below. Device code only.
#pragma once

#include "kernels/indexer/indexer_cuda.h"
#include "kernels/indexer/rank_bins.cuh"
#include "kernels/indexer/selected.cuh"
#include "kernels/numbered_words.cuh"

namespace fathom::kernels {

inline constexpr int kMaxGathered = 4096;   // ranks of a round's lists, and the best before
inline constexpr int kMaxListBlocks = 160;  // of all tokens

// Three ranks, and the number with each half.
struct alignas(32) ToldRanks {
  uint4 high, low;
};
// Of one token, in device memory. Rounds have places of their own, as blocks may be a round behind.
// What a block tells again is at most twice what it has told so far, all of which is among the best
// topk: so the lists of later rounds together are at most some 5 topk long in the second, and 3 in
// those behind, of which there are at most log2(topk) - 3.
struct ToldLists {
  static constexpr int kMostRounds = 12;
  uint4 left[kMostRounds][kMaxListBlocks];  // high, low
  ToldRanks ranks[2 * kMaxGathered];
};

// Beside the scores.
struct ListSelectShared {
  int num_listed, num_candidates, num_best, before, list;
  uint32_t most_left;  // of all lists, its high half
  int warp_sums[32];
};
// In memory that is free when the scores are there.
struct ListSelectWorkspace {
  static constexpr int kCandidates = 32;
  uint32_t high[kMaxGathered], low[kMaxGathered];  // halves of gathered ranks
  uint64_t list[kMaxIndexTopk * 3];                // what the block has told, and tells
  uint64_t best[kMaxIndexTopk];
  uint64_t candidates[kCandidates];
};

// By kThreads threads. The block is `part` of `parts` and holds scores[i - first] of entries
// [first, end); the token has more than topk. `bins` counts their ScoreBin.
template <int kThreads>
class ListSelect {
 public:
  __device__ ListSelect(ListSelectShared& shared, RankBins& bins, ListSelectWorkspace& workspace,
                        const float* scores, int first, int end, int topk, int part, int parts,
                        ToldLists& told, uint32_t number)
      : s_(shared),
        bins_(bins),
        w_(workspace),
        scores_(scores),
        first_(first),
        end_(end),
        topk_(topk),
        list_(part),
        lists_(parts),
        told_(told),
        number_(number) {
    // Of entries in any order a block has its share of topk, and seldom five deviations more.
    const float mean = static_cast<float>(topk) / static_cast<float>(parts);
    SizeLists(static_cast<int>(mean + 5 * sqrtf(mean)) + 2, kMaxGathered);
  }

  __device__ void Run(const Selected& selected) {
    if (threadIdx.x == 0) {
      s_.num_listed = 0;
      Reset();
    }
    __syncthreads();
    if (end_ - first_ <= 3 * triples_) {
      List(0);
    } else {
      const FoundBin found = bins_.Find(least_);
      ListBest(RankRange::OfBin(found.bin), found);
    }
    int carried = 0;
    Kth kth;
#pragma unroll 1
    while (true) {
      __syncthreads();
      if (list_ >= 0) Tell();
      bins_.template Clear<kThreads>();
      const uint64_t left = Gather(carried);
      const int size = carried + 3 * triples_ * lists_;
      __syncthreads();
      kth = FindKth(size);
      const bool open = static_cast<int>(threadIdx.x) < lists_ && left > kth.rank;
      if (__syncthreads_or(open) == 0) break;
      carried = Reopen(open, size, kth.rank);
    }
    Emit(kth, selected);
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  // Bins of gathered ranks, from the least that can be the k-th: 2,048 to a power of two.
  static constexpr int kBinShift = 12;
  static constexpr int kAnyEntry = 1 << 30;
  // The topk-th of what is gathered, 0 where there are fewer; and how many of those before the
  // block's entries are not worse.
  struct Kth {
    uint64_t rank;
    int before;
  };

  __device__ void SizeLists(int least, int room) {
    triples_ = min((least + least / 4 + 4) / 3, room / 3 / lists_);
    least_ = min(least, triples_ * 9 / 4);
  }
  // Thread 0, before another round.
  __device__ void Reset() {
    s_.num_candidates = s_.num_best = s_.before = 0;
    s_.most_left = 0;
  }

  // body(rank) for those of the block that it has not told.
  template <typename Body>
  __device__ void ForEachUntold(const Body& body) const {
#pragma unroll 1
    for (int i = first_ + static_cast<int>(threadIdx.x); i < end_; i += kThreads) {
      const uint64_t rank = RankOf(scores_[i - first_], i);
      if (rank <= left_) body(rank);
    }
  }
  // Of these, the least_ best, or somewhat less, and no more than fit. found: where the last of
  // those is, in range.
  __device__ void ListBest(RankRange range, FoundBin found) {
    const auto fits = [&](const FoundBin& f) {
      return least_ - f.missing + f.count <= 3 * triples_;
    };
    const auto enough = [&](const FoundBin& f) { return fits(f) || 2 * f.missing <= least_; };
    const auto untold = [&](const auto& body) { ForEachUntold(body); };
    Narrow<kThreads>(bins_, range, found, end_, enough, untold);
    List(fits(found) ? range.low : range.high + 1);
  }
  __device__ void List(uint64_t low) {
    ForEachUntold([&](uint64_t rank) {
      if (rank >= low) w_.list[atomicAdd(&s_.num_listed, 1)] = rank;
    });
    left_ = low == 0 ? 0 : low - 1;
  }

  __device__ void Tell() const {
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < triples_) {
      uint64_t ranks[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int at = told_before_ + 3 * thread + i;
        ranks[i] = at < s_.num_listed ? w_.list[at] : 0;
      }
      ToldRanks* const to = told_.ranks + base_ + list_ * triples_ + thread;
      StoreNumberedPacket(&to->high, {High(ranks[0]), High(ranks[1]), High(ranks[2])}, number_);
      StoreNumberedPacket(&to->low, {Low(ranks[0]), Low(ranks[1]), Low(ranks[2])}, number_);
    }
    if (thread == kThreads - 1) {
      StoreNumberedPacket(told_.left[round_] + list_, {High(left_), Low(left_), 0}, number_);
    }
  }

  // All lists, behind `carried` ranks. Returns what is left of the thread's list, if it has one.
  __device__ uint64_t Gather(int carried) {
    constexpr int kAtOnce = 2;
    const auto thread = static_cast<int>(threadIdx.x);
    const int size = lists_ * triples_;
    uint4 left;
#pragma unroll 1
    for (int begin = thread; __any_sync(0xffffffffu, begin < size); begin += kAtOnce * kThreads) {
      ToldRanks told[kAtOnce];
      bool there;
      do {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const ToldRanks* const from = told_.ranks + base_ + min(begin + k * kThreads, size - 1);
          told[k] = {LoadNumberedPacket(&from->high), LoadNumberedPacket(&from->low)};
        }
        left = LoadNumberedPacket(told_.left[round_] + min(thread, lists_ - 1));
        there = left.w == number_;
#pragma unroll
        for (const ToldRanks& t : told) {
          there = there && t.high.w == number_ && t.low.w == number_;
        }
      } while (!__all_sync(0xffffffffu, there));
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = begin + k * kThreads;
        if (i >= size) continue;
        uint32_t *const high = w_.high + carried + 3 * i, *const low = w_.low + carried + 3 * i;
        high[0] = told[k].high.x, high[1] = told[k].high.y, high[2] = told[k].high.z;
        low[0] = told[k].low.x, low[1] = told[k].low.y, low[2] = told[k].low.z;
      }
    }
    if (thread / 32 * 32 >= lists_) return 0;
    const uint32_t most = __reduce_max_sync(0xffffffffu, left.x);
    if (thread % 32 == 0) atomicMax(&s_.most_left, most);
    return RankOfHalves(left.x, left.y);
  }

  // body(rank) for those of the gathered that are not below `low`.
  template <typename Body>
  __device__ void ForEachGathered(int size, uint64_t low, const Body& body) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += kThreads) {
      const uint32_t high = w_.high[i];
      if (high < High(low)) continue;
      const uint64_t rank = RankOfHalves(high, w_.low[i]);
      if (rank >= low) body(rank);
    }
  }

  // All of the block's warps find the same.
  __device__ Kth FindKth(int size) {
    const uint32_t least = max(s_.most_left, 1u);
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += kThreads) {
      const uint32_t high = w_.high[i];
      if (high >= least) bins_.Count(min((high - least) >> kBinShift, kRankBins - 1u));
    }
    __syncthreads();
    FoundBin found = bins_.Find(topk_);
    RankRange range{RankOfHalves(least, 0), ~uint64_t{0}};
    if (found.missing > found.count) {
      range = {1, range.low - 1}, found = {0, found.missing - found.count, size};
    } else if (found.bin < kRankBins - 1) {
      range = range.Bin(found.bin, 32 + kBinShift);
    } else {
      range.low += static_cast<uint64_t>(found.bin) << (32 + kBinShift);
    }
    const auto few = [](const FoundBin& f) { return f.count <= ListSelectWorkspace::kCandidates; };
    const auto gathered = [&](const auto& body) { ForEachGathered(size, range.low, body); };
    Narrow<kThreads>(bins_, range, found, kAnyEntry, few, gathered);
    int before = 0;
    gathered([&](uint64_t rank) {
      if (rank <= range.high) {
        w_.candidates[atomicAdd(&s_.num_candidates, 1)] = rank;
      } else {
        before += EntryOf(rank) < first_;
      }
    });
    before = __reduce_add_sync(0xffffffffu, before);
    if (threadIdx.x % 32 == 0) atomicAdd(&s_.before, before);
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const uint64_t rank = lane < s_.num_candidates ? w_.candidates[lane] : 0;
    int above = 0;
#pragma unroll 1
    for (int i = 0; i < s_.num_candidates; ++i) {
      above += __shfl_sync(0xffffffffu, rank, i) > rank;
    }
    const uint32_t last = __ballot_sync(0xffffffffu, rank != 0 && above == found.missing - 1);
    const uint64_t kth = last == 0 ? 0 : __shfl_sync(0xffffffffu, rank, __ffs(last) - 1);
    const bool adds = rank != 0 && rank >= kth && EntryOf(rank) < first_;
    return {kth, s_.before + __popc(__ballot_sync(0xffffffffu, adds))};
  }

  // Another round, of the lists that are open. Returns how many of the best it goes on with.
  __device__ int Reopen(bool open, int size, uint64_t kth) {
    const auto thread = static_cast<int>(threadIdx.x);
    ForEachGathered(size, max(kth, uint64_t{1}),
                    [&](uint64_t rank) { w_.best[atomicAdd(&s_.num_best, 1)] = rank; });
    int total;
    const int place = BlockScan<kWarps>(open, s_.warp_sums, total);
    if (thread == list_) s_.list = open ? place : -1;
    const int best = s_.num_best;
    for (int i = thread; i < best; i += kThreads) {
      w_.high[i] = High(w_.best[i]), w_.low[i] = Low(w_.best[i]);
    }
    __syncthreads();
    told_before_ = s_.num_listed;
    base_ += lists_ * triples_;
    ++round_;
    if (list_ >= 0) list_ = s_.list;
    lists_ = total;
    SizeLists(min(2 * least_, topk_), kMaxGathered - topk_);
    __syncthreads();
    if (thread == 0) Reset();
    if (list_ >= 0) ListBest({0, left_}, {0, least_, end_ - first_});
    return best;
  }

  // Ascending, behind those of the parts before: a warp for each that the block has told.
  __device__ void Emit(const Kth& kth, const Selected& selected) const {
    const int lane = threadIdx.x % 32, count = s_.num_listed;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < count; i += kWarps) {
      const uint64_t rank = w_.list[i];
      if (rank < kth.rank) continue;
      int place = kth.before;
#pragma unroll 1
      for (int k = lane; k < (count + 31) / 32 * 32; k += 32) {
        const uint64_t other = k < count ? w_.list[k] : 0;
        const bool below = other >= kth.rank && EntryOf(other) < EntryOf(rank);
        place += __popc(__ballot_sync(0xffffffffu, below));
      }
      if (lane == 0) selected.Store(place, EntryOf(rank));
    }
  }

  ListSelectShared& s_;
  RankBins& bins_;  // of the block's entries; then, of what is gathered
  ListSelectWorkspace& w_;
  const float* scores_;
  const int first_, end_, topk_;
  int list_;                      // the block's, of the round's; -1: none
  int lists_;                     // of the round
  int triples_;                   // of each list
  int least_;                     // that a list has, unless it has all
  uint64_t left_ = ~uint64_t{0};  // the block has told all above
  int told_before_ = 0;           // in earlier rounds
  int round_ = 0, base_ = 0;      // where its lists begin
  ToldLists& told_;
  const uint32_t number_;
};

}  // namespace fathom::kernels
