// The exact topk of a token's scores by several blocks, each of which holds a part of its entries:
// higher score first, then the lower entry. Parts are slices of a few entries in turn, as the best
// lie together: what is near in a text scores alike. A block tells the others the best of its part,
// some more than its share of topk, and the rank that all it has not told are below. All gather
// what was told, a few ranks a thread. Most often topk of it are above what anybody has left: these
// have all that is chosen. Otherwise all find the k-th of what was told; blocks that may have more
// of the best are few, as what they have told is among the best already, and tell all that is not
// below the k-th so far, or as much as there is room for, and so on. What is told carries the
// launch's number (numbered_words.cuh), so nothing is fenced or cleared. Equal scores cost rounds,
// never a longer list. Every block then emits what it has told and is chosen, best first: the place
// of an entry is how many of all are better. Where ranks share a token's entries (indexer_cuda.h),
// their blocks tell those of all ranks, and a block emits what it and its siblings, at its place on
// the other ranks, have told. Device code only.
#pragma once

#include <type_traits>

#include "kernels/collective/packets.cuh"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/indexer/rank_bins.cuh"
#include "kernels/indexer/selected.cuh"
#include "kernels/numbered_words.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

// Entries next to each other of a part. Ranks have more parts, so that the fullest of them would
// have more above its share.
constexpr int PartSlice(bool of_ranks) { return of_ranks ? 4 : 16; }
// The block's, of those of a token. Not kept in a register: constants give it.
template <bool kOfRanks>
__device__ __forceinline__ int PartOfBlock(const PeerView& peers) {
  const auto block = static_cast<int>(blockIdx.x);
  return kOfRanks ? block * peers.size + peers.rank : block;
}
inline constexpr int kMaxListTokens = 80;   // that have two blocks or more
inline constexpr int kMaxListBlocks = 264;  // of all tokens; of one, those of all ranks

// Of one token, in device memory. Rounds have places of their own, as blocks may be a round behind.
// The first has three triples a thread at most, later ones two. All that a block has told which
// tells again is among the best topk, so there are at most topk / n of them when each has told n;
// and with the room for 3,072 ranks, 3 topk or more, each tells another n at least, or half of
// topk. So rounds are at most eight, and their lists fit together, whatever the scores are.
struct ToldLists {
  static constexpr int kMostRounds = 12, kMostTold = 8192;
  uint4 left[kMostRounds][kMaxListBlocks];  // high, low
  uint4 high[kMostTold], low[kMostTold];    // of three ranks, and the number
};

// Beside the scores.
struct ListSelectShared {
  int num_listed, num_candidates, num_near, num_emitted, list;
  uint32_t most_left, least_left;  // of all lists, their high halves
  int warp_sums[32];
  uint8_t rank_of[kMaxListBlocks];  // of each list of a later round
};
// In memory that is free when the scores are there.
struct ListSelectWorkspace {
  static constexpr int kNear = 4608, kCandidates = 32;
  uint64_t list[kMaxIndexTopk * 3];  // what the block has told, and tells
  uint64_t near[kNear];              // of what was told, all that may be chosen, in any order
  uint64_t candidates[kCandidates];
};

// By kThreads threads. The block has PartOfBlock of `parts` and holds `count` scores, those of
// every parts-th slice; the token has more than topk. `bins` counts their ScoreBin. kOfRanks: parts
// that follow each other are of the ranks in turn, all of which have `told` in their memory. A rank
// that is awaited in vain (packets.cuh) ends the wait: then any entries are emitted.
template <int kThreads, bool kOfRanks>
class ListSelect {
 public:
  __device__ ListSelect(ListSelectShared& shared, RankBins<kThreads>& bins,
                        ListSelectWorkspace& workspace, const float* scores, int count, int topk,
                        int parts, const PeerView& peers, ToldLists& told, uint32_t number)
      : s_(shared),
        bins_(bins),
        w_(workspace),
        scores_(scores),
        count_(count),
        topk_(topk),
        parts_(parts),
        list_(PartOfBlock<kOfRanks>(peers)),
        lists_(parts),
        peers_(peers),
        told_(told),
        number_(number) {
    // Of entries in any order a block has its share of topk, and never that many deviations more;
    // where the best lie together, it seldom has.
    const float mean = static_cast<float>(topk) / static_cast<float>(parts);
    SizeLists(static_cast<int>(mean + kDeviations * sqrtf(mean)) + 2, kTriples * kThreads);
  }

  __device__ void Run(const Selected& selected) {
    if (threadIdx.x == 0) {
      s_.num_listed = s_.num_emitted = 0;
      Reset(0xffffffffu);
    }
    __syncthreads();
    if (count_ <= 3 * triples_) {
      List(0);
    } else {
      const FoundBin found = bins_.Find(least_);
      ListBest(RankRange::OfBin(found.bin), found);
    }
#pragma unroll 1
    while (true) {
      __syncthreads();
      if (list_ >= 0) Tell();
      Ranks ranks;
      bool in_vain = false;
      const uint64_t left = Gather(ranks, in_vain);
      if constexpr (kOfRanks) {
        if (__syncthreads_or(in_vain) != 0) return EmitAny(selected);
      } else {
        __syncthreads();
      }
      // Most often topk of the ranks are above what anybody has left.
      const uint32_t above = s_.most_left + 1;
      if (round_ == 0 && above != 0) {
        Keep(ranks, above);
        if constexpr (kOfRanks) ListSiblings(ranks, above);
        __syncthreads();
        if (s_.num_near >= topk_) return Emit(RankOfHalves(above, 0), selected);
      }
      const uint64_t kth = FindKth(ranks);
      const bool open = static_cast<int>(threadIdx.x) < lists_ && left > kth;
      if (__syncthreads_or(open) == 0) {
        if constexpr (kOfRanks) ListSiblings(kth);
        return Emit(kth, selected);
      }
      Reopen(open, kth);
    }
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kDeviations = kOfRanks ? 7 : 9;  // that a list has more than its share
  static constexpr int kTriples = 3;  // that a thread gathers, in later rounds two
  static constexpr int kSlice = PartSlice(kOfRanks);
  using Scope = std::conditional_t<kOfRanks, OfPeers, OfGpu>;
  static_assert(3 * kTriples * kThreads <= ListSelectWorkspace::kNear);
  static_assert(kMaxIndexTopk + 3 * (kTriples - 1) * kThreads <= ListSelectWorkspace::kNear);
  // A thread tells three ranks, and the last what is left.
  static_assert((kMaxIndexTopk + kMaxIndexTopk / 4 + 4) / 3 < kThreads);
  // Bins of ranks where nothing says how near the k-th is: 4,096 to a power of two.
  static constexpr int kBinShift = 11;
  static constexpr int kAny = 1 << 30;
  // No block emits more than half of all that is told (or all of 2,048 entries).
  static_assert(3 * kTriples * kThreads / 2 <= kMaxIndexTopk * 3);
  // Halves of those that the thread has gathered; empty ones are 0.
  struct Ranks {
    uint32_t high[3 * kTriples], low[3 * kTriples];
  };

  // Lists of so many ranks or somewhat more, unless that is more triples than there is room for.
  __device__ void SizeLists(int least, int room) {
    least = min(least, topk_);
    triples_ = min((least + least / 4 + 4) / 3, room / lists_);
    least_ = min(least, 3 * triples_ - triples_ / 2);
  }
  // Thread 0, before another round; all that is carried is not below `least`.
  __device__ void Reset(uint32_t least) {
    s_.num_candidates = s_.num_near = 0;
    s_.most_left = 0, s_.least_left = least;
  }

  __device__ int EntryAt(int i) const {
    return (i / kSlice * parts_ + PartOfBlock<kOfRanks>(peers_)) * kSlice + i % kSlice;
  }
  // body(rank) for those of the block from `low` on that it has not told.
  template <typename Body>
  __device__ void ForEachUntold(uint64_t low, const Body& body) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < count_; i += kThreads) {
      const uint32_t ordered = OrderedKey(scores_[i]);
      if (ordered < High(low)) continue;
      const uint64_t rank = RankKey(ordered, EntryAt(i));
      if (rank >= low && rank <= left_) body(rank);
    }
  }
  // Of these, the least_ best, or somewhat less, and no more than fit. found: where the last of
  // those is, in range.
  __device__ void ListBest(RankRange range, FoundBin found) {
    const auto fits = [&](const FoundBin& f) {
      return least_ - f.missing + f.count <= 3 * triples_;
    };
    const auto enough = [&](const FoundBin& f) { return fits(f) || 2 * f.missing <= least_; };
    const auto untold = [&](const auto& body) { ForEachUntold(range.low, body); };
    Narrow(bins_, range, found, EntryAt(count_ - 1) + 1, enough, untold);
    List(fits(found) ? range.low : range.high + 1);
  }
  __device__ void List(uint64_t low) {
    ForEachUntold(low, [&](uint64_t rank) { w_.list[AddShared(&s_.num_listed, 1)] = rank; });
    left_ = low == 0 ? 0 : low - 1;
  }

  // This rank; of several, a warp tells each.
  __device__ void Tell() const {
    const auto thread = static_cast<int>(threadIdx.x);
    if constexpr (kOfRanks) {
      static_assert(kMaxPeers <= kWarps);
      const int rank = thread / 32;
      if (rank < peers_.size) {
        Tell(peers_.memory[rank] - peers_.memory[peers_.rank], thread % 32, 31, 32);
      }
    } else {
      Tell(0, thread, kThreads - 1, kThreads);
    }
  }
  // Memory `away` from this rank's, by so many threads, of which the last tells what is left.
  __device__ void Tell(int64_t away, int thread, int last, int threads) const {
    const auto store = [&](uint4* to, uint3 values) {
      to = reinterpret_cast<uint4*>(reinterpret_cast<std::byte*>(to) + away);
      StoreNumberedPacket<Scope>(to, values, number_);
    };
    if (thread == last) store(told_.left[round_] + list_, {High(left_), Low(left_), 0});
#pragma unroll 1
    for (int t = thread; t < triples_; t += threads) {
      uint64_t ranks[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int at = told_before_ + 3 * t + i;
        ranks[i] = at < s_.num_listed ? w_.list[at] : 0;
      }
      const int place = base_ + list_ * triples_ + t;
      store(told_.high + place, {High(ranks[0]), High(ranks[1]), High(ranks[2])});
      store(told_.low + place, {Low(ranks[0]), Low(ranks[1]), Low(ranks[2])});
    }
  }

  __device__ int RankOfList(int list) const {
    return round_ == 0 ? list % peers_.size : s_.rank_of[list];
  }
  // Whether a lane of the warp gathers a k-th triple.
  __device__ bool HasTriple(int k) const {
    return static_cast<int>(threadIdx.x) / 32 * 32 + k * kThreads < lists_ * triples_;
  }
  // All lists. Returns what is left of the thread's list, if it has one.
  __device__ uint64_t Gather(Ranks& ranks, bool& in_vain) const {
    const auto thread = static_cast<int>(threadIdx.x);
    const int size = lists_ * triples_;
    const auto at = [&](int k) { return thread + k * kThreads; };
    // Nobody looks again at what is there: the memory is what all blocks look at.
    struct {
      uint4 high, low;
    } told[kTriples] = {};
    uint4 left{};
    const auto has_triple = [&](int k) {
      return told[k].high.w == number_ && told[k].low.w == number_;
    };
    bool there;
    Patience patience(peers_, 0);
    do {
#pragma unroll
      for (int k = 0; k < kTriples; ++k) {
        if (!HasTriple(k) || has_triple(k)) continue;
        const int place = base_ + min(at(k), size - 1);
        told[k] = {LoadNumberedPacket<Scope>(told_.high + place),
                   LoadNumberedPacket<Scope>(told_.low + place)};
      }
      if (left.w != number_) {
        left = LoadNumberedPacket<Scope>(told_.left[round_] + min(thread, lists_ - 1));
      }
      there = left.w == number_;
      int missing = there ? -1 : min(thread, lists_ - 1);
#pragma unroll
      for (int k = 0; k < kTriples; ++k) {
        if (!HasTriple(k)) continue;
        if (kOfRanks && !has_triple(k)) missing = min(at(k), size - 1) / triples_;
        there = there && has_triple(k);
      }
      if constexpr (kOfRanks) {
        const bool waits = there || patience.Wait(RankOfList(missing));
        in_vain = in_vain || !waits;
        there = there || in_vain;
      }
    } while (!__all_sync(0xffffffffu, there));
#pragma unroll
    for (int k = 0; k < kTriples; ++k) {
      const uint4 high = at(k) < size ? told[k].high : uint4{};
      ranks.high[3 * k] = high.x, ranks.low[3 * k] = told[k].low.x;
      ranks.high[3 * k + 1] = high.y, ranks.low[3 * k + 1] = told[k].low.y;
      ranks.high[3 * k + 2] = high.z, ranks.low[3 * k + 2] = told[k].low.z;
    }
    if (thread / 32 * 32 >= lists_) return 0;
    const uint32_t most = __reduce_max_sync(0xffffffffu, left.x);
    const uint32_t least = __reduce_min_sync(0xffffffffu, left.x);
    if (thread % 32 == 0) atomicMax(&s_.most_left, most), atomicMin(&s_.least_left, least);
    return RankOfHalves(left.x, left.y);
  }

  // body(rank) for those that are near.
  template <typename Body>
  __device__ void ForEachNear(const Body& body) const {
    const int size = s_.num_near;
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += kThreads) body(w_.near[i]);
  }
  // Of the thread's ranks those with a high half from `least` on are near, too.
  __device__ void Keep(const Ranks& ranks, uint32_t least) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kTriples; ++k) {
      if (!HasTriple(k)) continue;
      uint32_t kept[3];
      int total = 0, place = 0;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        kept[i] = __ballot_sync(0xffffffffu, ranks.high[3 * k + i] >= least);
        total += __popc(kept[i]);
      }
      if (total == 0) continue;
      if (lane == 0) place = AddShared(&s_.num_near, total);
      place = __shfl_sync(0xffffffffu, place, 0);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int own = place + __popc(kept[i] & LanesBelow());
        const uint32_t high = ranks.high[3 * k + i];
        if (high >= least) w_.near[own] = RankOfHalves(high, ranks.low[3 * k + i]);
        place += __popc(kept[i]);
      }
    }
  }

  // The topk-th of what was told, 0 where that is less. All of the block's warps find the same.
  __device__ uint64_t FindKth(const Ranks& ranks) {
    // Not below what somebody has left and, later, the k-th before.
    const uint32_t most = max(s_.most_left, 1u), least = min(max(s_.least_left, 1u), most);
    const int shift = most > least ? max(0, 32 - __clz(most - least) - 12) : kBinShift;
    bins_.Clear();
    __syncthreads();
    if (threadIdx.x == 0) s_.num_near = carried_, s_.num_emitted = 0;
    __syncthreads();
    Keep(ranks, least);
    __syncthreads();
    ForEachNear([&](uint64_t rank) {
      bins_.Count(static_cast<int>(min((High(rank) - least) >> shift, kRankBins - 1u)));
    });
    __syncthreads();
    FoundBin found = bins_.Find(topk_);
    if (found.missing > found.count) return 0;
    const auto bin = static_cast<uint32_t>(found.bin);
    RankRange range{RankOfHalves(least + (bin << shift), 0), ~uint64_t{0}};
    if (bin < kRankBins - 1) range.high = range.low + (uint64_t{1} << (32 + shift)) - 1;
    const auto few = [](const FoundBin& f) { return f.count <= ListSelectWorkspace::kCandidates; };
    Narrow(bins_, range, found, kAny, few, [&](const auto& body) { ForEachNear(body); });
    ForEachNear([&](uint64_t rank) {
      if (range.Contains(rank)) w_.candidates[atomicAdd(&s_.num_candidates, 1)] = rank;
    });
    __syncthreads();
    const int lane = threadIdx.x % 32, count = s_.num_candidates;
    const uint64_t rank = lane < count ? w_.candidates[lane] : 0;
    int above = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) above += w_.candidates[i] > rank;
    const uint32_t last = __ballot_sync(0xffffffffu, lane < count && above == found.missing - 1);
    return __shfl_sync(0xffffffffu, rank, __ffs(static_cast<int>(last)) - 1);
  }

  // Another round, of the lists that are open, with the best before.
  __device__ void Reopen(bool open, uint64_t kth) {
    const auto thread = static_cast<int>(threadIdx.x);
    int total;
    const int rank_of = kOfRanks && open ? RankOfList(thread) : 0;
    const int list = BlockScan<kWarps>(open, s_.warp_sums, total);
    if (thread == list_) s_.list = open ? list : -1;
    if (kOfRanks && open) s_.rank_of[list] = static_cast<uint8_t>(rank_of);
    const int size = s_.num_near;
    carried_ = 0;
#pragma unroll 1
    for (int begin = 0; begin < size; begin += kThreads) {
      const uint64_t rank = begin + thread < size ? w_.near[begin + thread] : 0;
      const bool keeps = rank != 0 && rank >= kth;
      int kept;
      const int place = BlockScan<kWarps>(keeps, s_.warp_sums, kept);
      if (keeps) w_.near[carried_ + place] = rank;
      carried_ += kept;
    }
    __syncthreads();
    told_before_ = s_.num_listed;
    base_ += lists_ * triples_;
    ++round_;
    if (list_ >= 0) list_ = s_.list;
    lists_ = total;
    SizeLists(topk_, (kTriples - 1) * kThreads);
    __syncthreads();
    if (thread == 0) Reset(High(kth));
    if (list_ < 0) return;
    int better = 0, num_better;
    ForEachUntold(kth + 1, [&](uint64_t) { ++better; });
    BlockScan<kWarps>(better, s_.warp_sums, num_better);
    ListBest({kth + 1, left_}, {0, least_, num_better});
  }

  // What the block and its siblings have told becomes the list of what is emitted: in the first
  // round, of the thread's ranks those with a high half from `least` on.
  __device__ void ListSiblings(const Ranks& ranks, uint32_t least) {
    const int of_siblings = peers_.size * triples_,
              first = static_cast<int>(blockIdx.x) * of_siblings;
#pragma unroll
    for (int k = 0; k < kTriples; ++k) {
      const auto triple =
          static_cast<uint32_t>(static_cast<int>(threadIdx.x) + k * kThreads - first);
      if (triple >= static_cast<uint32_t>(of_siblings)) continue;
#pragma unroll
      for (int i = 3 * k; i < 3 * k + 3; ++i) {
        if (ranks.high[i] < least) continue;
        w_.list[AddShared(&s_.num_emitted, 1)] = RankOfHalves(ranks.high[i], ranks.low[i]);
      }
    }
  }
  // Of what is near, those from `least` on.
  __device__ void ListSiblings(uint64_t least) {
    const int first = static_cast<int>(blockIdx.x) * peers_.size;
    const float each = 1.0f / static_cast<float>(parts_);
    ForEachNear([&](uint64_t rank) {
      if (rank < least) return;
      // Below 2^20, so that the quotient is exact.
      const int slice = EntryOf(rank) / kSlice;
      const int row = static_cast<int>((static_cast<float>(slice) + 0.5f) * each);
      const auto after = static_cast<uint32_t>(slice - row * parts_ - first);
      if (after < static_cast<uint32_t>(peers_.size)) {
        w_.list[AddShared(&s_.num_emitted, 1)] = rank;
      }
    });
    __syncthreads();
  }
  // When a rank was awaited in vain.
  __device__ void EmitAny(const Selected& selected) const {
    for (int i = threadIdx.x; i < topk_; i += kThreads) selected.Store(i, i);
  }

  // Of the list from `least` on, the warps in turn: a rank's place is how many are better. All that
  // are chosen are near, and none is below `least`.
  __device__ void Emit(uint64_t least, const Selected& selected) const {
    if constexpr (kOfRanks) {
      const int warp = threadIdx.x / 32, listed = s_.num_emitted;
#pragma unroll 1
      for (int i = warp; i < listed; i += 2 * kWarps) {
        if (i + kWarps < listed) {
          Place<2>({w_.list[i], w_.list[i + kWarps]}, selected);
        } else {
          Place<1>({w_.list[i]}, selected);
        }
      }
    } else {
      EmitList(least, selected);
    }
  }
  __device__ void EmitList(uint64_t least, const Selected& selected) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;
#pragma unroll 1
    for (int first = 0; first < s_.num_listed; first += 32) {
      const uint64_t rank = first + lane < s_.num_listed ? w_.list[first + lane] : 0;
      const uint32_t all = __ballot_sync(0xffffffffu, rank >= least);
      const int turn = before + __popc(all & LanesBelow());
      uint32_t own = __ballot_sync(0xffffffffu, rank >= least && turn % kWarps == warp);
      before += __popc(all);
#pragma unroll 1
      for (; own != 0; own &= own - 1) {
        Place<1>({__shfl_sync(0xffffffffu, rank, __ffs(static_cast<int>(own)) - 1)}, selected);
      }
    }
  }
  // By a warp.
  template <int kCount>
  __device__ void Place(const uint64_t (&ranks)[kCount], const Selected& selected) const {
    const int lane = threadIdx.x % 32, near = s_.num_near, whole = near / 128 * 128;
    int better[kCount] = {};
    const auto compare = [&](uint64_t other) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) better[i] += other > ranks[i];
    };
#pragma unroll 1
    for (int k = lane; k < whole; k += 128) {
#pragma unroll
      for (int j = 0; j < 128; j += 32) compare(w_.near[k + j]);
    }
#pragma unroll
    for (int j = 0; j < 128; j += 32) {
      const int k = whole + lane + j;
      compare(k < near ? w_.near[k] : 0);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      better[i] = __reduce_add_sync(0xffffffffu, better[i]);
      if (lane == 0 && better[i] < topk_) selected.Store(better[i], EntryOf(ranks[i]));
    }
  }

  ListSelectShared& s_;
  RankBins<kThreads>& bins_;  // of the block's entries; then, of what is gathered
  ListSelectWorkspace& w_;
  const float* scores_;
  const int count_, topk_, parts_;
  int list_;                      // the block's, of the round's; -1: none
  int lists_;                     // of the round
  int triples_;                   // of each list
  int least_;                     // that a list has, unless it has all
  uint64_t left_ = ~uint64_t{0};  // the block has told all above
  int told_before_ = 0;           // in earlier rounds
  int round_ = 0, base_ = 0;      // where its lists begin
  int carried_ = 0;               // near ones of the rounds before
  const PeerView& peers_;
  ToldLists& told_;
  const uint32_t number_;
};

}  // namespace fathom::kernels
