// Scores and selection of a step of few tokens in one launch: a token's entries are shared out
// among the blocks of a grid row, all of which run at once. A block scores its part on the tensor
// cores (keys are the rows of wgmma, heads its columns; a warpgroup takes tiles of 64 keys), keeps
// the scores in shared memory where they fit, and selects with the others (rank_select.cuh). Keys
// are fetched before the wait: the kernel before the last one has written them. Device code only.
#pragma once

#include "kernels/gemm/wgmma.cuh"
#include "kernels/indexer/index_keys.cuh"
#include "kernels/indexer/rank_select.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {

inline constexpr int kDecodeGroups = kSelectThreads / 128;
inline constexpr int kDecodeHeads = 64;
// A block alone selects from this many; from more, blocks of at least kEntriesOfPart each.
inline constexpr int kEntriesOfOneBlock = 2048, kEntriesOfPart = 512;

struct SelectDecodeParams {
  CudaIndexSelectParams in;
  int part_words = 0;       // a bit for each entry of the largest part
  int shared_entries = 0;   // scores that a block's shared memory holds
  float* scores = nullptr;  // [num_tokens, stride], where that is not enough
  int64_t stride = 0;
  SelectCounters* counters = nullptr;  // [num_tokens], where a token has several blocks
  SelectPart* exchange = nullptr;      // [num_tokens, gridDim.x], likewise
};

// part_words words of bits and shared_entries scores follow.
struct SelectDecodeShared {
  uint8_t queries[kDecodeHeads * kIndexDim];
  uint8_t keys[kDecodeGroups][2][kIndexTileBytes];
  float key_scales[kDecodeGroups][2][kIndexTile];
  float weights[kDecodeHeads];
  uint2 fold_table[kFoldTable];
  RankSelectShared rank;
};

// One warpgroup's tiles of a block's part: every kDecodeGroups-th from the first.
template <config::IndexKeyDType kType>
class DecodeScorer {
 public:
  // Tiles [first, end) of the part, entries [.., num_entries) of the token.
  __device__ DecodeScorer(const SelectDecodeParams& params, SelectDecodeShared& shared, int token,
                          int first, int end, int num_entries, float* scores)
      : keys_(params.in.keys),
        s_(shared),
        pages_(params.in.batch.block_tables +
               int64_t{params.in.batch.token_seq[token]} * params.in.batch.max_blocks),
        first_(first),
        end_(end),
        num_entries_(num_entries),
        scores_(scores) {
    group_ = threadIdx.x / 128;
    thread_ = threadIdx.x % 128;
  }

  // Before the wait: the first tiles' keys.
  __device__ void Prefetch() {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) Load(first_ + group_ + a * kDecodeGroups, a);
  }

  // Scores into scores[entry - 64 first], counted in the bins.
  __device__ void Run() {
    const int quad = thread_ % 4;
    float2 weights[kDecodeHeads / 8];
#pragma unroll
    for (int j = 0; j < kDecodeHeads / 8; ++j) {
      weights[j] = *reinterpret_cast<const float2*>(s_.weights + 8 * j + 2 * quad);
    }
    // Not unrolled: most steps run it a few times, and fetching instructions takes longer.
#pragma unroll 1
    for (int tile = first_ + group_; tile < end_; tile += kDecodeGroups) {
      Widen();
#pragma unroll
      for (int a = 0; a + 1 < kAhead; ++a) next_[a] = next_[a + 1];
      Load(tile + kAhead * kDecodeGroups, kAhead - 1);
      Score(tile, weights);
      buffer_ ^= 1;
    }
  }

 private:
  static constexpr int kAhead = 4;  // tiles in flight

  __device__ void Load(int tile, int a) {
    if (tile < end_) next_[a].Load(keys_, pages_[tile], thread_);
  }
  __device__ void Widen() {
    const float scale =
        next_[0].Widen(SharedAddress(s_.keys[group_][buffer_]), s_.fold_table, thread_);
    if (thread_ % 2 == 0) s_.key_scales[group_][buffer_][thread_ / 2] = scale;
    FenceSharedForWgmma();
    // All have written this buffer, and are done with the products that read the other one.
    NamedBarrier(1 + group_, 128);
  }
  __device__ void Score(int tile, const float2 (&weights)[kDecodeHeads / 8]) {
    float d[kDecodeHeads / 2];
    const uint32_t keys = SharedAddress(s_.keys[group_][buffer_]);
    const uint32_t queries = SharedAddress(s_.queries);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kIndexDim / 32; ++k) {
      Wgmma<WgmmaType::kE4m3, kDecodeHeads>::FromSmem(d, SmemDescriptor(keys + k * 32),
                                                      SmemDescriptor(queries + k * 32), k != 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kDecodeHeads / 8; ++j) {
        sum = fmaf(fmaxf(d[4 * j + 2 * r], 0.0f), weights[j].x, sum);
        sum = fmaf(fmaxf(d[4 * j + 2 * r + 1], 0.0f), weights[j].y, sum);
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * r;
      const int entry = tile * kIndexTile + row;
      if (thread_ % 4 != 0 || entry >= num_entries_) continue;
      const float score = sum * s_.key_scales[group_][buffer_][row];
      scores_[entry - first_ * kIndexTile] = score;
      atomicAdd(s_.rank.bins + ScoreBin(score), 1);
    }
  }

  const PagedEntries& keys_;
  SelectDecodeShared& s_;
  const int32_t* pages_;
  int first_, end_, num_entries_;
  float* scores_;
  int group_, thread_;
  int buffer_ = 0;
  IndexKeyFetch<kType> next_[kAhead];
};

// 16 warps, four heads each.
__device__ inline void MakeIndexQueries(const CudaIndexSelectParams& p, int token,
                                        const IndexAngles& angles, SelectDecodeShared& shared) {
  static_assert(kSelectThreads / 32 * kQueryHeads == kDecodeHeads);
  const int lane = threadIdx.x % 32, first = static_cast<int>(threadIdx.x) / 32 * kQueryHeads;
  const int head = first + lane / kQueryLanes;
  const IndexQueryRow row = MakeIndexQuery(p, token, first, angles, lane);
  *reinterpret_cast<uint4*>(shared.queries + QueryOffset(head, lane)) = row.codes;
  if (lane % kQueryLanes == 0) shared.weights[head] = row.weight;
  FenceSharedForWgmma();
}

template <config::IndexKeyDType kType>
__global__ void __launch_bounds__(kSelectThreads, 1)
    SelectDecodeKernel(const __grid_constant__ SelectDecodeParams p) {
  extern __shared__ uint8_t dynamic[];
  auto& shared = *reinterpret_cast<SelectDecodeShared*>(
      (reinterpret_cast<uintptr_t>(dynamic) + 1023) / 1024 * 1024);
  const int token = blockIdx.y, part = blockIdx.x;
  const bool padding = p.in.batch.token_seq[token] < 0;
  const int visible = (p.in.batch.positions[token] + 1) / 4;
  const int wanted = visible <= kEntriesOfOneBlock ? 1 : (visible - 1) / kEntriesOfPart + 1;
  const int parts = min(static_cast<int>(gridDim.x), wanted);
  int32_t* selected = p.in.selected + int64_t{token} * p.in.topk;
  if (padding || part >= parts || visible <= p.in.topk) {
    WaitForPredecessor();
    AllowSuccessor();
    if (padding || part > 0) return;
    if (threadIdx.x == 0) p.in.counts[token] = visible;
    for (int i = threadIdx.x; i < visible; i += kSelectThreads) selected[i] = i;
    return;
  }
  const int tiles = (visible + kIndexTile - 1) / kIndexTile, each = (tiles + parts - 1) / parts;
  const int first = min(part * each, tiles), end = min(first + each, tiles);
  auto* bits = reinterpret_cast<uint32_t*>(&shared + 1);
  float* scores = each * kIndexTile <= p.shared_entries
                      ? reinterpret_cast<float*>(bits + p.part_words)
                      : p.scores + token * p.stride + first * kIndexTile;
  DecodeScorer<kType> scorer(p, shared, token, first, end, visible, scores);
  scorer.Prefetch();
  const IndexAngles angles = LoadIndexAngles(p.in, token, threadIdx.x % 32);
  if (threadIdx.x < kFoldTable) shared.fold_table[threadIdx.x] = FoldedCodes(threadIdx.x);
  for (int i = threadIdx.x; i < kRankBins; i += kSelectThreads) shared.rank.bins[i] = 0;
  WaitForPredecessor();
  AllowSuccessor();
  MakeIndexQueries(p.in, token, angles, shared);
  if (part == 0 && threadIdx.x == 0) p.in.counts[token] = p.in.topk;
  __syncthreads();
  scorer.Run();
  RankSelect(shared.rank, bits, scores, min(first * kIndexTile, visible),
             min(end * kIndexTile, visible), visible, p.in.topk, part, parts, p.counters + token,
             p.exchange + token * gridDim.x)
      .Run(selected);
}

}  // namespace fathom::kernels
