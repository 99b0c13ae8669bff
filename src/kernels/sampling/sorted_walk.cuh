// A walk over a row's tokens from the best down, without sorting them: Find says at which logit the
// tokens so far exceed a given count or weight. A radix descent over the logits' bits, 11 at a
// time; sums are integers, so their order does not matter. Device code only.
#pragma once

#include "kernels/sampling/row_weights.cuh"

namespace fathom::kernels {

inline constexpr int kDigitBins = 2048;
inline constexpr int kOwnBins = kDigitBins / kRowBlocks;

// A weight in parts whose sums over a block's slice fit 32 bits (a slice has fewer than 2^16
// tokens): shared memory adds no 64-bit integers.
struct Histogram {
  uint32_t count[kDigitBins];
  uint32_t weight[3][kDigitBins];  // bits 0..15, 16..31, 32..

  __device__ void Clear() {
    for (int i = threadIdx.x; i < kDigitBins; i += kRowThreads) {
      count[i] = weight[0][i] = weight[1][i] = weight[2][i] = 0;
    }
  }
  __device__ void Add(uint32_t bin, const Mass& mass) {
    if (mass.count == 0) return;
    atomicAdd(&count[bin], 1u);
    if (mass.weight == 0) return;
    atomicAdd(&weight[0][bin], static_cast<uint32_t>(mass.weight & 0xffff));
    atomicAdd(&weight[1][bin], static_cast<uint32_t>(mass.weight >> 16 & 0xffff));
    atomicAdd(&weight[2][bin], static_cast<uint32_t>(mass.weight >> 32));
  }
  // Of all blocks.
  __device__ Mass OverCluster(int bin) const {
    uint32_t counts[kRowBlocks], parts[kRowBlocks][3];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {  // all on their way before the first is used
      counts[r] = LoadOf(count[bin], r);
#pragma unroll
      for (int i = 0; i < 3; ++i) parts[r][i] = LoadOf(weight[i][bin], r);
    }
    unsigned long long n = 0, sum[3] = {};
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      n += counts[r];
#pragma unroll
      for (int i = 0; i < 3; ++i) sum[i] += parts[r][i];
    }
    return {sum[0] + (sum[1] << 16) + (sum[2] << 32), n};
  }
};

struct WalkShared {
  Histogram histogram;
  // Of the bins that this block looks after, over the whole cluster: of the first digit, which
  // every walk begins with, and of the digit at hand.
  Mass first_digit[kOwnBins];
  Mass digit[kOwnBins];
  struct Found {
    int bin;
    Mass above;
  } found;
};

// Where a walk has got to.
struct WalkPlace {
  uint32_t key;  // of the logit
  Mass above;    // all tokens with better logits
};

class SortedWalk {
 public:
  // After this every block may call Find, all together.
  __device__ SortedWalk(const RowSlice& slice, const Weights& weights, WalkShared& shared,
                        ClusterValues& values)
      : slice_(slice), weights_(weights), s_(shared), values_(values) {
    Count(0, kFirstShift, 32, s_.first_digit);
  }

  // The best place at which the weight (or count) of the tokens up to and with it is above
  // `target`, which is less than that of all.
  __device__ WalkPlace Find(bool by_count, unsigned long long target) {
    WalkPlace place{0, {0, 0}};
    Descend(by_count, target, s_.first_digit, place);
    uint32_t prefix = place.key;  // the digits so far
    Count(prefix, 10, kFirstShift, s_.digit);
    Descend(by_count, target, s_.digit, place);
    prefix = prefix << 11 | place.key;
    Count(prefix, 0, 10, s_.digit);
    Descend(by_count, target, s_.digit, place);
    place.key |= prefix << 10;
    return place;
  }

 private:
  static constexpr int kFirstShift = 21;
  static __device__ unsigned long long Measure(bool by_count, const Mass& m) {
    return by_count ? m.count : m.weight;
  }

  // Counts the digit from bit `shift` of the keys whose bits from `prefix_shift` are `prefix`.
  __device__ void Count(uint32_t prefix, int shift, int prefix_shift, Mass* own) {
    s_.histogram.Clear();
    __syncthreads();
    const uint32_t mask = (1u << (min(prefix_shift, 32) - shift)) - 1;
    slice_.ForEach([&](int i) {
      const uint32_t key = OrderedKey(slice_.logits[i]);
      if (prefix_shift < 32 && key >> prefix_shift != prefix) return;
      s_.histogram.Add(key >> shift & mask, weights_.Of(slice_.logits[i]));
    });
    ClusterSync();
    if (threadIdx.x < kOwnBins) {
      const int bin = static_cast<int>(ClusterRank()) * kOwnBins + static_cast<int>(threadIdx.x);
      own[threadIdx.x] = s_.histogram.OverCluster(bin);
    }
    __syncthreads();
  }

  // Finds the bin of the digit; place.key becomes that bin, place.above grows by those before.
  __device__ void Descend(bool by_count, unsigned long long target, const Mass* own,
                          WalkPlace& place) {
    const int bin = kOwnBins - 1 - static_cast<int>(threadIdx.x);  // from the best
    values_.Show(values_.OverBlock(threadIdx.x < kOwnBins ? own[bin] : Mass{0, 0}, Add()));
    int owner = kRowBlocks - 1;
    for (; owner > 0; --owner) {
      const Mass with = Add()(place.above, values_.Of<Mass>(owner));
      if (Measure(by_count, with) > target) break;
      place.above = with;
    }
    if (static_cast<int>(ClusterRank()) == owner && threadIdx.x < 32) {
      FindBin(by_count, target, own, place.above);
    }
    ClusterSync();
    const WalkShared::Found found = LoadOf(s_.found, owner);
    place = {static_cast<uint32_t>(owner * kOwnBins + found.bin), found.above};
    ClusterSync();  // found and the bins are read until here
  }

  // One warp: lane 0 has the best of the bins.
  __device__ void FindBin(bool by_count, unsigned long long target, const Mass* own, Mass above) {
    constexpr int kEach = kOwnBins / 32;
    const int lane = static_cast<int>(threadIdx.x);
    Mass sum{0, 0};
    for (int i = 0; i < kEach; ++i) sum = Add()(sum, own[kOwnBins - 1 - lane * kEach - i]);
    Mass before = sum;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const Mass other{__shfl_up_sync(0xffffffffu, before.weight, offset),
                       __shfl_up_sync(0xffffffffu, before.count, offset)};
      if (lane >= offset) before = Add()(before, other);
    }
    const Mass with = Add()(above, before);
    const uint32_t over = __ballot_sync(0xffffffffu, Measure(by_count, with) > target);
    if (over == 0 || lane != __ffs(static_cast<int>(over)) - 1) return;
    above = {with.weight - sum.weight, with.count - sum.count};
    int bin = kOwnBins - 1 - lane * kEach;
    for (int i = 1; i < kEach; ++i, --bin) {
      const Mass next = Add()(above, own[bin]);
      if (Measure(by_count, next) > target) break;
      above = next;
    }
    s_.found = {bin, above};
  }

  const RowSlice& slice_;
  const Weights& weights_;
  WalkShared& s_;
  ClusterValues& values_;
};

}  // namespace fathom::kernels
