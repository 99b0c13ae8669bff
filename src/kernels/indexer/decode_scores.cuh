// Scores of a tile of 64 index keys by one warpgroup, of one token: keys in registers are the rows
// of wgmma, the token's 64 heads its columns. Device code only.
#pragma once

#include "kernels/gemm/wgmma.cuh"
#include "kernels/indexer/index_keys.cuh"

namespace fathom::kernels {

inline constexpr int kDecodeHeads = 64;

// A token's queries, at a multiple of 1,024 bytes of shared memory.
struct DecodeQueries {
  uint8_t codes[kDecodeHeads * kIndexDim];
  alignas(8) float weights[kDecodeHeads];  // halved
};

// The weights of the thread's columns.
struct DecodeWeights {
  float2 pairs[kDecodeHeads / 8];

  __device__ explicit DecodeWeights(const DecodeQueries& queries) {
#pragma unroll
    for (int j = 0; j < kDecodeHeads / 8; ++j) {
      const float* from = queries.weights + 8 * j + threadIdx.x % 4 * 2;
      pairs[j] = *reinterpret_cast<const float2*>(from);
    }
  }
};

// The score of the thread's row, its second one where the thread is odd; twice in each quad.
// `queries`: SmemDescriptor of the codes.
template <config::IndexKeyDType kType>
__device__ __forceinline__ float ScoreKeyRows(IndexKeyRows<kType>& keys, uint64_t queries,
                                              const DecodeWeights& weights) {
  float d[kDecodeHeads / 2];
  // All keys are widened before the first product: between them it would have to be waited for.
  keys.Keep();
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < kIndexDim / 32; ++k) {
    Wgmma<WgmmaType::kE4m3, kDecodeHeads>::FromRegisters(d, keys.a[k], queries + k * 2, k != 0);
  }
  WgmmaCommit();
  WgmmaWait<0>();
  float sums[2] = {};
#pragma unroll
  for (int j = 0; j < kDecodeHeads / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float x = d[4 * j + 2 * r], y = d[4 * j + 2 * r + 1];
      sums[r] = fmaf(x + fabsf(x), weights.pairs[j].x, sums[r]);  // max(x, 0), by another unit
      sums[r] = fmaf(y + fabsf(y), weights.pairs[j].y, sums[r]);
    }
  }
  const bool odd = threadIdx.x % 2 != 0;
  float sum = odd ? sums[1] : sums[0];
  sum += __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[1], 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  return sum * keys.scale;
}

}  // namespace fathom::kernels
