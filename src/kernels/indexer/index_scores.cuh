// Index scores of a prefill step by tensor cores: a producer warpgroup widens tiles of 64 keys into
// a ring in shared memory; each consumer warpgroup scores every tile for kTokens tokens of its own.
// Keys are the rows of wgmma, the heads of the tokens its columns. Device code only.
#pragma once

#include "kernels/aligned_shared.cuh"
#include "kernels/gemm/wgmma.cuh"
#include "kernels/indexer/index_keys.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {

inline constexpr int kScoreGroups = 3, kScoreConsumers = kScoreGroups * 128;
inline constexpr int kScoreThreads = kScoreConsumers + 128;
inline constexpr int kScoreStages = 4;

struct IndexScoreParams {
  CudaIndexSelectParams in;
  IndexQueries queries;
  int first_token = 0;
  int num_tokens = 0;       // of this round
  float* scores = nullptr;  // [num_tokens of this round, stride]
  int64_t stride = 0;
};

template <int kHeads, int kTokens>
struct IndexScoreShared {
  uint8_t queries[kScoreGroups][kTokens * kHeads * kIndexDim];
  uint8_t keys[kScoreStages][kIndexTileBytes];
  float key_scales[kScoreStages][kIndexTile];
  float weights[kScoreGroups][kTokens * kHeads];
  uint2 fold_table[kFoldTable];
  uint64_t full[kScoreStages], empty[kScoreStages];
};

// Calls body(begin, next, num_tiles) for every run of tokens of one sequence in [first, end), with
// the tiles that the longest of them needs.
template <typename Body>
__device__ __forceinline__ void ForEachRun(const CudaIndexSelectParams& p, int first, int end,
                                           const Body& body) {
  for (int begin = first; begin < end;) {
    const int seq = p.batch.token_seq[begin];
    int next = begin, entries = 0;
    for (; next < end && p.batch.token_seq[next] == seq; ++next) {
      entries = max(entries, ScoredEntries(p.batch, p.topk, next));
    }
    if (entries > 0) body(begin, next, (entries + kIndexTile - 1) / kIndexTile);
    begin = next;
  }
}

// The tiles of the block's tokens [first, end), every gridDim.x-th.
template <config::IndexKeyDType kType, int kHeads, int kTokens>
__device__ __forceinline__ void ProduceKeys(const IndexScoreParams& p,
                                            IndexScoreShared<kHeads, kTokens>& shared, int first,
                                            int end) {
  constexpr int kAhead = 2;  // tiles in flight
  const int thread = threadIdx.x % 128, step = gridDim.x;
  uint32_t n = 0;
  ForEachRun(p.in, first, end, [&](int begin, int, int num_tiles) {
    const int32_t* pages =
        p.in.batch.block_tables + int64_t{p.in.batch.token_seq[begin]} * p.in.batch.max_blocks;
    IndexKeyFetch<kType> next[kAhead];
    const auto load = [&](int tile, int a) {
      if (tile < num_tiles) next[a].Load(p.in.keys, pages[tile], thread);
    };
#pragma unroll
    for (int a = 0; a < kAhead; ++a) load(static_cast<int>(blockIdx.x) + a * step, a);
    for (int tile = blockIdx.x; tile < num_tiles; tile += kAhead * step) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (tile + a * step >= num_tiles) continue;
        const uint32_t stage = n % kScoreStages;
        if (n >= kScoreStages) BarrierWait(shared.empty + stage, n / kScoreStages - 1 & 1);
        const float scale =
            next[a].Widen(SharedAddress(shared.keys[stage]), shared.fold_table, thread);
        if (thread % 2 == 0) shared.key_scales[stage][thread / 2] = scale;
        FenceSharedForWgmma();
        BarrierArrive(shared.full + stage);
        load(tile + (a + kAhead) * step, a);
        ++n;
      }
    }
  });
}

// Of four values, the one of the thread's place in its quad, summed over the quad.
__device__ __forceinline__ float SumOfQuad(const float (&v)[4], int quad) {
  const bool odd = (quad & 1) != 0, high = (quad & 2) != 0;
  float a = odd ? v[1] : v[0], b = odd ? v[3] : v[2];
  a += __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 1);
  b += __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 1);
  return (high ? b : a) + __shfl_xor_sync(0xffffffffu, high ? a : b, 2);
}

// Two heads' products with the thread's two rows.
__device__ __forceinline__ void AddHeads(const float* d, float2 weights, float& row,
                                         float& row_below) {
  row = fmaf(fmaxf(d[0], 0.0f), weights.x, row);
  row = fmaf(fmaxf(d[1], 0.0f), weights.y, row);
  row_below = fmaf(fmaxf(d[2], 0.0f), weights.x, row_below);
  row_below = fmaf(fmaxf(d[3], 0.0f), weights.y, row_below);
}

// One consumer warpgroup: scores of its tokens [group_first, + kTokens), as far as they are the
// run's.
template <int kHeads, int kTokens>
__device__ __forceinline__ void ScoreKeys(const IndexScoreParams& p,
                                          IndexScoreShared<kHeads, kTokens>& shared, int first,
                                          int end) {
  constexpr int kColumns = kHeads * kTokens;
  const int group = threadIdx.x / 128, quad = threadIdx.x % 4;
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const int group_first = first + group * kTokens;
  const uint32_t queries = SharedAddress(shared.queries[group]);
  float2 weights[kColumns / 8];
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    weights[j] = *reinterpret_cast<const float2*>(shared.weights[group] + 8 * j + 2 * quad);
  }
  uint32_t n = 0;
  ForEachRun(p.in, first, end, [&](int begin, int next, int num_tiles) {
    const bool mine = group_first < next && group_first + kTokens > begin;
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, ++n) {
      const uint32_t stage = n % kScoreStages;
      BarrierWait(shared.full + stage, n / kScoreStages & 1);
      float d[kColumns / 2];
      const uint32_t keys = SharedAddress(shared.keys[stage]);
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kIndexDim / 32; ++k) {
        Wgmma<WgmmaType::kE4m3, kColumns>::FromSmem(d, SmemDescriptor(keys + k * 32),
                                                    SmemDescriptor(queries + k * 32), k != 0);
      }
      WgmmaCommit();
      WgmmaWait<0>();
      const float scales[2] = {shared.key_scales[stage][row], shared.key_scales[stage][row + 8]};
      WarpHandBack(shared.empty + stage);
      if (!mine) continue;
      // Two tokens at a time: their sums for the thread's two rows.
#pragma unroll
      for (int t = 0; t < kTokens; t += 2) {
        float sums[4] = {};
#pragma unroll
        for (int j = 0; j < kHeads / 8; ++j) {
          AddHeads(d + 4 * (t * kHeads / 8 + j), weights[t * kHeads / 8 + j], sums[0], sums[1]);
          AddHeads(d + 4 * ((t + 1) * kHeads / 8 + j), weights[(t + 1) * kHeads / 8 + j], sums[2],
                   sums[3]);
        }
        const float sum = SumOfQuad(sums, quad) * scales[quad % 2];
        const int token = group_first + t + quad / 2;
        if (token < begin || token >= next) continue;
        p.scores[(token - p.first_token) * p.stride + tile * kIndexTile + row + quad % 2 * 8] = sum;
      }
    }
  });
}

template <config::IndexKeyDType kType, int kHeads, int kTokens>
__global__ void __launch_bounds__(kScoreThreads, 1)
    IndexScoreKernel(const __grid_constant__ IndexScoreParams p) {
  extern __shared__ uint8_t dynamic[];
  using Shared = IndexScoreShared<kHeads, kTokens>;
  auto& shared = AlignedShared<Shared>(dynamic);
  constexpr int kRows = kScoreGroups * kTokens * kHeads;
  const int first = p.first_token + blockIdx.y * kScoreGroups * kTokens;
  const int end = min(first + kScoreGroups * kTokens, p.first_token + p.num_tokens);
  if (threadIdx.x < kFoldTable) shared.fold_table[threadIdx.x] = FoldedCodes(threadIdx.x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kScoreStages; ++i) {
      BarrierInit(shared.full + i, 128);
      BarrierInit(shared.empty + i, kScoreConsumers / 32 * kWarpArrivals);
    }
    BarrierInitFence();
  }
  WaitForPredecessor();
  AllowSuccessor();
  const int rows = (end - first) * kHeads;
  const auto* in =
      reinterpret_cast<const uint4*>(p.queries.codes + int64_t{first} * kHeads * kIndexDim);
  for (int i = threadIdx.x; i < kRows * kIndexDim / 16; i += kScoreThreads) {
    reinterpret_cast<uint4*>(shared.queries)[i] =
        i < rows * kIndexDim / 16 ? in[i] : uint4{0, 0, 0, 0};
  }
  float* weights = shared.weights[0];
  for (int i = threadIdx.x; i < kRows; i += kScoreThreads) {
    weights[i] = i < rows ? p.queries.weights[int64_t{first} * kHeads + i] : 0;
  }
  FenceSharedForWgmma();
  __syncthreads();
  // 80 + 3 * 144 is 4 * 128, what the block is given.
  if (threadIdx.x >= kScoreConsumers) {
    GiveRegisters<80>();
    ProduceKeys<kType>(p, shared, first, end);
  } else {
    TakeRegisters<144>();
    ScoreKeys(p, shared, first, end);
  }
}

}  // namespace fathom::kernels
