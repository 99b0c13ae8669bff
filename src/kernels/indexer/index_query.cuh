// Index query heads: rope, Hadamard, the index cache's rounding, and their weights, by one warp for
// four heads: lane l holds values 16 * (l % 8) .. of head l / 8. Device code only.
#pragma once

#include "kernels/indexer/index_vector.cuh"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/kv_entry/kv_entry.cuh"
#include "kernels/rope/rope.cuh"

namespace fathom::kernels {

// FP4 blocks are folded into FP8 relative to the largest: 6 * 2^6 = 384 is the largest code.
inline constexpr int kFoldTop = 6;

// Codes of queries and keys lie in a row of 128 bytes so that a thread of wgmma can hold 32
// adjacent ones of a key as operands (wgmma.cuh): 16-byte chunk c has, of each 32, the c-th four.
// Sums of a dot product are made in this order in every step.

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

inline constexpr int kQueryHeads = 4, kQueryLanes = 8;        // of a warp; of a head
inline constexpr int kQueryValues = kIndexDim / kQueryLanes;  // of a lane

// Quantizes the lane's values as the keys are, as FP8 codes of one scale a head; returns the scale.
__device__ __forceinline__ float QuantizeQuery(float (&x)[kQueryValues],
                                               config::IndexKeyDType dtype, uint4& codes) {
  float most = 0;
#pragma unroll
  for (const float v : x) most = fmaxf(most, fabsf(v));
  float scale;
  if (dtype == config::IndexKeyDType::kFp4) {
    const uint32_t block = Fp4Scale(WarpMax<2>(most));
    uint32_t top = max(block, __shfl_xor_sync(0xffffffffu, block, 2));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 4));
    const float inverse = Ue8m0Inverse(block);
    const float fold = Ue8m0Value(127 + kFoldTop - min(top - block, 126u));
#pragma unroll
    for (float& v : x) v = copysignf(RoundToFp4(fabsf(v) * inverse) * fold, v);
    scale = Ue8m0Value(top) * (1.0f / (1 << kFoldTop));
  } else {
    const uint32_t block = Fp8Scale(WarpMax<kQueryLanes>(most));
    const float inverse = Ue8m0Inverse(block);
#pragma unroll
    for (float& v : x) v *= inverse;
    scale = Ue8m0Value(block);
  }
  const auto four = [&](int i) { return Fp8Codes(x[i], x[i + 1], x[i + 2], x[i + 3]); };
  codes = {four(0), four(4), four(8), four(12)};
  return scale;
}

struct IndexQueryRow {
  uint4 codes{0, 0, 0, 0};  // the lane's 16
  float weight = 0;         // w_h times the row's scale
};

// The lane's eight angles, as pairs of two; the first half of a head's lanes have none.
struct IndexAngles {
  float4 pairs[4] = {};
};
__device__ __forceinline__ IndexAngles LoadIndexAngles(const CudaIndexSelectParams& p,
                                                       int64_t token, int lane) {
  IndexAngles angles;
  const int part = lane % kQueryLanes - kQueryLanes / 2;
  if (part < 0) return angles;
  const auto* from = reinterpret_cast<const float4*>(p.angles + token * kRopeDim) + 4 * part;
#pragma unroll
  for (int i = 0; i < 4; ++i) angles.pairs[i] = from[i];
  return angles;
}

// Of heads first_head + lane / 8; zero past num_heads.
__device__ inline IndexQueryRow MakeIndexQuery(const CudaIndexSelectParams& p, int64_t token,
                                               int first_head, const IndexAngles& angles,
                                               int lane) {
  const int head = first_head + lane / kQueryLanes;
  uint4 raw[2] = {};
  float projected = 0;
  if (head < p.num_heads) {
    const auto* values =
        reinterpret_cast<const uint4*>(p.q + (token * p.num_heads + head) * kIndexDim);
    raw[0] = values[lane % kQueryLanes * 2], raw[1] = values[lane % kQueryLanes * 2 + 1];
    projected = __bfloat162float(p.projected[token * p.projected_stride + head]);
  }
  uint32_t pairs[kQueryValues / 2] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w,
                                      raw[1].x, raw[1].y, raw[1].z, raw[1].w};
  if (lane % kQueryLanes >= kQueryLanes / 2) {
#pragma unroll
    for (int i = 0; i < kQueryValues / 2; ++i) {
      const float4 two = angles.pairs[i / 2];
      const float2 angle = i % 2 == 0 ? float2{two.x, two.y} : float2{two.z, two.w};
      const float2 x = RotatePair(UnpackBf16(pairs[i]), angle);
      pairs[i] = PackBf16(x.x, x.y);
    }
  }
  float x[kQueryValues];
#pragma unroll
  for (int i = 0; i < kQueryValues / 2; ++i) {
    const float2 pair = UnpackBf16(pairs[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
  RotateIndexVector(x, lane);
  IndexQueryRow row;
  const float scale = QuantizeQuery(x, p.dtype, row.codes);
  row.weight = RoundBf16(projected * p.weight_scale) * scale;
  return row;
}

// The lane's codes into rows of 128 bytes, 8-row groups, swizzled.
__device__ __forceinline__ void StoreQueryCodes(uint8_t* rows, int64_t row, int lane,
                                                const uint4& codes) {
  uint8_t* const to = rows + row / 8 * 1024 + row % 8 * 128 + lane % kQueryLanes / 2 * 4;
  const int chunk = lane % 2 * 4, swizzle = static_cast<int>(row % 8);
  *reinterpret_cast<uint32_t*>(to + (chunk ^ swizzle) * 16) = codes.x;
  *reinterpret_cast<uint32_t*>(to + ((chunk + 1) ^ swizzle) * 16) = codes.y;
  *reinterpret_cast<uint32_t*>(to + ((chunk + 2) ^ swizzle) * 16) = codes.z;
  *reinterpret_cast<uint32_t*>(to + ((chunk + 3) ^ swizzle) * 16) = codes.w;
}

}  // namespace fathom::kernels
