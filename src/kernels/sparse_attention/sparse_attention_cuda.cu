// Attention of steps of few tokens and keys (attention_cluster.cuh, attention_decode.cuh), and of
// larger ones (attention_sm90.cuh), whose blocks take one token, 64 heads and split of the keys
// after another. Who has all keys writes the output; parts are added up by a second kernel, or by a
// cluster.
#include <algorithm>

#include "kernels/aligned_shared.cuh"
#include "kernels/launch.cuh"
#include "kernels/sparse_attention/attention_cluster.cuh"
#include "kernels/sparse_attention/attention_decode.cuh"
#include "kernels/sparse_attention/attention_long.cuh"
#include "kernels/sparse_attention/attention_sm90.cuh"
#include "kernels/sparse_attention/long_sums.cuh"
#include "kernels/sparse_attention/wide_keys.cuh"

namespace fathom::kernels {
namespace {

// What threads of each role have: of four warpgroups what the block is given, for more would wait
// for ever.
inline constexpr int kGivenRegisters = (1 << 16) / kAttentionThreads;
template <bool kWide>
struct RoleRegisters {
  static constexpr int kAdder = 160, kProducer = kWide ? 64 : 112;
  static constexpr int kScorer = 4 * kGivenRegisters - 2 * kAdder - kProducer;
};

// kWide: keys were widened before.
template <bool kWide>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    SparseAttentionKernel(const __grid_constant__ CudaSparseAttentionParams p, int head_tiles,
                          const __grid_constant__ AttentionParts parts) {
  extern __shared__ uint8_t dynamic[];
  auto& shared = AlignedShared<AttentionShared>(dynamic);
  if (threadIdx.x == 0) shared.Init();
  WaitForPredecessor();
  AllowSuccessor();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  using Registers = RoleRegisters<kWide>;
  if (warpgroup == 0) {
    SetRegisters<Registers::kScorer, kGivenRegisters>();
    AttentionScorer<kWide>(p, shared).Run();
  } else if (warpgroup < 3) {
    TakeRegisters<Registers::kAdder>();
    ValueAdder(p, parts, shared).Run();
  } else {
    GiveRegisters<Registers::kProducer>();
    const ItemDealer dealer(p, head_tiles, parts.max_splits, shared.items);
    const uint32_t tiles = SharedAddress(shared.keys);
    if constexpr (kWide) {
      WideKeyProducer(p, dealer, tiles, shared.full, shared.empty, SharedAddress(shared.q),
                      shared.queries)
          .Run();
    } else {
      KeyProducer(dealer, tiles, shared.located, shared.full, shared.empty).Run();
    }
  }
}

inline constexpr int kPartsAhead = 9;  // of a thread, on their way while the weights are made

// A block adds up one of kSlices slices of a head's parts: four columns of every kGroups-th a
// thread.
template <int kGroups, int kSlices>
struct CombineShape {
  static constexpr int kColumns = kHeadDim / 4 / kSlices, kThreads = kColumns * kGroups;
  static constexpr int kMostParts = kGroups == 8 ? kTargetBlocks : 4 * kPartsAhead;
  struct Shared {
    float weights[kMostParts];
    float4 sums[kGroups][kColumns];
  };
};

__device__ __forceinline__ void AddWeighted(float4& sum, float weight, const float4& v) {
  sum.x = fmaf(weight, v.x, sum.x), sum.y = fmaf(weight, v.y, sum.y);
  sum.z = fmaf(weight, v.z, sum.z), sum.w = fmaf(weight, v.w, sum.w);
}

// Registers for 256 threads beside a block of the next product.
template <int kGroups, int kSlices>
__global__ void __maxnreg__(56)
    CombineKernel(const __grid_constant__ CudaSparseAttentionParams p, AttentionParts parts) {
  const int head = blockIdx.x, token = blockIdx.y, lane = threadIdx.x % 32;
  using Shape = CombineShape<kGroups, kSlices>;
  const int group = threadIdx.x / Shape::kColumns, place = threadIdx.x % Shape::kColumns;
  const int column = 4 * (static_cast<int>(blockIdx.z) * Shape::kColumns + place);
  __shared__ typename Shape::Shared shared;
  const TokenKeys keys(p, token);
  const float sink = p.sink[head];
  const int each = KeysOfSplit(keys.size(), parts.max_splits, parts.least_keys);
  const int num_splits = parts.least_keys > 0 ? (keys.size() + each - 1) / each
                                              : KeySplits(keys.size(), parts.max_splits).num_splits;
  // The kernel before waits for those before it: the next one may start, which waits for this.
  AllowSuccessor();
  WaitForPredecessor();
  if (keys.is_padding()) return;
  const int64_t first = (int64_t{token} * p.num_heads + head) * parts.max_splits;
  const float* const sums = parts.sums + first * kHeadDim + column;
  // The first parts are on their way while the weights are made.
  float4 values[kPartsAhead];
#pragma unroll
  for (int k = 0; k < kPartsAhead; ++k) {
    const int i = group + k * kGroups;
    values[k] =
        i < num_splits ? *reinterpret_cast<const float4*>(sums + i * kHeadDim) : float4{0, 0, 0, 0};
  }
  // Every warp finds the maximum and the sum; the first keeps the weights.
  constexpr int kRounds = (Shape::kMostParts + 31) / 32;
  float2 scales[kRounds];
  float max = -__builtin_huge_valf(), sum = 0;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int i = r * 32 + lane;
    scales[r] = i < num_splits ? parts.scales[first + i] : float2{-__builtin_huge_valf(), 0};
    max = fmaxf(max, scales[r].x);
  }
  max = WarpMax(max);
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const float weight = exp2f(scales[r].x - max);
    sum += weight * scales[r].y;
    if (threadIdx.x < 32 && r * 32 + lane < num_splits) shared.weights[r * 32 + lane] = weight;
  }
  sum = WarpSum(sum) + SinkWeight(sink, max);
  __syncthreads();
  float4 o{0, 0, 0, 0};
#pragma unroll
  for (int k = 0; k < kPartsAhead; ++k) {
    const int i = group + k * kGroups;
    if (i < num_splits) AddWeighted(o, shared.weights[i], values[k]);
  }
#pragma unroll 4
  for (int i = group + kPartsAhead * kGroups; i < num_splits; i += kGroups) {
    AddWeighted(o, shared.weights[i], *reinterpret_cast<const float4*>(sums + i * kHeadDim));
  }
  if constexpr (kGroups > 1) {
    shared.sums[group][place] = o;
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int g = 1; g < kGroups; ++g) AddWeighted(o, 1, shared.sums[g][place]);
  }
  const float inverse = 1.0f / sum;
  const auto* angles = reinterpret_cast<const float2*>(p.angles + int64_t{token} * kRopeDim);
  const uint2 out{FinishPair({o.x * inverse, o.y * inverse}, column, angles),
                  FinishPair({o.z * inverse, o.w * inverse}, column + 2, angles)};
  const int64_t offset = Bf16TileOffset(token, int64_t{head} * kHeadDim + column, p.out.row_groups);
  *reinterpret_cast<uint2*>(reinterpret_cast<uint8_t*>(p.out.values) + offset) = out;
}

// Up to so many tokens a tile a split, with up to eight of them: more would be more blocks of 32
// heads than run at once.
inline constexpr int kMaxClusterTokens = 12;
// Beyond, two splits, of so many keys as tables of 24K tokens hold for ratio 128: longer ones have
// a second tile.
inline constexpr int kMaxPairTokens = 32, kMaxPairKeys = 4 * kClusterKeys;
inline constexpr int kClusterBlocks = 120;  // of clusters of eight, that run at once
// Up to so many tokens of more keys their splits are no clusters.
inline constexpr int kMaxSplitTokens = 4;
// Nor beyond kMaxClusterTokens, up to as many tokens as all run at once on a rank of 16 heads.
inline constexpr int kMaxTwoTileTokens = 29, kTwoTileSplits = 9;

// How a step of few tokens is spread out: 8, 16 or 32 heads a block; 0 splits where it is not one.
// Counts as for 64 heads, so that a rank that has some of them adds up as one that has all. With
// clusters the splits depend on keys and tokens, and heads follow from how many blocks there are.
struct DecodePlan {
  int heads = 8, splits = 0;
  bool is_cluster = false;    // the splits are one
  bool has_one_tile = false;  // then: a split has one tile, not two
  bool is_long = false;

  // Of a split. With 16 heads and more a part of less than a tile is not made: it would take as
  // long as a tile's, and time to add up.
  int least_keys() const { return splits == 0 ? 0 : heads == 8 ? kSplitGranule : kKeyTile; }
};

DecodePlan PlanDecode(const CudaSparseAttentionParams& p) {
  const int tokens = p.batch.num_tokens;
  int keys = kWindow;
  if (p.ratio == 4) keys += p.topk;
  if (p.ratio == 128) keys += p.batch.max_blocks * p.compressed.entries_per_page;
  const auto tiles = [&](int splits) {
    return (keys + splits * kKeyTile - 1) / (splits * kKeyTile);
  };
  if (keys <= kMaxClusterSplits * kClusterKeys && tokens <= kMaxClusterTokens) {
    int splits = 2;
    while (splits * kClusterKeys < keys) splits *= 2;
    return {.splits = splits, .is_cluster = true, .has_one_tile = true};
  }
  if (keys <= kMaxPairKeys && tokens <= kMaxPairTokens) {
    return {.splits = 2, .is_cluster = true, .has_one_tile = keys <= 2 * kClusterKeys};
  }
  // More selected entries, of a rank: with all heads these would be two to four times as many
  // blocks as run at once.
  const bool may_have_two = p.ratio == 4 && p.num_heads <= kHeadTile;
  if (may_have_two && keys <= 2 * kMaxClusterSplits * kClusterKeys && tokens > kMaxSplitTokens &&
      tokens <= kMaxClusterTokens) {
    return {.splits = kMaxClusterSplits, .is_cluster = true, .has_one_tile = false};
  }
  // Of more tokens splits of two tiles each, of which two blocks of 16 heads share a
  // multiprocessor.
  if (may_have_two && keys > kMaxClusterSplits * kClusterKeys && tokens > kMaxClusterTokens &&
      tokens <= kMaxTwoTileTokens && tiles(kTwoTileSplits) == 2) {
    return {16, kTwoTileSplits, false};
  }
  if (tokens > kMaxSplitTokens) return {};
  // 96 blocks of 8 or of 16 heads, which leave multiprocessors to the blocks that add up; 132, of
  // 32 or of 16, where that saves tiles (of blocks for a tile each only those work that have one).
  // One token has a tile a block, which is as many blocks, up to what tables of 256K tokens hold.
  constexpr int kTilesOf256K = 34;
  const int few = 12 / tokens, more = 24 / tokens, most = 33 / tokens;
  if (tiles(few) == 1) return {8, few, false};
  if (tokens == 1 && tiles(kTilesOf256K) == 1) return {16, kTilesOf256K, false};
  if (tokens > 1 && tiles(more) <= 2) return {16, more, false};
  if (tiles(2 * most) == 1) return {32, 2 * most, false};
  if (tokens == 1 && tiles(2 * most) == 2) {
    return {.is_long = true};
  }
  if (tiles(more) == 3) return {16, more, false};
  if (tiles(2 * most) == 2) return {32, 2 * most, false};
  if (tokens <= 2 && tiles(most) <= 4) return {16, most, false};
  return {};
}

void LaunchCombine(const CudaSparseAttentionParams& p, const AttentionParts& parts,
                   device::Stream& stream) {
  const auto launch = [&]<int kGroups, int kSlices>(CombineShape<kGroups, kSlices>) {
    LaunchKernel(CombineKernel<kGroups, kSlices>, dim3(p.num_heads, p.batch.num_tokens, kSlices),
                 CombineShape<kGroups, kSlices>::kThreads, 0, stream, p, parts);
  };
  if (p.batch.num_tokens > 8) return launch(CombineShape<1, 1>());
  // Twice as many blocks where a thread's parts would else not be on their way at once.
  parts.max_splits > CombineShape<4, 2>::kMostParts ? launch(CombineShape<8, 4>())
                                                    : launch(CombineShape<4, 2>());
}

template <int kHeads, bool kPaired = false>
void LaunchDecode(const CudaSparseAttentionParams& p, const AttentionParts& parts, int splits,
                  device::Stream& stream) {
  const dim3 grid(splits, (p.num_heads + kHeads - 1) / kHeads, p.batch.num_tokens);
  // Behind a selection of many blocks all multiprocessors are free at once, and two blocks of 8
  // heads would share one. Without a selection they start beside the query products.
  const bool alone = p.q_is_early && grid.x * grid.y * grid.z <= kTargetBlocks;
  const size_t bytes = kDecodeSharedBytes<kHeads>;
  LaunchKernel(DecodeAttentionKernel<kHeads, kPaired>, grid, kDecodeThreads,
               alone ? std::max(bytes, kAloneSharedBytes) : bytes, stream, p, parts);
  LaunchCombine(p, parts, stream);
}

template <int kHeads, int kSplits, bool kOneTile = true>
void LaunchCluster(const CudaSparseAttentionParams& p, device::Stream& stream) {
  const dim3 grid(kSplits, (p.num_heads + kHeads - 1) / kHeads, p.batch.num_tokens);
  // Beyond 16K tokens a selection leaves all multiprocessors at once, and two blocks would share
  // one.
  const bool alone = p.ratio == 4 && p.batch.max_blocks > 64;
  const size_t bytes = kClusterSharedBytes<kHeads, kSplits>;
  LaunchClusters(ClusterAttentionKernel<kHeads, kSplits, false, kOneTile>, grid, kSplits,
                 4 * kClusterKeys, alone ? std::max(bytes, kAloneSharedBytes) : bytes, stream, p);
}
template <int kHeads>
void LaunchCluster(const CudaSparseAttentionParams& p, const DecodePlan& plan,
                   device::Stream& stream) {
  const int splits = plan.splits;
  if (!plan.has_one_tile) {
    return splits == 2 ? LaunchCluster<kHeads, 2, false>(p, stream)
                       : LaunchCluster<kHeads, kMaxClusterSplits, false>(p, stream);
  }
  if (splits == 2) return LaunchCluster<kHeads, 2>(p, stream);
  if (splits == 4) return LaunchCluster<kHeads, 4>(p, stream);
  CHECK_EQ(splits, kMaxClusterSplits);
  LaunchCluster<kHeads, kMaxClusterSplits>(p, stream);
}

// Beside the products just before, one cluster for each eight heads.
void LaunchAwaiting(const CudaSparseAttentionParams& p, device::Stream& stream) {
  const dim3 grid(kMaxClusterSplits, (p.num_heads + 7) / 8);
  LaunchClusters(ClusterAttentionKernel<8, kMaxClusterSplits, true, true>, grid, kMaxClusterSplits,
                 4 * kClusterKeys, kClusterSharedBytes<8, kMaxClusterSplits>, stream, p);
}

// As few heads a block as leave a multiprocessor to each: clusters of 8 do not fill the GPU.
void LaunchCluster(const CudaSparseAttentionParams& p, const DecodePlan& plan,
                   device::Stream& stream) {
  const auto run_at_once = [&](int heads) {
    const int blocks = (p.num_heads + heads - 1) / heads;
    return p.batch.num_tokens * blocks * plan.splits <= kClusterBlocks;
  };
  if (run_at_once(8)) return LaunchCluster<8>(p, plan, stream);
  if (run_at_once(16)) return LaunchCluster<16>(p, plan, stream);
  LaunchCluster<32>(p, plan, stream);
}

// Parts of a split step, of at most 64 heads.
int64_t PartsBytes(int num_heads) {
  const int64_t heads = std::min(num_heads, kHeadTile);
  const int64_t parts = std::max(kTargetBlocks, kMaxTwoTileTokens * kTwoTileSplits);
  return parts * heads * (kHeadDim * 4 + int64_t{sizeof(float2)});
}

void LaunchLong(const CudaSparseAttentionParams& p, device::Stream& stream) {
  LongParts parts;
  parts.sums = reinterpret_cast<__half2*>(p.workspace);
  parts.scales = reinterpret_cast<float2*>(parts.sums + int64_t{p.num_heads} * LongParts::kHead);
  const dim3 grid(kLongSplits, (p.num_heads + kLongHeads - 1) / kLongHeads);
  LaunchKernel(LongAttentionKernel, grid, kLongThreads, kLongSharedBytes, stream, p, parts);
  LaunchKernel(LongSumsKernel, dim3(p.num_heads, kHeadDim / kSumsColumns), kSumsThreads, 0, stream,
               p, parts);
}

void LaunchWiden(const CudaSparseAttentionParams& p, device::Stream& stream) {
  constexpr int kBlocks = 8 * kTargetBlocks;
  const int y = std::min(p.batch.num_seqs, kBlocks);
  LaunchKernel(WidenKeysKernel, dim3(std::max(1, kBlocks / y), y), kWidenThreads, 0, stream, p);
}

int HeadTiles(int num_heads) { return (num_heads + kHeadTile - 1) / kHeadTile; }

}  // namespace

int64_t SparseAttentionWorkspaceBytes(int num_heads) { return PartsBytes(num_heads); }

bool WidensKeys(const CudaSparseAttentionParams& p) {
  constexpr int kFewTokens = 512, kMostKeysOfToken = 64;
  if (!p.prefill || p.batch.num_tokens < kFewTokens) return false;
  const int64_t entries =
      p.ratio == 0 ? 0 : int64_t{p.batch.max_blocks} * p.compressed.entries_per_page;
  const int64_t keys = p.batch.num_seqs * (entries + kWindow) + p.num_fresh;
  return keys <= kMostKeysOfToken * int64_t{p.batch.num_tokens} &&
         keys * kWideRowBytes <= p.wide.bytes;
}

bool AwaitsWords(const CudaSparseAttentionParams& p) {
  const DecodePlan plan = PlanDecode(p);
  return !p.prefill && p.batch.num_tokens == 1 && p.ratio == 4 && p.num_heads <= kHeadTile &&
         plan.is_cluster && plan.splits == kMaxClusterSplits;
}

void Launch(const CudaSparseAttentionParams& p, device::Stream& stream) {
  if (p.batch.num_tokens == 0) return;
  if (p.words.q != nullptr) {
    CHECK(AwaitsWords(p));
    return LaunchAwaiting(p, stream);
  }
  const DecodePlan plan = p.prefill ? DecodePlan{} : PlanDecode(p);
  const auto parts_of = [&](int max_splits) {
    const int64_t count = int64_t{p.batch.num_tokens} * p.num_heads * max_splits;
    return AttentionParts{.sums = p.workspace,
                          .scales = reinterpret_cast<float2*>(p.workspace + count * kHeadDim),
                          .max_splits = max_splits,
                          .least_keys = plan.least_keys()};
  };
  if (plan.is_long) return LaunchLong(p, stream);
  if (plan.splits > 0) {
    const AttentionParts parts = parts_of(plan.splits);
    if (plan.is_cluster) return LaunchCluster(p, plan, stream);
    // A rank with half of the heads has half of them in a block: the same sums, and as many blocks.
    const int heads = p.num_heads <= 32 ? std::min(plan.heads, 16) : plan.heads;
    if (heads == 8) return LaunchDecode<8>(p, parts, plan.splits, stream);
    if (heads == 16) {
      return p.batch.num_tokens > kMaxSplitTokens
                 ? LaunchDecode<16, true>(p, parts, plan.splits, stream)
                 : LaunchDecode<16>(p, parts, plan.splits, stream);
    }
    return LaunchDecode<32>(p, parts, plan.splits, stream);
  }
  const int head_tiles = HeadTiles(p.num_heads);
  const int blocks = p.batch.num_tokens * head_tiles;
  const int max_splits = p.prefill ? 1 : std::max(1, kTargetBlocks / blocks);
  const AttentionParts parts = parts_of(max_splits);
  const bool wide = WidensKeys(p);
  if (wide) LaunchWiden(p, stream);
  LaunchKernel(wide ? SparseAttentionKernel<true> : SparseAttentionKernel<false>,
               dim3(std::min(blocks * max_splits, kTargetBlocks)), kAttentionThreads,
               kAttentionSharedBytes, stream, p, head_tiles, parts);
  if (max_splits > 1) LaunchCombine(p, parts, stream);
}

}  // namespace fathom::kernels
