// Weight products of few tokens on sm_90a, where reading the weights is all the work: one block
// runs on a multiprocessor and streams the weights of its items, one after another, through one
// ring in shared memory, never stopping between items. With one pair of warpgroups a block takes
// about half of the shared memory and of the registers, so that the next product of the stream can
// fill its own ring before it has to wait.
//
// An item is 128 rows of weights (two row tiles, one for each of the two warpgroups) times up to kN
// tokens. A cluster of `split` blocks works on the same items: block r on the r-th part of the
// columns. Every block sends its sums of token t to block t % split, which adds them in order of
// rank: results repeat bit for bit.
#pragma once

#include <algorithm>

#include "kernels/gemm/stream_products.cuh"
#include "kernels/gemm/weight_tiles.h"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

// What the warpgroups and the end of an item need to know of it.
struct StreamInfo {
  TileKind kind;
  int num_blocks;  // column blocks, at least 1
  int num_tokens;
  int place[3];  // the launch's own
};

// What a block multiplies for one item. Uniform over the block.
struct StreamItem {
  StreamInfo info;
  const std::byte* weights;  // of its first row tile, at its first column block
  int64_t row_tile_bytes;    // to the second row tile; 0: there is none (its sums are not used)
  const uint8_t* scales;     // FP8 kinds: of the first row tile, at its first column block
  int64_t scales_stride;     // to the second row tile's
  const std::byte* x;        // tiles of its tokens, at its first column block
  const float* x_scales;     // FP8 activations: likewise
  int64_t x_block_bytes;     // from one column block of x to the next
  int64_t x_scales_stride;   // likewise, floats
};

enum class StreamFormat { kPlain, kWide, kFp4 };  // FP8 and BF16; FP8 as BF16; FP8 and FP4

// kFullBlocks: column blocks of a full stage of FP8 or BF16. kPairs: of warpgroups; two share the
// column blocks of every stage, for weights that take more instructions than one pair can issue.
template <int kN, StreamFormat kFormat, int kFullBlocks, int kPairs, int kStages>
class WeightStream {
 public:
  static constexpr bool kWide = kFormat == StreamFormat::kWide;
  static constexpr bool kHasFp4 = kFormat == StreamFormat::kFp4;
  static constexpr int kFp4Blocks = 2;  // of a full stage
  static constexpr int kBlocks = kHasFp4 ? std::max(kFullBlocks, kFp4Blocks) : kFullBlocks;
  static constexpr int kXTiles = kWide ? 2 * kBlocks : kBlocks;  // of a full stage
  static constexpr int kRows = 128;
  static constexpr int kConsumers = 256 * kPairs;
  static constexpr int kWarps = kConsumers / 32;
  static constexpr int kThreads = kConsumers + 32;
  static_assert(kPairs == 1 || (kPairs == 2 && kFullBlocks == 2));
  static constexpr int kXTileBytes = kN * 128;
  static constexpr int kWeightBytes =
      std::max(2 * kFullBlocks * 8192, kHasFp4 ? 2 * kFp4Blocks * 4352 : 0);
  static constexpr int kXBytes = kXTiles * kXTileBytes;
  static constexpr int kInfos = kStages + 2;  // the most items of a block at a time, and one more

  struct Shared {
    alignas(1024) std::byte x[kStages][kXBytes];
    alignas(1024) std::byte weights[kStages][kWeightBytes];
    alignas(16) float x_scales[kStages][kBlocks * kN];
    float weight_scales[kStages][kBlocks][2];  // of each row tile
    StreamInfo infos[kInfos];
    // Sums that other blocks sent, for two items in turn: [rank, pair][tokens of this block][row].
    alignas(16) float inbox[2][kPairs * kN][kRows];
    uint64_t full[kStages], empty[kStages], inbox_full[2];
  };

  __device__ WeightStream(Shared& shared, int rank, int split)
      : s_(shared),
        rank_(rank),
        split_(split),
        tokens_each_((kN + split - 1) / split),
        first_block_(ClusterRank() - static_cast<uint32_t>(rank)) {}

  // All threads, once, before anything else.
  __device__ void Init() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        BarrierInit(&s_.full[i], 2);  // what is announced, the scales
        BarrierInit(&s_.empty[i], kWarps);
      }
      for (auto& barrier : s_.inbox_full) BarrierInit(&barrier, kWarps * split_);
      BarrierInitFence();
    }
    __syncthreads();
    if (split_ > 1) ClusterArrive();
  }

  // The last warp. items(i) is this block's i-th item, for i < known() before the predecessor has
  // ended, and for i < count() afterwards. Lanes 0 and 1 fetch weights, the next ones activations,
  // the next their scales.
  template <typename Items>
  __device__ void Produce(const Items& items) {
    const int ahead = FetchAhead(items);
    // Ready for the moment when the predecessor ends.
    StreamItem first{};
    Role first_role{};
    if (ahead > 0) {
      first = items(0);
      first_role = MakeRole(first);
      LoadScales(first, 0);
    }
    if (split_ > 1) ClusterWait();
    WaitForPredecessor();
    AllowSuccessor();
    const int count = items.count();
    int stage = 0;
    for (int item = 0, n = 0; item < count; ++item) {
      const StreamItem p = item == 0 && ahead > 0 ? first : items(item);
      Role role = item == 0 && ahead > 0 ? first_role : MakeRole(p);
      const int blocks = BlocksOf(p.info.kind);
      for (int block = 0; block < p.info.num_blocks; block += blocks, ++n) {
        const bool fetched = n < ahead;
        if (n > 0 || !fetched) LoadScales(p, block);
        if (!fetched) {
          if (n >= kStages) BarrierWait(&s_.empty[stage], (n / kStages - 1) & 1);
          Announce(p, item, block, stage);
        }
        Fetch(role, p, block, stage, fetched ? kFirstXLane : 0, 32);
        WriteScales(p, block, stage);
        if (++stage == kStages) stage = 0;
      }
    }
  }

  // The other warps, for each of `count` items: writer.Begin(info), the products, and
  // writer.Finish(info, inbox), which takes its sums with Sum2 and Sum4.
  template <typename Writer>
  __device__ void Consume(int count, Writer writer) {
    if (split_ > 1) ClusterWait();  // every block has started
    for (int i = 0; i < count; ++i) {
      BarrierWait(&s_.full[stage_], parity_);
      StreamInfo info = s_.infos[i % kInfos];
      // The compiler is to know that all threads take the same way.
      info.kind = static_cast<TileKind>(__shfl_sync(0xffffffffu, static_cast<int>(info.kind), 0));
      info.num_blocks = __shfl_sync(0xffffffffu, info.num_blocks, 0);
      writer.Begin(info);
      float d[kN / 2] = {};
      if constexpr (kWide) {
        Multiply<TileKind::kFp8AsBf16, kFullBlocks>(info.num_blocks, d);
      } else if (info.kind == TileKind::kFp8) {
        Multiply<TileKind::kFp8, kFullBlocks>(info.num_blocks, d);
      } else if constexpr (kHasFp4) {
        Multiply<TileKind::kFp4, kFp4Blocks>(info.num_blocks, d);
      } else {
        Multiply<TileKind::kBf16, kFullBlocks>(info.num_blocks, d);
      }
      Send(d, info.num_tokens, i & 1);
      BarrierWaitCluster(&s_.inbox_full[i & 1], (i / 2) & 1);
      writer.Finish(info, s_.inbox[i & 1]);
    }
  }

  // Of this block's k-th token and a row, summed over the cluster; of two and of four rows.
  __device__ float2 Sum2(const float (*inbox)[kRows], int k, int row) const {
    float2 sum = *reinterpret_cast<const float2*>(&inbox[k][row]);
    for (int r = 1; r < split_ * kPairs; ++r) {
      const float2 v = *reinterpret_cast<const float2*>(&inbox[r * tokens_each_ + k][row]);
      sum = {sum.x + v.x, sum.y + v.y};
    }
    return sum;
  }
  __device__ float4 Sum4(const float (*inbox)[kRows], int k, int row) const {
    const float2 first = Sum2(inbox, k, row), second = Sum2(inbox, k, row + 2);
    return {first.x, first.y, second.x, second.y};
  }
  __device__ int rank() const { return rank_; }
  __device__ int split() const { return split_; }

 private:
  static constexpr int kFirstXLane = 2, kFirstScaleLane = kFirstXLane + kXTiles;
  // What this lane of the last warp fetches of every stage of an item.
  struct Role {
    const std::byte* from;
    int64_t step;          // from stage to stage
    uint32_t bytes;        // of a full stage; 0: nothing
    uint32_t to, to_step;  // in shared memory, from stage to stage of the ring
  };

  __device__ static int pair() { return kPairs == 1 ? 0 : static_cast<int>(threadIdx.x) / 256; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int BlocksOf(TileKind kind) {
    return kHasFp4 && kind == TileKind::kFp4 ? kFp4Blocks : kFullBlocks;
  }
  __device__ static bool HasXScales(TileKind kind) {
    return kind == TileKind::kFp8 || kind == TileKind::kFp4;
  }

  __device__ Role MakeRole(const StreamItem& p) {
    const TileKind kind = p.info.kind;
    const int blocks = BlocksOf(kind);
    if (lane() < kFirstXLane) {
      const auto bytes = static_cast<uint32_t>(blocks * TileMatrixBytes(kind));
      return {p.weights + lane() * p.row_tile_bytes, bytes, bytes,
              SharedAddress(s_.weights) + lane() * bytes, kWeightBytes};
    }
    if (lane() < kFirstScaleLane) {
      const int i = lane() - kFirstXLane, tiles = kWide ? 2 * blocks : blocks;
      return {p.x + i * p.x_block_bytes, tiles * p.x_block_bytes,
              i < tiles ? static_cast<uint32_t>(kXTileBytes) : 0u,
              SharedAddress(s_.x) + i * kXTileBytes, kXBytes};
    }
    const int i = lane() - kFirstScaleLane;
    if (i >= blocks || !HasXScales(kind)) return {nullptr, 0, 0, 0, 0};
    return {reinterpret_cast<const std::byte*>(p.x_scales + i * p.x_scales_stride),
            blocks * p.x_scales_stride * int64_t{sizeof(float)}, kN * sizeof(float),
            SharedAddress(s_.x_scales) + i * kN * static_cast<uint32_t>(sizeof(float)),
            sizeof(s_.x_scales[0])};
  }

  // This lane's copy of a stage, if it is one of first..last - 1; moves on to the next stage.
  __device__ void Fetch(Role& role, const StreamItem& p, int block, int stage, int first,
                        int last) {
    const int full = BlocksOf(p.info.kind), blocks = min(full, p.info.num_blocks - block);
    uint32_t bytes = role.bytes;
    if (blocks < full) {  // the last stage of an odd number of blocks: it holds one
      if (lane() < kFirstXLane) bytes /= 2;
      const bool is_x = lane() < kFirstScaleLane;
      const int i = lane() - (is_x ? kFirstXLane : kFirstScaleLane);
      if (lane() >= kFirstXLane && i >= (kWide && is_x ? 2 * blocks : blocks)) bytes = 0;
    }
    // The second row tile follows what the first one has.
    const uint32_t to = lane() == 1 && blocks < full ? role.to - bytes : role.to;
    if (bytes != 0 && lane() >= first && lane() < last) {
      BulkCopyTo(to + static_cast<uint32_t>(stage) * role.to_step, role.from, bytes,
                 &s_.full[stage]);
    }
    role.from += role.step;
  }

  // FP8 kinds: the scales of 32 column blocks, a lane each, when the first of them comes.
  __device__ void LoadScales(const StreamItem& p, int block) {
    if (p.scales == nullptr || block % 32 != 0) return;
    const int mine = min(block + lane(), p.info.num_blocks - 1);
    scales_[0] = Ue8m0Value(p.scales[mine]);
    scales_[1] = Ue8m0Value(p.scales[p.scales_stride + mine]);
  }

  // Says what a stage will hold.
  __device__ void Announce(const StreamItem& p, int item, int block, int stage) {
    if (lane() == 0) {
      if (block == 0) s_.infos[item % kInfos] = p.info;
      const TileKind kind = p.info.kind;
      const int blocks = min(BlocksOf(kind), p.info.num_blocks - block);
      const auto weights = static_cast<uint32_t>(2 * blocks * TileMatrixBytes(kind));
      const int x = (kWide ? 2 : 1) * blocks * kXTileBytes;
      BarrierExpectBytes(&s_.full[stage], weights + x + (HasXScales(kind) ? blocks * kN * 4 : 0));
    }
    __syncwarp();
  }

  // The FP8 scales of a stage, whose loads may have taken long; all that it lacked.
  __device__ void WriteScales(const StreamItem& p, int block, int stage) {
    if (p.scales != nullptr) {
      const int from = (block + lane() / 2) % 32;
      const float first = __shfl_sync(0xffffffffu, scales_[0], from);
      const float second = __shfl_sync(0xffffffffu, scales_[1], from);
      if (lane() < 2 * kBlocks) {
        s_.weight_scales[stage][lane() / 2][lane() % 2] = lane() % 2 == 0 ? first : second;
      }
      __syncwarp();
    }
    if (lane() == 0) BarrierArrive(&s_.full[stage]);
  }

  // The weights of as many stages as the ring has.
  template <typename Items>
  __device__ int FetchAhead(const Items& items) {
    int n = 0;
    const int known = items.known();
    for (int item = 0; item < known; ++item) {
      const StreamItem p = items(item);
      Role role = MakeRole(p);
      const int blocks = BlocksOf(p.info.kind);
      for (int block = 0; block < p.info.num_blocks; block += blocks, ++n) {
        if (n == kStages) return n;
        Announce(p, item, block, n);
        Fetch(role, p, block, n, 0, kFirstXLane);
      }
    }
    return n;
  }

  // One item.
  template <TileKind kKind, int kStageBlocks>
  __device__ void Multiply(int num_blocks, float (&d)[kN / 2]) {
    for (int block = 0; block < num_blocks; block += kStageBlocks) {
      BarrierWait(&s_.full[stage_], parity_);
      if (block + kStageBlocks <= num_blocks) {
        MultiplyStage<kKind, kStageBlocks>(d);
      } else {
        MultiplyStage<kKind, 1>(d);
      }
      __syncwarp();
      if (lane() == 0) BarrierArrive(&s_.empty[stage_]);
      if (++stage_ == kStages) stage_ = 0, parity_ ^= 1;
    }
  }

  template <TileKind kKind, int kStageBlocks>
  __device__ void MultiplyStage(float (&d)[kN / 2]) {
    static_assert(kStageBlocks == 1 || kStageBlocks == 2);
    constexpr int kBlockBytes = static_cast<int>(TileMatrixBytes(kKind));
    constexpr int kXBlockBytes = kKind == TileKind::kFp8AsBf16 ? kN * 256 : kN * 128;
    constexpr int kEach = kStageBlocks == 2 ? 2 / kPairs : 1;  // blocks of a pair
    if (kStageBlocks == 1 && pair() != 0) return;
    const int tile = static_cast<int>(threadIdx.x) / 128 % 2, first = pair() * kEach;
    const std::byte* weights = s_.weights[stage_] + (tile * kStageBlocks + first) * kBlockBytes;
    const std::byte* x = s_.x[stage_] + first * kXBlockBytes;
    const float* weight_scales = &s_.weight_scales[stage_][first][tile];
    const float* x_scales = s_.x_scales[stage_] + first * kN;
    if constexpr (kKind == TileKind::kFp8) {
      MultiplyFp8<kN, kEach>(weights, x, weight_scales, x_scales, d);
    } else if constexpr (kKind == TileKind::kBf16) {
      MultiplyBf16<kN, kEach>(weights, x, d);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if constexpr (kKind == TileKind::kFp4) {
          MultiplyFp4<kN>(weights + i * kBlockBytes, x + i * kXBlockBytes, x_scales + i * kN, d);
        } else {
          MultiplyWide<kN>(weights + i * kBlockBytes, x + i * kXBlockBytes, weight_scales[2 * i],
                           d);
        }
      }
    }
  }

  // Every warp sends its sums of each token to the block that finishes it, and says so to all.
  __device__ void Send(const float (&d)[kN / 2], int num_tokens, int buffer) {
    const int row = static_cast<int>(threadIdx.x) % 256 / 32 * 16 + lane() / 4;
    const int part = (rank_ * kPairs + pair()) * tokens_each_;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = j * 8 + lane() % 4 * 2 + e;
        if (token >= num_tokens) continue;
        float* place = &s_.inbox[buffer][part + token / split_][row];
        const uint32_t owner = first_block_ + static_cast<uint32_t>(token % split_);
        StoreToBlock(place, owner, d[4 * j + e]);
        StoreToBlock(place + 8, owner, d[4 * j + 2 + e]);
      }
    }
    __syncwarp();
    if (lane() < split_) {
      BarrierArriveAt(&s_.inbox_full[buffer], first_block_ + static_cast<uint32_t>(lane()));
    }
  }

  Shared& s_;
  float scales_[2] = {};  // of this lane of the last warp: of a column block, for each row tile
  int stage_ = 0;         // of the consumers
  uint32_t parity_ = 0;
  const int rank_, split_, tokens_each_;
  const uint32_t first_block_;  // the cluster's rank of the block of rank 0
};

}  // namespace fathom::kernels
