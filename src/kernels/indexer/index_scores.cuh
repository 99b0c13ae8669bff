// Index scores by tensor cores. A warpgroup takes tiles of 64 keys: keys (as FP8, in shared memory)
// are the rows of wgmma, the heads of kTokens tokens its columns. Every warpgroup fetches, widens
// and scores its own tiles; only the queries are shared. Device code only.
#pragma once

#include "kernels/gemm/wgmma.cuh"
#include "kernels/indexer/index_query.cuh"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/indexer/top_k.cuh"
#include "kernels/kv_entry/kv_entry.cuh"
#include "kernels/launch.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kIndexTile = 64;  // keys, a page of them
inline constexpr int kIndexTileBytes = kIndexTile * kIndexDim;

// FP4 codes 0..7 times 2^(kFoldTop - distance) as FP8 codes, one a byte; distance < kFoldTable.
inline constexpr int kFoldTable = 32;
__device__ __forceinline__ uint2 FoldedCodes(int distance) {
  const float s = exp2f(static_cast<float>(kFoldTop - distance));
  return {Fp8Codes(0, .5f * s) | Fp8Codes(s, 1.5f * s) << 16,
          Fp8Codes(2 * s, 3 * s) | Fp8Codes(4 * s, 6 * s) << 16};
}

// Four FP4 codes (16 bits) as FP8 codes of a block's table.
__device__ __forceinline__ uint32_t WidenFp4(uint32_t codes, uint2 table) {
  const uint32_t magnitude = __byte_perm(table.x, table.y, codes & 0x7777u);
  // Selectors with bit 3 set spread the chosen byte's sign: 0xff where negative, 0x80 elsewhere.
  uint32_t sign;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(sign) : "r"(0x80808080u), "r"(codes));
  return magnitude | (sign << 1 & 0x80808080u);
}

__device__ __forceinline__ uint32_t MaxByte(uint32_t x) {
  const uint32_t pairs = __vmaxu4(x, x >> 16);
  return __vmaxu4(pairs, pairs >> 8) & 0xffu;
}

// A warpgroup's keys, two threads a key: fetched ahead into registers, then widened.
template <config::IndexKeyDType kType>
struct IndexKeyFetch {
  static constexpr bool kFp4 = kType == config::IndexKeyDType::kFp4;
  static constexpr int kChunks = kFp4 ? 2 : 4;
  uint4 raw[kChunks];
  uint32_t scale = 0;

  __device__ void Load(const PagedEntries& keys, int32_t page, int thread) {
    const DeviceEntry entry = EntryAt(keys, page, thread / 2);
    const auto* data = reinterpret_cast<const uint4*>(entry.data) + thread % 2 * kChunks;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) raw[i] = __ldg(data + i);
    scale = __ldg(reinterpret_cast<const uint32_t*>(entry.scales));
  }

  // Writes the thread's 64 values of key thread / 2; returns the key's scale.
  __device__ float Widen(uint32_t tile, const uint2* fold_table, int thread) const {
    const uint32_t row = thread / 2, half = thread % 2;
    tile += row * 128;
    if constexpr (!kFp4) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) Store(tile + ((half * 4 + i) ^ (row % 8)) * 16, raw[i]);
      return __uint_as_float(scale);
    } else {
      const uint32_t top = MaxByte(scale);
      const uint32_t mine = half == 0 ? scale : scale >> 16;
#pragma unroll
      for (uint32_t b = 0; b < 2; ++b) {
        const uint32_t distance = top - ((mine >> (8 * b)) & 0xffu);
        const uint2 table = fold_table[min(distance, kFoldTable - 1u)];
        const uint32_t words[4] = {raw[b].x, raw[b].y, raw[b].z, raw[b].w};
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          const uint4 out{WidenFp4(words[2 * i], table), WidenFp4(words[2 * i] >> 16, table),
                          WidenFp4(words[2 * i + 1], table),
                          WidenFp4(words[2 * i + 1] >> 16, table)};
          Store(tile + ((half * 4 + b * 2 + i) ^ (row % 8)) * 16, out);
        }
      }
      return __uint_as_float(top << 23) * (1.0f / (1 << kFoldTop));
    }
  }

 private:
  __device__ static void Store(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
  }
};

struct IndexScoreParams {
  CudaIndexSelectParams in;
  IndexQueries queries;  // kTokens > 1
  int first_token = 0;
  int num_tokens = 0;       // of this round
  float* scores = nullptr;  // [num_tokens of this round, stride]
  int64_t stride = 0;
  TopkCounters* counters = nullptr;  // [num_tokens], kTokens = 1
};

template <int kHeads, int kTokens, int kGroups>
struct IndexScoreShared {
  uint8_t queries[kTokens * kHeads * kIndexDim];
  uint8_t keys[kGroups][2][kIndexTileBytes];
  float key_scales[kGroups][2][kIndexTile];
  float weights[kTokens * kHeads];
  uint2 fold_table[kFoldTable];
  int bins[kTokens == 1 ? kTopkBins : 1];
};

// One warpgroup's work on the tokens [begin, end) of one sequence; all its columns are computed,
// those of these tokens written.
template <config::IndexKeyDType kType, int kHeads, int kTokens, int kGroups>
class IndexScorer {
 public:
  using Shared = IndexScoreShared<kHeads, kTokens, kGroups>;
  static constexpr int kColumns = kHeads * kTokens;

  __device__ IndexScorer(const IndexScoreParams& params, Shared& shared, int group_first)
      : p_(params), s_(shared), group_first_(group_first) {
    group_ = threadIdx.x / 128;
    thread_ = threadIdx.x % 128;
    row_ = thread_ / 32 * 16 + thread_ % 32 / 4;
    quad_ = thread_ % 4;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      weights_[j] = *reinterpret_cast<const float2*>(shared.weights + 8 * j + 2 * quad_);
    }
  }

  __device__ void Run(int begin, int end) {
    int entries = 0;
    for (int token = begin; token < end; ++token) {
      entries = max(entries, ScoredEntries(p_.in.batch, p_.in.topk, token));
    }
    num_entries_ = entries;
    const int num_tiles = (entries + kIndexTile - 1) / kIndexTile;
    const int step = gridDim.x * kGroups;
    const int32_t* pages =
        p_.in.batch.block_tables + int64_t{p_.in.batch.token_seq[begin]} * p_.in.batch.max_blocks;
    int tile = blockIdx.x * kGroups + group_;
    if (tile >= num_tiles) return;
    IndexKeyFetch<kType> next[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (tile + a * step < num_tiles) next[a].Load(p_.in.keys, pages[tile + a * step], thread_);
    }
    for (; tile < num_tiles; tile += kAhead * step) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int current = tile + a * step;
        if (current < num_tiles) {
          Widen(next[a]);
          const int later = current + kAhead * step;
          if (later < num_tiles) next[a].Load(p_.in.keys, pages[later], thread_);
          Score(current, begin, end);
          buffer_ ^= 1;
        }
      }
    }
  }

 private:
  static constexpr int kAhead = kTokens == 1 ? 4 : 2;  // tiles in flight

  __device__ void Widen(const IndexKeyFetch<kType>& keys) {
    const float scale = keys.Widen(SharedAddress(s_.keys[group_][buffer_]), s_.fold_table, thread_);
    if (thread_ % 2 == 0) s_.key_scales[group_][buffer_][thread_ / 2] = scale;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    // All have written this buffer, and are done with the products that read the other one.
    NamedBarrier(1 + group_, 128);
  }

  __device__ void Score(int tile, int begin, int end) {
    float d[kColumns / 2];
    const uint32_t keys = SharedAddress(s_.keys[group_][buffer_]);
    const uint32_t queries = SharedAddress(s_.queries);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kIndexDim / 32; ++k) {
      Wgmma<WgmmaType::kE4m3, kColumns>::FromSmem(d, SmemDescriptor(keys + k * 32),
                                                  SmemDescriptor(queries + k * 32), k != 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    float sums[kTokens][2] = {};
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& sum = sums[8 * j / kHeads][r];
        sum = fmaf(fmaxf(d[4 * j + 2 * r], 0.0f), weights_[j].x, sum);
        sum = fmaf(fmaxf(d[4 * j + 2 * r + 1], 0.0f), weights_[j].y, sum);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        Keep(group_first_ + t, tile, row_ + 8 * r, sums[t][r], begin, end);
    }
  }

  // The quad's sums of one (token, key) become its score.
  __device__ void Keep(int token, int tile, int row, float sum, int begin, int end) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (quad_ != 0 || token < begin || token >= end) return;
    const int entry = tile * kIndexTile + row;
    const float score = sum * s_.key_scales[group_][buffer_][row];
    p_.scores[(token - p_.first_token) * p_.stride + entry] = score;
    if (kTokens == 1 && entry < num_entries_) {
      atomicAdd(s_.bins + ScoreBin(OrderedScore(score)), 1);
    }
  }

  const IndexScoreParams& p_;
  Shared& s_;
  int group_first_;
  int group_, thread_, row_, quad_;
  int buffer_ = 0;
  int num_entries_ = 0;
  float2 weights_[kColumns / 8];
};

template <config::IndexKeyDType kType, int kHeads, int kTokens, int kGroups>
__global__ void __launch_bounds__(kGroups * 128)
    IndexScoreKernel(const __grid_constant__ IndexScoreParams p) {
  extern __shared__ uint8_t dynamic[];
  using Shared = IndexScoreShared<kHeads, kTokens, kGroups>;
  auto& shared =
      *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(dynamic) + 1023) / 1024 * 1024);
  if (threadIdx.x < kFoldTable) shared.fold_table[threadIdx.x] = FoldedCodes(threadIdx.x);
  if constexpr (kTokens == 1) {
    for (int i = threadIdx.x; i < kTopkBins; i += kGroups * 128) shared.bins[i] = 0;
  }
  const int first = p.first_token + blockIdx.y * kTokens;
  const int end = min(first + kTokens, p.first_token + p.num_tokens);
  int scored = 0;
  for (int token = first; token < end; ++token) {
    scored = max(scored, ScoredEntries(p.in.batch, p.in.topk, token));
  }
  WaitForPredecessor();
  AllowSuccessor();
  if (scored <= static_cast<int>(blockIdx.x) * kGroups * kIndexTile) return;
  if constexpr (kTokens == 1) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kHeads / (kGroups * 4); ++i) {
      const int head = static_cast<int>(threadIdx.x / 32) + i * kGroups * 4;
      const IndexQueryRow row = MakeIndexQuery(p.in, first, head, lane);
      *reinterpret_cast<uint32_t*>(shared.queries + QueryOffset(head, lane)) = row.codes;
      if (lane == 0) shared.weights[head] = row.weight;
    }
  } else {
    const int rows = (end - first) * kHeads;
    const auto* in =
        reinterpret_cast<const uint4*>(p.queries.codes + int64_t{first} * kHeads * kIndexDim);
    for (int i = threadIdx.x; i < kTokens * kHeads * kIndexDim / 16; i += kGroups * 128) {
      reinterpret_cast<uint4*>(shared.queries)[i] =
          i < rows * kIndexDim / 16 ? in[i] : uint4{0, 0, 0, 0};
    }
    for (int i = threadIdx.x; i < kTokens * kHeads; i += kGroups * 128) {
      shared.weights[i] = i < rows ? p.queries.weights[int64_t{first} * kHeads + i] : 0;
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  IndexScorer<kType, kHeads, kTokens, kGroups> scorer(p, shared, first);
  for (int begin = first; begin < end;) {
    int next = begin + 1;
    while (next < end && p.in.batch.token_seq[next] == p.in.batch.token_seq[begin]) ++next;
    if (p.in.batch.token_seq[begin] >= 0) scorer.Run(begin, next);
    begin = next;
  }
  if constexpr (kTokens == 1) {
    __syncthreads();
    int* bins = p.counters[first].bins;
    for (int i = threadIdx.x; i < kTopkBins; i += kGroups * 128) {
      if (shared.bins[i] != 0) atomicAdd(bins + i, shared.bins[i]);
    }
  }
}

}  // namespace fathom::kernels
