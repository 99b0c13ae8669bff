// Weight products of few tokens on sm_90a, where reading the weights is all the work: one block
// runs on a multiprocessor and streams the weights of its items, one after another, through one
// ring in shared memory, never stopping between items: one warp fetches weights as far ahead as the
// ring allows, some stages at a time on their way, another one activations when they are there, the
// others multiply. With one pair of warpgroups a block takes about half of the shared memory and of
// the registers, so that the next product of the stream can fill its own ring before it has to
// wait; with one warpgroup it finds room beside a block that widens.
//
// An item is one or two row tiles of weights, 64 rows for each warpgroup of a pair, times up to kN
// tokens. A cluster of `split` blocks works on the same items: block r on the r-th range of the
// columns. Where items have one row tile, a range is one or more parts, whose sums begin anew.
// Every block sends its sums of token t to block t % split, which adds them: neighbours first, then
// the sums of these, and so on, as parts are added. So results have the same bits each time, and
// with any number of blocks. Of more than 64 tokens sums go 64 at a time.
#pragma once

#include <algorithm>

#include "kernels/gemm/ring_place.cuh"
#include "kernels/gemm/stream_products.cuh"
#include "kernels/gemm/weight_tiles.h"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

// What the warpgroups and the end of an item need to know of it.
struct StreamInfo {
  TileKind kind;
  int num_blocks;   // column blocks, at least 1
  int part_blocks;  // of a part; only where items have one row tile
  int num_tokens;
  int place[3];  // the launch's own
  int row_tiles = 2;
  int first_token = 0;
};

// What a block multiplies for one item. Uniform over the block.
struct StreamItem {
  StreamInfo info;
  const std::byte* weights;  // of its first row tile, at its first column block
  int64_t row_tile_bytes;    // to the second row tile, where there is one
  const uint8_t* scales;     // FP8 kinds: of the first row tile, at its first column block
  int64_t scales_stride;     // to the second row tile's
  const std::byte* x;        // tiles of its tokens, at its first column block
  const float* x_scales;     // FP8 activations: likewise
  int64_t x_block_bytes;     // from one column block of x to the next
  int64_t x_scales_stride;   // likewise, floats
};

enum class StreamFormat { kPlain, kWide };  // FP8 and BF16; FP8 as BF16

// kFullBlocks: column blocks of a full stage of FP8 or BF16. kPairs: of warpgroups; two share the
// column blocks of every stage, for weights that take more instructions than one pair can issue.
// kTiles: row tiles of an item, at most, and warpgroups of a pair. kColumnsApart 2: a block's
// column blocks are every other one, as one of two pairs has them: two blocks of one pair give the
// sums of one block of two.
template <int kN, StreamFormat kFormat, int kFullBlocks, int kPairs, int kStages, int kTiles = 2,
          int kColumnsApart = 1>
class WeightStream {
 public:
  static constexpr int kTokens = kN;
  static constexpr int kRowTiles = kTiles;
  static constexpr bool kWide = kFormat == StreamFormat::kWide;
  static constexpr int kXTiles = kWide ? 2 * kFullBlocks : kFullBlocks;  // of a full stage
  static constexpr int kRows = 64 * kTiles + (kN < 64 ? 0 : 4);  // and what spreads the banks
  static constexpr int kConsumers = 128 * kTiles * kPairs;
  static constexpr int kWarps = kConsumers / 32;
  static constexpr int kThreads = kConsumers + 64;
  static_assert(kPairs == 1 || (kPairs == 2 && kFullBlocks == 2));
  static_assert(kTiles == 2 || (kTiles == 1 && kPairs == 1));
  static constexpr int kApart = kColumnsApart;
  static_assert(kApart == 1 || (kWide && kPairs == 1 && kFullBlocks == 1));
  static constexpr int kXTileBytes = kN * 128;
  static constexpr int kWeightTileBytes = 8192;  // of weights, in a column block
  static constexpr int kWeightBytes = kTiles * kFullBlocks * kWeightTileBytes;
  static constexpr int kXBytes = kXTiles * kXTileBytes;
  static constexpr int kSent = std::min(kN, 64);  // tokens at a time
  static constexpr int kInfos = kStages + 2;  // the most items of a block at a time, and one more
  static constexpr int kScales = kTiles * kFullBlocks;  // of the weights of a stage
  // Stages of weights on their way: 48 to 64 KB keep the memory busy, and what others read
  // meanwhile (the activations, the operator before) does not queue behind a whole ring.
  static constexpr int kOnTheirWay = kTiles == 1 ? 3 : 2;

  struct Shared {
    alignas(1024) std::byte x[kStages][kXBytes];
    alignas(1024) std::byte weights[kStages][kWeightBytes];
    alignas(16) float x_scales[kStages][kFullBlocks * kN];
    float weight_scales[kStages][kFullBlocks][kTiles];
    StreamInfo infos[kInfos];
    // Sums that blocks sent, twice in turn: [rank, pair][tokens of this block][row].
    alignas(16) float inbox[2][kPairs * kSent][kRows];
    uint64_t landed[kStages];                // weights
    uint64_t full[kStages], empty[kStages];  // full: activations and scales
    uint64_t inbox_full[2];
  };

  __device__ WeightStream(Shared& shared, int rank, int split_log2)
      : s_(shared),
        rank_(rank),
        split_log2_(split_log2),
        split_(1 << split_log2),
        tokens_each_(kSent >> split_log2_),
        first_block_(ClusterRank() - static_cast<uint32_t>(rank)) {}

  // Warp kWarps: weights, which depend on nothing, as far ahead as the ring has room. items(i) is
  // this block's i-th item of items.count(). `once`: no other block reads these weights in this
  // step, so they leave the L2 cache before all else.
  template <typename Items>
  __device__ void FetchWeights(const Items& items, bool once) {
    const uint64_t policy = EvictFirst();
    Place stage, oldest;
    bool met = false;  // the first stages are asked for before the block has met
    if (lane() == 0) {
      for (auto& barrier : s_.landed) BarrierInit(&barrier, 1);
      BarrierInitFence();
    }
    __syncwarp();
    int on_their_way = 0;
    const int count = items.count();
    for (int i = 0; i < count; ++i) {
      const StreamItem p = items(i);
      const std::byte* from = p.weights + lane() * p.row_tile_bytes;
      for (int block = 0; block < p.info.num_blocks; block += kFullBlocks) {
        const auto bytes =
            static_cast<uint32_t>(min(kFullBlocks, p.info.num_blocks - block) * kWeightTileBytes);
        AwaitEmpty(stage);
        if (on_their_way == kOnTheirWay) {
          if (!met) Meet();
          met = true;
          BarrierWait(&s_.landed[oldest.index], oldest.parity);
          oldest.Next();
        } else {
          ++on_their_way;
        }
        if (lane() == 0) {
          if (block == 0) s_.infos[i % kInfos] = p.info;
          BarrierExpectBytes(&s_.landed[stage.index],
                             static_cast<uint32_t>(p.info.row_tiles) * bytes);
        }
        __syncwarp();
        if (lane() < p.info.row_tiles) {
          const uint32_t to =
              SharedAddress(s_.weights[stage.index]) + static_cast<uint32_t>(lane()) * bytes;
          if (once) {
            BulkCopyTo(to, from, bytes, &s_.landed[stage.index], policy);
          } else {
            BulkCopyTo(to, from, bytes, &s_.landed[stage.index]);
          }
        }
        from += kApart * bytes;
        stage.Next();
      }
    }
    if (!met) Meet();
    if (split_ > 1) ClusterWait();
  }

  // The next warp: activations, when the predecessor has ended, and the scales of both sides. Lanes
  // 0, 1, … fetch a tile of activations each, the next ones their scales. wait() waits for it;
  // kIsEarly: they are there, before the scales.
  template <bool kIsEarly, typename Items, typename Waiting>
  __device__ void FetchActivations(const Items& items, const Waiting& wait) {
    // Ready for the moment when the predecessor ends: the ring's first stages lack nothing but
    // their activations.
    const int count = items.count();
    StreamItem p{}, next{};
    if (count > 0) next = p = items(0);
    if (count > 1) next = items(1);
    Role role = MakeRole(p);
    LoadScales(p, 0);
    const int ready = min(kStages * kFullBlocks, p.info.num_blocks);  // blocks
    Meet();
    const auto announce = [&] {
      if (count > 0) TakeScales(p, 0, next);
      for (int block = 0, i = 0; block < ready; block += kFullBlocks, ++i) Announce(p, block, i);
    };
    if (!kIsEarly) announce();
    if (split_ > 1) ClusterWait();
    if (!kIsEarly) wait();
    Place stage;
    for (int block = 0; block < ready; block += kFullBlocks, stage.Next()) {
      Fetch(role, p, block, stage.index);
    }
    if (kIsEarly) announce();
    AllowSuccessor();
    for (int i = 0; i < count; ++i) {
      for (int block = i == 0 ? ready : 0; block < p.info.num_blocks; block += kFullBlocks) {
        if (block % 32 == 0) TakeScales(p, block, next);
        AwaitEmpty(stage);
        Fetch(role, p, block, stage.index);  // which takes longer than to write scales
        Announce(p, block, stage.index);
        stage.Next();
      }
      p = next;
      role = MakeRole(p);
      if (i + 2 < count) next = items(i + 2);
    }
  }

  // Warps 0 to kWarps - 1, for each of `count` items: writer.Begin(info), the products, and, for up
  // to kSent tokens at a time, writer.Finish(info, inbox), which takes its sums with Sum2 and Sum4.
  template <typename Writer>
  __device__ void Consume(int count, Writer writer) {
    if (threadIdx.x == 0) {
      for (auto& barrier : s_.full) BarrierInit(&barrier, kScales);
      for (auto& barrier : s_.empty) BarrierInit(&barrier, kWarps * kWarpArrivals);
      for (auto& barrier : s_.inbox_full) BarrierInit(&barrier, kWarps * split_);
      BarrierInitFence();
    }
    Meet();
    if (split_ > 1) ClusterWait();  // every block has started
    for (int i = 0; i < count; ++i) {
      BarrierWait(&s_.landed[stage_], parity_);
      StreamInfo info = s_.infos[i % kInfos];
      // The compiler is to know that all threads take the same way.
      info.kind = static_cast<TileKind>(__shfl_sync(0xffffffffu, static_cast<int>(info.kind), 0));
      info.num_blocks = __shfl_sync(0xffffffffu, info.num_blocks, 0);
      writer.Begin(info);
      Expect(info, 0);
      float d[kN / 2] = {};
      if constexpr (kTiles == 1) {
        MultiplyParts(info, d);
      } else if constexpr (kWide) {
        Multiply<TileKind::kFp8AsBf16, kFullBlocks>(info.num_blocks, d);
      } else if (info.kind == TileKind::kFp8) {
        Multiply<TileKind::kFp8, kFullBlocks>(info.num_blocks, d);
      } else {
        Multiply<TileKind::kBf16, kFullBlocks>(info.num_blocks, d);
      }
      Exchange<0>(d, info, writer);
    }
  }

  // Of this block's k-th token and a row, summed over the cluster; of two and of four rows.
  __device__ float2 Sum2(const float (*inbox)[kRows], int k, int row) const {
    const int count = split_ * kPairs;  // 1, 2, 4 or 8
    const auto add = [](float2 a, float2 b) { return float2{a.x + b.x, a.y + b.y}; };
    const auto sent = [&](int r) {
      return *reinterpret_cast<const float2*>(&inbox[r * tokens_each_ + k][row]);
    };
    const auto two = [&](int r) { return add(sent(r), sent(r + 1)); };
    float2 sum = count == 1 ? sent(0) : two(0);
    if (count > 2) sum = add(sum, two(2));
    if (count > 4) sum = add(sum, add(two(4), two(6)));
    return sum;
  }
  __device__ float4 Sum4(const float (*inbox)[kRows], int k, int row) const {
    const float2 first = Sum2(inbox, k, row), second = Sum2(inbox, k, row + 2);
    return {first.x, first.y, second.x, second.y};
  }
  __device__ int rank() const { return rank_; }
  __device__ int split() const { return split_; }

 private:
  using Place = RingPlace<kStages>;
  // What a lane of the warp that fetches activations copies for every stage of an item.
  struct Role {
    const std::byte* from;
    int64_t step;          // from stage to stage
    uint32_t bytes;        // 0: nothing
    uint32_t to, to_step;  // in shared memory, from stage to stage of the ring
  };

  // All warps, once: the block's barriers are ready. Each does before what needs only its own.
  __device__ void Meet() const {
    NamedBarrier(2, kThreads);
    if (split_ > 1) ClusterArrive();
  }

  // Before the products, so that nothing is left to do behind them: this block's inbox waits for
  // the sums of its tokens, of kSent from `first` on.
  __device__ void Expect(const StreamInfo& info, int first) {
    if (split_ == 1 || threadIdx.x != 0) return;
    const int num_tokens = min(kSent, info.num_tokens - first);
    const int mine = max(0, (num_tokens - rank_ + split_ - 1) >> split_log2_);
    BarrierExpectMore(&s_.inbox_full[sent_ & 1],
                      static_cast<uint32_t>(split_ * kPairs * info.row_tiles * 64 * 4 * mine));
  }

  // Sums of the tokens from kFirst on, d of kSent at a time.
  template <int kFirst, typename Writer>
  __device__ void Exchange(const float (&d)[kN / 2], StreamInfo info, Writer& writer) {
    StreamInfo part = info;
    part.first_token += kFirst;
    part.num_tokens = min(kSent, info.num_tokens - kFirst);
    const int buffer = sent_ & 1;
    Send(d + kFirst / 2, part, buffer);
    if (split_ == 1) {
      NamedBarrier(1, kConsumers);
    } else {
      BarrierWaitCluster(&s_.inbox_full[buffer], (sent_ / 2) & 1);
    }
    ++sent_;
    writer.Finish(part, s_.inbox[buffer]);
    if constexpr (kFirst + kSent < kN) {
      if (info.num_tokens > kFirst + kSent) {
        Expect(info, kFirst + kSent);
        Exchange<kFirst + kSent>(d, info, writer);
      }
    }
  }

  __device__ static int pair() { return kPairs == 1 ? 0 : static_cast<int>(threadIdx.x / 256); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int tile() { return kTiles == 1 ? 0 : static_cast<int>(threadIdx.x / 128 % 2); }
  __device__ static bool HasXScales(TileKind kind) { return kind == TileKind::kFp8; }
  // Of a tile of activations: rows of tokens that there are. The others' sums go nowhere.
  __device__ static uint32_t XTileBytes(const StreamItem& p) {
    return static_cast<uint32_t>(p.info.num_tokens) * 128;
  }
  // Tiles of activations of so many column blocks.
  __device__ static int XTiles(int blocks) { return kWide ? 2 * blocks : blocks; }

  __device__ void AwaitEmpty(const Place& stage) {
    if (!stage.first_round) BarrierWait(&s_.empty[stage.index], stage.parity ^ 1);
  }

  __device__ Role MakeRole(const StreamItem& p) {
    if (lane() < kXTiles) {
      return {p.x + lane() * p.x_block_bytes, kApart * kXTiles * p.x_block_bytes, XTileBytes(p),
              SharedAddress(s_.x) + lane() * kXTileBytes, kXBytes};
    }
    const int i = lane() - kXTiles;
    if (i >= kFullBlocks || !HasXScales(p.info.kind)) return {nullptr, 0, 0, 0, 0};
    return {reinterpret_cast<const std::byte*>(p.x_scales + i * p.x_scales_stride),
            kFullBlocks * p.x_scales_stride * int64_t{sizeof(float)}, kN * sizeof(float),
            SharedAddress(s_.x_scales) + i * kN * static_cast<uint32_t>(sizeof(float)),
            sizeof(s_.x_scales[0])};
  }

  // This lane's copy of a stage; moves on to the next stage. Of an odd number of blocks the last
  // stage holds one.
  __device__ void Fetch(Role& role, const StreamItem& p, int block, int stage) {
    const int blocks = min(kFullBlocks, p.info.num_blocks - block);
    const bool is_x = lane() < kXTiles;
    if (role.bytes != 0 && (is_x ? lane() < XTiles(blocks) : lane() - kXTiles < blocks)) {
      BulkCopyTo(role.to + static_cast<uint32_t>(stage) * role.to_step, role.from, role.bytes,
                 &s_.full[stage]);
    }
    role.from += role.step;
  }

  // FP8 kinds: the scales of 32 column blocks, a lane each. They are loaded when those before are
  // taken, so that nothing waits for them.
  __device__ void LoadScales(const StreamItem& p, int block) {
    if (p.scales == nullptr) return;
    const int mine = kApart * min(block + lane(), p.info.num_blocks - 1);
    loaded_[0] = p.scales[mine];
    loaded_[1] = p.scales[p.scales_stride + mine];
  }
  __device__ void TakeScales(const StreamItem& p, int block, const StreamItem& next) {
    scales_[0] = Ue8m0Value(loaded_[0]);
    scales_[1] = Ue8m0Value(loaded_[1]);
    if (block + 32 < p.info.num_blocks) {
      LoadScales(p, block + 32);
    } else {
      LoadScales(next, 0);
    }
  }

  // Writes the FP8 scales of a stage's weights and says what else it will hold. Each lane speaks
  // for what it wrote itself.
  __device__ void Announce(const StreamItem& p, int block, int stage) {
    const int from = (block + lane() / kTiles) % 32, tile = lane() % kTiles;
    const float first = __shfl_sync(0xffffffffu, scales_[0], from);
    const float second = __shfl_sync(0xffffffffu, scales_[1], from);
    if (lane() < kScales && p.scales != nullptr) {
      s_.weight_scales[stage][lane() / kTiles][tile] = tile == 0 ? first : second;
    }
    if (lane() == 0) {
      const int blocks = min(kFullBlocks, p.info.num_blocks - block);
      const int scales =
          HasXScales(p.info.kind) ? blocks * kN * static_cast<int>(sizeof(float)) : 0;
      BarrierExpectBytes(&s_.full[stage], static_cast<uint32_t>(XTiles(blocks)) * XTileBytes(p) +
                                              static_cast<uint32_t>(scales));
    } else if (lane() < kScales) {
      BarrierArrive(&s_.full[stage]);
    }
    __syncwarp();
  }

  // One item of FP8, part after part.
  __device__ void MultiplyParts(const StreamInfo& info, float (&d)[kN / 2]) {
    constexpr int kLevels = 3;
    // Of the last part, the last two and the last four, not yet added.
    float sums[kLevels][kN / 2] = {};
    const int part_blocks = __shfl_sync(0xffffffffu, info.part_blocks, 0);
    for (int part = 0; part * part_blocks < info.num_blocks; ++part) {
#pragma unroll
      for (float& v : d) v = 0;
      Multiply<TileKind::kFp8, kFullBlocks>(part_blocks, d);
      bool carries = true;
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        const bool has_sum = (part >> level & 1) != 0;
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          if (carries && has_sum) d[i] += sums[level][i];
          if (carries && !has_sum) sums[level][i] = d[i];
        }
        carries = carries && has_sum;
      }
    }
  }

  // Columns of one item. Where it has one row tile of two, the second warpgroup's sums are of
  // anything, and stay where they are.
  template <TileKind kKind, int kStageBlocks>
  __device__ void Multiply(int num_blocks, float (&d)[kN / 2]) {
    for (int block = 0; block < num_blocks; block += kStageBlocks) {
      BarrierWait(&s_.landed[stage_], parity_);
      BarrierWait(&s_.full[stage_], parity_);
      if (block + kStageBlocks <= num_blocks) {
        MultiplyStage<kKind, kStageBlocks>(d);
      } else {
        MultiplyStage<kKind, 1>(d);
      }
      WarpHandBack(&s_.empty[stage_]);
      if (++stage_ == kStages) stage_ = 0, parity_ ^= 1;
    }
  }

  template <TileKind kKind, int kStageBlocks>
  __device__ void MultiplyStage(float (&d)[kN / 2]) {
    static_assert(kStageBlocks == 1 || kStageBlocks == 2);
    constexpr int kXBlockBytes = kKind == TileKind::kFp8AsBf16 ? kN * 256 : kN * 128;
    constexpr int kEach = kStageBlocks == 2 ? 2 / kPairs : 1;  // blocks of a pair
    if (kStageBlocks == 1 && pair() != 0) return;
    const int first = pair() * kEach;
    const std::byte* weights =
        s_.weights[stage_] + (tile() * kStageBlocks + first) * kWeightTileBytes;
    const std::byte* x = s_.x[stage_] + first * kXBlockBytes;
    const float* weight_scales = &s_.weight_scales[stage_][first][tile()];
    const float* x_scales = s_.x_scales[stage_] + first * kN;
    if constexpr (kKind == TileKind::kFp8) {
      MultiplyFp8<kN, kEach, kTiles>(weights, x, weight_scales, x_scales, d);
    } else if constexpr (kKind == TileKind::kBf16) {
      MultiplyBf16<kN, kEach>(weights, x, d);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        MultiplyWide<kN>(weights + i * kWeightTileBytes, x + i * kXBlockBytes,
                         weight_scales[kTiles * i], d);
      }
    }
  }

  // Every warp sends its sums of each token to the block that finishes it, and says so to all: that
  // it has sent, and so has read what was in this inbox the time before the last. (A release at
  // the cluster's scope would do for both, but it waits for all that the warp ever wrote, and
  // takes two microseconds while memory is busy.)
  __device__ void Send(const float* d, const StreamInfo& part, int buffer) {
    uint64_t* const full = &s_.inbox_full[buffer];
    const int row = static_cast<int>(threadIdx.x % (128 * kTiles) / 32) * 16 + lane() / 4;
    const int place = (rank_ * kPairs + pair()) * tokens_each_;
    if (split_ == 1) {
      float* to = &s_.inbox[buffer][place + lane() % 4 * 2][row];
#pragma unroll
      for (int i = 0; i < kSent / 2; ++i) {
        to[(i / 4 * 8 + i % 2) * kRows + i % 4 / 2 * 8] = d[i];
      }
      return;
    }
    const int num_tokens = tile() < part.row_tiles ? part.num_tokens : 0;
    const int step = (8 >> split_log2_) * kRows * static_cast<int>(sizeof(float));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int first = lane() % 4 * 2 + e;
      const uint32_t owner = first_block_ + static_cast<uint32_t>(first & (split_ - 1));
      const int k = place + (first >> split_log2_);
      const uint32_t to = AddressInBlock(&s_.inbox[buffer][k][row], owner);
      const uint32_t full_there = AddressInBlock(full, owner);
#pragma unroll
      for (int j = 0; j < kSent / 8; ++j) {
        if (j * 8 + first >= num_tokens) continue;
        SendInCluster(to + j * step, d[4 * j + e], full_there);
        SendInCluster(to + j * step + 8 * sizeof(float), d[4 * j + 2 + e], full_there);
      }
    }
    __syncwarp();
    if (lane() < split_) BarrierCountAt(full, first_block_ + static_cast<uint32_t>(lane()));
  }

  Shared& s_;
  // Of this lane of the last warp: of a column block, for each row tile; and what comes next.
  float scales_[2] = {};
  uint32_t loaded_[2] = {};
  int sent_ = 0;   // times that sums were exchanged
  int stage_ = 0;  // of the consumers
  uint32_t parity_ = 0;
  const int rank_, split_log2_, split_, tokens_each_;  // split: at most 8
  const uint32_t first_block_;                         // the cluster's rank of the block of rank 0
};

}  // namespace fathom::kernels
