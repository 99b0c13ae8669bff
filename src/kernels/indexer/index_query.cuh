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

// What the FP4 code of x >= 0 stands for: nearest even, clamped. Adding 2^22 times the power of two
// at or below x, or 1, leaves one bit behind that power.
__device__ __forceinline__ float RoundToFp4(float x) {
  const uint32_t power = max(__float_as_uint(x) & 0x7f800000u, 0x3f800000u);
  const float shift = __uint_as_float(power + (22u << 23));
  return fminf(__fsub_rn(__fadd_rn(x, shift), shift), 6.0f);
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
    const uint32_t top = __reduce_max_sync(0xffffffffu, block);
    const float inverse = Ue8m0Inverse(block);
    const float fold = Ue8m0Value(127 + kFoldTop - min(top - block, 126u));
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = copysignf(RoundToFp4(fabsf(x[i]) * inverse) * fold, x[i]);
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

// What a query is made of, as the lane has it: loaded for several heads before any is made.
struct RawIndexQuery {
  uint2 values{0, 0};
  float projected = 0;
};
// Zero past num_heads.
__device__ __forceinline__ RawIndexQuery LoadIndexQuery(const CudaIndexSelectParams& p,
                                                        int64_t token, int head, int lane) {
  if (head >= p.num_heads) return {};
  const auto* values =
      reinterpret_cast<const uint2*>(p.q + (token * p.num_heads + head) * kIndexDim);
  return {values[lane], __bfloat162float(p.projected[token * p.projected_stride + head])};
}
// The lane's two angles; the first half of the lanes have none.
__device__ __forceinline__ float4 LoadIndexAngles(const CudaIndexSelectParams& p, int64_t token,
                                                  int lane) {
  if (lane < 16) return {1, 0, 1, 0};
  return reinterpret_cast<const float4*>(p.angles + token * kRopeDim)[lane - 16];
}

__device__ inline IndexQueryRow MakeIndexQuery(const CudaIndexSelectParams& p,
                                               const RawIndexQuery& raw, float4 angles, int lane) {
  IndexQueryRow row;
  float2 a = UnpackBf16(raw.values.x), b = UnpackBf16(raw.values.y);
  if (lane >= 16) {
    a = RotatePair(a, {angles.x, angles.y});
    b = RotatePair(b, {angles.z, angles.w});
  }
  float x[4] = {RoundBf16(a.x), RoundBf16(a.y), RoundBf16(b.x), RoundBf16(b.y)};
  RotateIndexVectorWarp(x, lane);
  const float scale = QuantizeQuery(x, p.dtype, row.codes);
  row.weight = RoundBf16(raw.projected * p.weight_scale) * scale;
  return row;
}

// Of the lane's codes in rows of 128 bytes, 8-row groups, swizzled.
__device__ __forceinline__ int64_t QueryOffset(int64_t row, int lane) {
  return row / 8 * 1024 + row % 8 * 128 + ((lane / 4) ^ (row % 8)) * 16 + lane % 4 * 4;
}

}  // namespace fathom::kernels
