// The experts of a step of decodes on sm_90a, where reading weights is all the work: one launch,
// one block a multiprocessor. A block takes items, one after another, and streams their weights
// through one ring in shared memory without a pause between items or between the two products.
//
// An item is 128 rows of weights (two row tiles) times a tile of up to kN tokens, FP8 twice as
// many. A step of one token has a kernel of its own, kN = 1, for columns in whole stages
// (Fp4AloneProducts), and another one where its items are few: slim ones, of one row tile,
// kRowTiles = 1. So have steps of up to kDirectTokens, whose FP4 tiles mostly have one user or two:
// these are multiplied as pairs, kPairs (Fp4PairProducts). Who does what:
//   4 warpgroups  multiply: two for each row tile, taking turns by column blocks (all four for a
//                 slim FP4 item's, two for FP8);
//   warp 16       deals the items out and fetches their weights as far ahead as the ring allows
//                 (pairs': kOnTheirWay);
//   warp 17       fetches the rest, activations and FP8 scales, as soon as they are complete
//                 (expert_activations.cuh);
//   warp 18       adds up the two halves of an item's sums and writes what becomes of them, while
//                 the others are at the next item;
//   warp 19       tells other blocks what is written, when it has arrived everywhere; of slim
//                 items nothing has to be told: it fetches activations beside warp 17;
//   warp 20       of tiles that name their tokens, hands over the activations that have landed: a
//                 fence of who copies them would wait for all that are still under way.
#pragma once

#include "kernels/gemm/ring_place.cuh"
#include "kernels/gemm/stream_products.cuh"
#include "kernels/gemm/weight_tiles.h"
#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/grouped_gemm/fp4_products.cuh"
#include "kernels/sm90.cuh"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

// Between stores to device memory and bulk copies of it within one launch.
__device__ inline void FenceAsyncProxy() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Which activations an item has: rows of its tile, one after the other; those of the tokens that it
// names, where `x` and `x_scales` are where those of all of the step's tokens begin (FetchApart);
// or the rows of one or two users of a direct tile, named by their places in it (FetchPair).
enum class ItemRows : uint8_t { kTogether, kApart, kPair };

// Uniform over the block.
struct ExpertItem {
  TileKind kind = TileKind::kFp4;
  int num_blocks = 0;  // column blocks; 0: there are no more items
  int num_tokens = 0;
  // Of weights: of the first row tile, and how far the second one is.
  const std::byte* weights = nullptr;
  int64_t row_tile_bytes = 0;
  const uint8_t* scales = nullptr;  // FP8: likewise
  int64_t scales_stride = 0;
  // Of activations: at the first column block, and how far the next one is.
  const std::byte* x = nullptr;
  int64_t x_block_bytes = 0;
  const float* x_scales = nullptr;
  int64_t x_scales_stride = 0;  // floats
  ItemRows rows = ItemRows::kTogether;
  NamedTile tokens = {};  // unless together
  // What is written, and where.
  bool is_down = false;  // of the second product
  int part = 0, pair_group = 0, expert = 0, tile = 0;
};

template <int kN, int kStages, int kRowTiles, bool kPairTiles = false>
class ExpertStream {
 public:
  static constexpr int kTokens = kN;
  static constexpr bool kSlim = kRowTiles == 1;
  static constexpr bool kAlone = kN == 1;
  static constexpr int kFp8Tokens = kAlone ? 8 : 2 * kN;
  // Column blocks of a stage.
  static constexpr int kFp4Blocks = kSlim ? 8 : 4, kFp8Blocks = kSlim ? 4 : 2;
  static constexpr int kScales = 2 * kFp8Blocks;  // of the FP8 weights of a stage
  // For activations that more lanes have written (kWarpArrivals).
  static constexpr int kXArrivals = kScales < kWarpArrivals ? kWarpArrivals : kScales;
  static constexpr int kRows = 128;  // of sums; a slim item's are twice 64 of the same
  static constexpr int kConsumers = 512;
  static constexpr bool kPairs = kPairTiles, kNamesTokens = kN == kTileRows && !kPairs;
  // Activations have barriers of their own: weights are expanded before they come.
  static constexpr bool kExpandsAhead = kAlone || kPairs;
  static constexpr int kThreads = kConsumers + (kNamesTokens ? 5 : 4) * 32;
  static constexpr int kWeightBytes = kRowTiles * kFp4Blocks * kFp4TileBytes;
  static constexpr int kFp4Rows = kAlone ? 8 : kN;          // of activations, a column block
  static constexpr int kXScales = kFp8Blocks * kFp8Tokens;  // at most, of either kind
  // Where FP8 activations begin: of one token behind FP4's, where what is zero stays so.
  static constexpr int kFp8X = kAlone ? kFp4Blocks * kFp4Rows * 128 : 0;
  // Of a column block; a slim item's only token has nothing beside it (TokenDescriptor).
  static constexpr int kFp8XBytes = kSlim ? 128 : kFp8Tokens * 128;
  static constexpr int kXBytes = kFp8X + (kSlim ? 1024 : kFp8Blocks * kFp8XBytes);
  static constexpr int kInboxTokens = kSlim ? 1 : kFp8Tokens;
  static constexpr int kItems = kStages + 6;  // more than a block has at hand
  // Stages of weights that a block has on their way at once. Three bring pairs' weights as soon as
  // all would, and leave more to what blocks tell each other (docs/performance/experts.md).
  static constexpr int kOnTheirWay = kPairs ? 3 : kStages;
  static constexpr int kInboxRow = kRows + 4;  // without bank conflicts

  struct Shared {
    alignas(1024) std::byte x[kStages][kXBytes];
    alignas(1024) std::byte weights[kStages][kWeightBytes];
    alignas(16) float x_scales[kStages][kXScales];
    float weight_scales[kStages][kFp8Blocks][2];  // of each row tile
    // For two items in turn: sums of each half of the column blocks.
    alignas(16) float inbox[2][2][kInboxTokens][kInboxRow];
    ExpertItem items[kItems];
    uint64_t item_full[kItems];
    uint64_t full[kStages], empty[kStages], inbox_full[2], inbox_empty[2];
    uint64_t x_full[kExpandsAhead ? kStages : 1];
    uint64_t landed[kNamesTokens ? kStages : 1];  // in turn, of stages whose tokens lie apart
    uint32_t zero;  // 0, which the compiler does not know (WarpHandBackBehind)
  };

  __device__ explicit ExpertStream(Shared& shared) : s_(shared) {}

  // All threads, once, before anything else.
  __device__ void Init() {
    if constexpr (kAlone) {
      for (int i = static_cast<int>(threadIdx.x); i < kStages * kXBytes / 16; i += kThreads) {
        reinterpret_cast<uint4*>(s_.x)[i] = {};
      }
      FenceSharedForWgmma();
    }
    if (threadIdx.x == 0) {
      if constexpr (kAlone || kPairs) s_.zero = 0;
      for (auto& barrier : s_.item_full) BarrierInit(&barrier, 1);
      for (int i = 0; i < kStages; ++i) {
        // Weights; activations and scales.
        BarrierInit(&s_.full[i], kExpandsAhead ? 1 : 1 + kXArrivals);
        if constexpr (kExpandsAhead) BarrierInit(&s_.x_full[i], kXArrivals);
        if constexpr (kNamesTokens) BarrierInit(&s_.landed[i], 32);
        BarrierInit(&s_.empty[i], kConsumers / 32 * kWarpArrivals);
      }
      for (int i = 0; i < 2; ++i) {
        BarrierInit(&s_.inbox_full[i], kConsumers / 32 * kWarpArrivals);
        BarrierInit(&s_.inbox_empty[i], kWarpArrivals);
      }
      BarrierInitFence();
    }
    __syncthreads();
  }

  // Warp 16. next(): this block's next item. `once`: no other block reads these weights in this
  // step, so they leave the L2 cache before what every layer reads again.
  template <typename Next>
  __device__ void FetchWeights(Next next, bool once) {
    const uint64_t policy = EvictFirst();
    Place stage;
    [[maybe_unused]] Place landing;  // the first of those that are on their way
    [[maybe_unused]] int on_their_way = 0;
    for (int i = 0;; ++i) {
      const ExpertItem item = next();
      if (lane() == 0) {
        s_.items[i % kItems] = item;
        BarrierArrive(&s_.item_full[i % kItems]);
      }
      if (item.num_blocks == 0) return;
      const int full = BlocksOf(item.kind);
      const auto block_bytes = static_cast<uint32_t>(TileMatrixBytes(item.kind));
      const std::byte* from = item.weights + lane() * item.row_tile_bytes;
      for (int block = 0; block < item.num_blocks; block += full) {
        const uint32_t bytes =
            static_cast<uint32_t>(min(full, item.num_blocks - block)) * block_bytes;
        if (!stage.first_round) BarrierWait(&s_.empty[stage.index], stage.parity ^ 1);
        if constexpr (kOnTheirWay < kStages) {
          if (on_their_way == kOnTheirWay) {
            BarrierWait(&s_.full[landing.index], landing.parity);
            landing.Next();
          } else {
            ++on_their_way;
          }
        }
        if (lane() == 0) BarrierExpectBytes(&s_.full[stage.index], kRowTiles * bytes);
        __syncwarp();
        if (lane() < kRowTiles) {
          const uint32_t to = SharedAddress(s_.weights[stage.index]) +
                              static_cast<uint32_t>(lane() * full) * block_bytes;
          if (once) {
            BulkCopyTo(to, from, bytes, &s_.full[stage.index], policy);
          } else {
            BulkCopyTo(to, from, bytes, &s_.full[stage.index]);
          }
          from += bytes;
        }
        stage.Next();
      }
    }
  }

  // A warp's in the ring.
  using Place = RingPlace<kStages>;
  __device__ Shared& shared() { return s_; }
  // Column blocks of a stage.
  __device__ static int BlocksOf(TileKind kind) {
    return kind == TileKind::kFp4 ? kFp4Blocks : kFp8Blocks;
  }

  // The block's i-th item, when it is there.
  __device__ const ExpertItem& Take(int i) {
    BarrierWait(&s_.item_full[i % kItems], (i / kItems) & 1);
    return s_.items[i % kItems];
  }
  // What a stage's activations and FP8 scales arrive at.
  __device__ uint64_t* XFull(const Place& stage) {
    if constexpr (kExpandsAhead) return &s_.x_full[stage.index];
    return &s_.full[stage.index];
  }

  // Warps 0 to 15.
  __device__ void Multiply() {
    Place stage;
    for (int i = 0;; ++i) {
      const ExpertItem& item = Take(i);
      // The compiler is to know that all threads take the same way.
      const int num_blocks = __shfl_sync(0xffffffffu, item.num_blocks, 0);
      if (num_blocks == 0) return;
      const int kind = __shfl_sync(0xffffffffu, static_cast<int>(item.kind), 0);
      if constexpr (kPairs) {
        const int rows = __shfl_sync(0xffffffffu, static_cast<int>(item.rows), 0);
        if (rows == static_cast<int>(ItemRows::kPair)) {
          MultiplyPair(stage, num_blocks, item, i);
          continue;
        }
      }
      if (kind == static_cast<int>(TileKind::kFp4)) {
        MultiplyItem<TileKind::kFp4>(stage, num_blocks, item.num_tokens, i);
      } else {
        MultiplyItem<TileKind::kFp8>(stage, num_blocks, item.num_tokens, i);
      }
    }
  }

  // Warp 18, for each item: writer.Begin(item) before its sums are there,
  // writer.Finish(item, inbox) when they are.
  template <typename Writer>
  __device__ void Write(Writer& writer) {
    for (int i = 0;; ++i) {
      const ExpertItem& item = Take(i);
      if (item.num_blocks == 0) return;
      writer.Begin(item);
      BarrierWait(&s_.inbox_full[i & 1], (i / 2) & 1);
      writer.Finish(item, s_.inbox[i & 1]);
      WarpHandBack(&s_.inbox_empty[i & 1]);
    }
  }

  using Inbox = float[2][kInboxTokens][kInboxRow];
  // Of a token and two rows of weights.
  __device__ static float2 Sum(const Inbox& inbox, int token, int row) {
    const float2 a = *reinterpret_cast<const float2*>(&inbox[0][token][row]);
    const float2 b = *reinterpret_cast<const float2*>(&inbox[1][token][row]);
    return {a.x + b.x, a.y + b.y};
  }
  // Of two rows of a slim item.
  __device__ static float2 SlimSum(const Inbox& inbox, int row) {
    const auto half = [&](int h) {
      const float2 a = *reinterpret_cast<const float2*>(&inbox[h][0][row]);
      const float2 b = *reinterpret_cast<const float2*>(&inbox[h][0][row + 64]);
      return float2{a.x + b.x, a.y + b.y};
    };
    const float2 a = half(0), b = half(1);
    return {a.x + b.x, a.y + b.y};
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warpgroup() { return static_cast<int>(threadIdx.x) / 128; }
  __device__ static int tile() { return warpgroup() % 2; }
  __device__ static int half() { return warpgroup() / 2; }
  // Whose part of an item a thread has: with pairs made anew for each, as addresses kept from item
  // to item would be more than there are registers.
  struct Consumer {
    uint32_t thread;  // of the block

    __device__ Consumer() : thread(threadIdx.x) {
      if constexpr (kPairs) asm volatile("" : "+r"(thread));
    }
    __device__ int lane() const { return static_cast<int>(thread % 32); }
    __device__ int of_group() const { return static_cast<int>(thread % 128); }
    __device__ int tile() const { return static_cast<int>(thread / 128 % 2); }
    __device__ int half() const { return static_cast<int>(thread / 256); }
    // Of its two rows of sums; the other one is the eighth after it.
    __device__ int first_row() const {
      return tile() * 64 + static_cast<int>(thread / 32 % 4 * 16 + thread % 32 / 4);
    }
  };

  // Of a pair: whole stages, as one token's.
  __device__ void MultiplyPair(Place& stage, int num_blocks, const ExpertItem& item, int i) {
    constexpr int kApart = kFp4Blocks / 2;
    const Consumer self;
    float d[4] = {};
    Fp4PairProducts<kApart> products(self.of_group());
    const uint32_t zero = *static_cast<volatile const uint32_t*>(&s_.zero);
    int last = -1;
    const auto end_last = [&] {
      products.End(d);
      WarpHandBackBehind(&s_.empty[max(last, 0)], last >= 0, d[0], d[2], zero);
    };
#pragma unroll 1
    for (int block = 0; block < num_blocks; block += kFp4Blocks) {
      const int at = stage.index;
      BarrierWait(&s_.full[at], stage.parity);
      products.Begin(
          s_.weights[at] + (self.tile() * kFp4Blocks + self.half()) * kFp4TileBytes,
          s_.x[at] + self.half() * kTileBytes, s_.x_scales[at] + self.half() * kN,
          [&] { BarrierWait(&s_.x_full[at], stage.parity); }, end_last);
      last = at;
      stage.Next();
    }
    end_last();
#pragma unroll
    for (float& sum : d) sum = QuadSum(sum);
    AwaitInbox(i);
    // Of four lanes each has one sum to send: of the first token or the second, row g or g + 8.
    const NamedTile tokens = item.tokens;
    const int e = self.lane() / 2 % 2, eighth = self.lane() % 2;
    const float low = e == 0 ? d[0] : d[1], high = e == 0 ? d[2] : d[3];
    if (e < tokens.count()) {
      s_.inbox[i & 1][self.half()][tokens[e]][self.first_row() + eighth * 8] =
          eighth == 0 ? low : high;
    }
    WarpArrive(&s_.inbox_full[i & 1]);
  }
  // A direct tile's of more tokens: sums in a pair's order, so that a token has the same bits
  // whoever else chose its expert.
  __device__ void MultiplyGroups(Place& stage, int num_blocks, int num_tokens, int i) {
    const Consumer self;
    float d[4][4] = {};
#pragma unroll 1
    for (int block = 0; block < num_blocks; block += kFp4Blocks) {
      const int at = stage.index;
      BarrierWait(&s_.full[at], stage.parity);
      BarrierWait(&s_.x_full[at], stage.parity);
#pragma unroll 1
      for (int b = self.half(); b < min(kFp4Blocks, num_blocks - block); b += 2) {
        MultiplyFp4Groups(s_.weights[at] + (self.tile() * kFp4Blocks + b) * kFp4TileBytes,
                          s_.x[at] + b * kTileBytes, s_.x_scales[at] + b * kN, self.of_group(), d);
      }
      WarpHandBack(&s_.empty[at]);
      stage.Next();
    }
    float sums[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] = d[0][j] + d[1][j] + (d[2][j] + d[3][j]);
    SendItem(self, sums, num_tokens, i);
  }

  template <TileKind kKind>
  __device__ void MultiplyItem(Place& stage, int num_blocks, int num_tokens, int i) {
    if constexpr (kPairs && kKind == TileKind::kFp4) {
      return MultiplyGroups(stage, num_blocks, num_tokens, i);
    }
    const Consumer self;
    float d[(kKind == TileKind::kFp4 ? kFp4Rows : kFp8Tokens) / 2] = {};
    if constexpr (kAlone && kKind == TileKind::kFp4) {
      MultiplyAlone(stage, num_blocks, d);
    } else if constexpr (kSlim) {
      MultiplySlimFp8(stage, num_blocks, d);
    } else {
      MultiplyStages<kKind>(self, stage, num_blocks, d);
    }
    SendItem(self, d, num_tokens, i);
  }
  template <int kSize>
  __device__ void SendItem(Consumer self, const float (&d)[kSize], int num_tokens, int i) {
    AwaitInbox(i);
    Send(self, d, num_tokens, s_.inbox[i & 1][self.half()]);
    WarpArrive(&s_.inbox_full[i & 1]);
  }
  __device__ void AwaitInbox(int i) {
    if (i >= 2) BarrierWait(&s_.inbox_empty[i & 1], (i / 2 - 1) & 1);
  }

  template <TileKind kKind, int kSize>
  __device__ __forceinline__ void MultiplyStages(Consumer self, Place& stage, int num_blocks,
                                                 float (&d)[kSize]) {
    constexpr int kBlocks = kKind == TileKind::kFp4 ? kFp4Blocks : kFp8Blocks;
    for (int block = 0; block < num_blocks; block += kBlocks) {
      BarrierWait(&s_.full[stage.index], stage.parity);
      if constexpr (kExpandsAhead) BarrierWait(&s_.x_full[stage.index], stage.parity);
      if (block + kBlocks <= num_blocks) {
        MultiplyBlocks<kKind, kBlocks / 2>(self, stage.index, self.half(), d);
      } else {
        for (int b = self.half(); b < num_blocks - block; b += 2) {
          MultiplyBlocks<kKind, 1>(self, stage.index, b, d);
        }
      }
      WarpHandBack(&s_.empty[stage.index]);
      stage.Next();
    }
  }

  // One token's FP4: whole stages, each handed back when the next one is under way. Two of every
  // four lanes have one half's even column blocks, two its odd ones; of a slim item two warpgroups
  // have them, each as those lanes would: the same sums.
  __device__ __forceinline__ void MultiplyAlone(Place& stage, int num_blocks, float (&d)[4]) {
    constexpr int kApart = kFp4Blocks / 2;
    const int first = kSlim ? 2 * tile() + half() : half();
    const int first_weights = kSlim ? first : tile() * kFp4Blocks + first;
    Fp4AloneProducts<kApart> products;
    const uint32_t zero = *static_cast<volatile const uint32_t*>(&s_.zero);
    int last = -1;
    const auto end_last = [&] {
      kSlim ? products.EndInTurn(d) : products.End(d);
      WarpHandBackBehind(&s_.empty[max(last, 0)], last >= 0, d[0], d[2], zero);
    };
    int block = 0;
    if constexpr (kSlim) {  // activations of the second product come long after its weights
      const int i = stage.index;
      BarrierWait(&s_.full[i], stage.parity);
      products.Expand(s_.weights[i] + first_weights * kFp4TileBytes);
      BarrierWait(&s_.x_full[i], stage.parity);
      products.BeginExpanded(s_.weights[i] + first_weights * kFp4TileBytes,
                             s_.x[i] + first * kFp4Rows * 128, s_.x_scales[i] + first);
      last = i;
      stage.Next();
      block = kFp4Blocks;
    }
#pragma unroll 1
    for (; block < num_blocks; block += kFp4Blocks) {
      const int i = stage.index;
      BarrierWait(&s_.full[i], stage.parity);
      products.Begin(
          s_.weights[i] + first_weights * kFp4TileBytes, s_.x[i] + first * kFp4Rows * 128,
          s_.x_scales[i] + first, [&] { BarrierWait(&s_.x_full[i], stage.parity); }, end_last);
      last = i;
      stage.Next();
    }
    end_last();
    if constexpr (kSlim) {
      d[0] += __shfl_xor_sync(0xffffffffu, d[0], 1), d[2] += __shfl_xor_sync(0xffffffffu, d[2], 1);
    } else {
      d[0] = QuadSum(d[0]), d[2] = QuadSum(d[2]);
    }
  }

  // A slim item's FP8, whole stages: two warpgroups have its only row tile, every second block
  // each.
  __device__ __forceinline__ void MultiplySlimFp8(Place& stage, int num_blocks, float (&d)[4]) {
    constexpr int kEach = kFp8Blocks / 2, kTileBytes = 8192;
#pragma unroll 1
    for (int block = 0; block < num_blocks; block += kFp8Blocks) {
      const int at = stage.index;
      BarrierWait(&s_.full[at], stage.parity);
      BarrierWait(&s_.x_full[at], stage.parity);
      if (tile() == 0) {
        float product[kEach][4];
        const uint64_t b = TokenDescriptor(s_.x[at] + kFp8X);
        WgmmaFence();
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int own = half() + 2 * i;
          const uint64_t a = SmemDescriptor(SharedAddress(s_.weights[at] + own * kTileBytes));
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            Wgmma<WgmmaType::kE4m3, 8>::FromSmem(product[i], a + 2 * q, b + own * 8 + q * 2,
                                                 q != 0);
          }
        }
        WgmmaCommit();
        float scales[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int own = half() + 2 * i;
          scales[i] = s_.weight_scales[at][own][0] * s_.x_scales[at][own * kFp8Tokens];
        }
        WgmmaWait<0>();
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          ReadyRegisters(product[i]);
          d[0] += product[i][0] * scales[i];
          d[2] += product[i][2] * scales[i];
        }
      }
      WarpHandBack(&s_.empty[at]);
      stage.Next();
    }
  }

  // Every second block of a stage, from `first` on.
  template <TileKind kKind, int kCount, int kSize>
  __device__ void MultiplyBlocks(Consumer self, int stage, int first, float (&d)[kSize]) {
    constexpr int kTokens = 2 * kSize;
    constexpr int kBytes = static_cast<int>(TileMatrixBytes(kKind));
    constexpr bool kFp4 = kKind == TileKind::kFp4;
    const std::byte* x = s_.x[stage] + (kFp4 ? 0 : kFp8X) + first * kTokens * 128;
    const float* x_scales = s_.x_scales[stage] + first * kTokens;
    if constexpr (kFp4) {
      MultiplyFp4Blocks<kTokens, kCount>(
          s_.weights[stage] + (self.tile() * kFp4Blocks + first) * kBytes, x, x_scales, d);
    } else {
      static_assert(kCount == 1);
      MultiplyFp8<kTokens, 1>(s_.weights[stage] + (self.tile() * kFp8Blocks + first) * kBytes, x,
                              &s_.weight_scales[stage][first][self.tile()], x_scales, d);
    }
  }

  // The sum of four lanes next to each other, in each of them.
  __device__ static float QuadSum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }

  template <int kSize>
  __device__ void Send(Consumer self, const float (&d)[kSize], int num_tokens,
                       float (&inbox)[kInboxTokens][kInboxRow]) {
    const int row = self.first_row();
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = j * 8 + self.lane() % 4 * 2 + e;
        if (token >= num_tokens) continue;
        inbox[token][row] = d[4 * j + e];
        inbox[token][row + 8] = d[4 * j + 2 + e];
      }
    }
  }

  Shared& s_;
};

}  // namespace fathom::kernels
