// One index query head: rope, Hadamard, the index cache's rounding, and its weight, by one warp
// whose lane l holds values 4 * l .. 4 * l + 3. Device code only.
#pragma once

#include "kernels/indexer/index_vector.cuh"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/kv_entry/kv_entry.cuh"
#include "kernels/rope/rope.cuh"

namespace fathom::kernels {

// FP4 blocks are folded into FP8 relative to the largest: 6 * 2^6 = 384 is the largest code.
inline constexpr int kFoldTop = 6;

// Queries as the score kernel reads them. A token has kHeads rows (8 or 64), zero past num_heads.
struct IndexQueries {
  uint8_t* codes = nullptr;  // [num_tokens * kHeads, 128] FP8, 8-row groups of swizzled rows
  float* weights = nullptr;  // [num_tokens, kHeads], w_h times the row's scale
};

// How many entries the token must be scored over; 0 when it takes them all.
__device__ __forceinline__ int ScoredEntries(const CudaBatch& batch, int topk, int token) {
  if (batch.token_seq[token] < 0) return 0;
  const int visible = (batch.positions[token] + 1) / 4;
  return visible > topk ? visible : 0;
}

// The values of lane l: 4 * l .. 4 * l + 3. Quantizes them as the keys are, as FP8 codes of one
// scale; returns that scale.
__device__ inline float QuantizeQuery(const float (&x)[4], config::IndexKeyDType dtype,
                                      uint32_t& codes) {
  const float max = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
  float v[4];
  float scale;
  if (dtype == config::IndexKeyDType::kFp4) {
    const uint32_t block = Fp4Scale(WarpMax<8>(max));
    const auto top = static_cast<uint32_t>(WarpMax(static_cast<float>(block)));
    const float inverse = Ue8m0Inverse(block);
    const float fold = exp2f(static_cast<float>(kFoldTop) - static_cast<float>(top - block));
    constexpr float kValues[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = Fp4Code(x[i] * inverse);
      float magnitude = 0;
#pragma unroll
      for (uint32_t c = 1; c < 8; ++c) magnitude = (code & 7u) == c ? kValues[c] : magnitude;
      v[i] = copysignf(magnitude * fold, x[i]);
    }
    scale = Ue8m0Value(top) * (1.0f / (1 << kFoldTop));
  } else {
    const uint32_t block = Fp8Scale(WarpMax(max));
    const float inverse = Ue8m0Inverse(block);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = x[i] * inverse;
    scale = Ue8m0Value(block);
  }
  codes = Fp8Codes(v[0], v[1]) | Fp8Codes(v[2], v[3]) << 16;
  return scale;
}

struct IndexQueryRow {
  uint32_t codes = 0;  // the lane's four
  float weight = 0;    // w_h times the row's scale
};

// Zero past num_heads.
__device__ inline IndexQueryRow MakeIndexQuery(const CudaIndexSelectParams& p, int64_t token,
                                               int head, int lane) {
  IndexQueryRow row;
  if (head >= p.num_heads) return row;
  const uint2 raw =
      reinterpret_cast<const uint2*>(p.q + (token * p.num_heads + head) * kIndexDim)[lane];
  float2 a = UnpackBf16(raw.x), b = UnpackBf16(raw.y);
  if (lane >= 16) {
    const float4 angles = reinterpret_cast<const float4*>(p.angles + token * kRopeDim)[lane - 16];
    a = RotatePair(a, {angles.x, angles.y});
    b = RotatePair(b, {angles.z, angles.w});
  }
  float x[4] = {RoundBf16(a.x), RoundBf16(a.y), RoundBf16(b.x), RoundBf16(b.y)};
  RotateIndexVectorWarp(x, lane);
  const float scale = QuantizeQuery(x, p.dtype, row.codes);
  const float projected = __bfloat162float(p.projected[token * p.projected_stride + head]);
  row.weight = RoundBf16(projected * p.weight_scale) * scale;
  return row;
}

// Of the lane's codes in rows of 128 bytes, 8-row groups, swizzled.
__device__ __forceinline__ int64_t QueryOffset(int64_t row, int lane) {
  return row / 8 * 1024 + row % 8 * 128 + ((lane / 4) ^ (row % 8)) * 16 + lane % 4 * 4;
}

}  // namespace fathom::kernels
