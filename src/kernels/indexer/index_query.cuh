// Index query heads: rope, Hadamard, the index cache's rounding, and their weights. A head lies on
// eight lanes, 16 values each, or on a warp's 32. Device code only.
#pragma once

#include <type_traits>

#include "kernels/indexer/index_vector.cuh"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/kv_entry/kv_entry.cuh"
#include "kernels/numbered_words.cuh"
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

inline constexpr int kQueryLanes = 8;  // of a head, where a warp has four

// Quantizes the lane's values as the keys are, as FP8 codes of one scale a head; returns the scale.
template <int kLanes>
__device__ __forceinline__ float QuantizeQuery(float (&x)[kIndexDim / kLanes],
                                               config::IndexKeyDType dtype,
                                               uint32_t (&codes)[kIndexDim / kLanes / 4]) {
  constexpr int kBlockLanes = kLanes / 4;  // of an FP4 scale
  float most = 0;
#pragma unroll
  for (const float v : x) most = fmaxf(most, fabsf(v));
  float scale;
  if (dtype == config::IndexKeyDType::kFp4) {
    const uint32_t block = Fp4Scale(WarpMax<kBlockLanes>(most));
    uint32_t top = max(block, __shfl_xor_sync(0xffffffffu, block, kBlockLanes));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2 * kBlockLanes));
    const float inverse = Ue8m0Inverse(block);
    const float fold = Ue8m0Value(127 + kFoldTop - min(top - block, 126u));
#pragma unroll
    for (float& v : x) v = copysignf(RoundToFp4(fabsf(v) * inverse) * fold, v);
    scale = Ue8m0Value(top) * (1.0f / (1 << kFoldTop));
  } else {
    const uint32_t block = Fp8Scale(WarpMax<kLanes>(most));
    const float inverse = Ue8m0Inverse(block);
#pragma unroll
    for (float& v : x) v *= inverse;
    scale = Ue8m0Value(block);
  }
#pragma unroll
  for (int i = 0; i < kIndexDim / kLanes / 4; ++i) {
    codes[i] = Fp8Codes(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
  return scale;
}

// The angles of the lane's pairs, two at a time; the first half of a head's lanes have none.
template <int kLanes>
struct IndexAngles {
  float4 pairs[kIndexDim / kLanes / 4] = {};

  __device__ IndexAngles(const CudaIndexSelectParams& p, int64_t token, int lane) {
    constexpr int kCount = kIndexDim / kLanes / 4;
    const int part = lane % kLanes - kLanes / 2;
    if (part < 0) return;
    const auto* from = reinterpret_cast<const float4*>(p.angles + token * kRopeDim) + kCount * part;
#pragma unroll
    for (int i = 0; i < kCount; ++i) pairs[i] = from[i];
  }
};

// What a head's query is made of, on kLanes lanes.
template <int kLanes>
struct IndexQueryInput {
  static constexpr int kPairs = kIndexDim / kLanes / 2;
  alignas(16) uint32_t pairs[kPairs] = {};  // the lane's, of the product
  float projected = 0;

  // Of the lane's `head`; zero past num_heads.
  __device__ static IndexQueryInput Load(const CudaIndexSelectParams& p, int64_t token, int head,
                                         int lane) {
    IndexQueryInput in;
    if (head >= p.num_heads) return in;
    in.LoadProjected(p, token, head);
    using Words = std::conditional_t<kPairs % 4 == 0, uint4, uint2>;
    const auto* from = reinterpret_cast<const Words*>(p.q + First(p, token, head, lane));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pairs) / sizeof(Words)); ++i) {
      reinterpret_cast<Words*>(in.pairs)[i] = from[i];
    }
    return in;
  }
  // The same of q_words.
  __device__ static IndexQueryInput Await(const CudaIndexSelectParams& p, int64_t token, int head,
                                          int lane) {
    IndexQueryInput in;
    if (head >= p.num_heads) return in;
    in.LoadProjected(p, token, head);
    AwaitNumbered(p.q_words + First(p, token, head, lane) / 2, ValueOf(p.number), in.pairs);
    return in;
  }

  __device__ void LoadProjected(const CudaIndexSelectParams& p, int64_t token, int head) {
    projected = __bfloat162float(p.projected[token * p.projected_stride + head]);
  }

 private:
  __device__ static int64_t First(const CudaIndexSelectParams& p, int64_t token, int head,
                                  int lane) {
    return (token * p.num_heads + head) * kIndexDim + lane % kLanes * (2 * kPairs);
  }
};

// A head's query on kLanes lanes of a warp, which makes 32 / kLanes at once.
template <int kLanes>
struct IndexQueryRow {
  static constexpr int kValues = kIndexDim / kLanes;
  uint32_t codes[kValues / 4];  // the lane's
  float weight;                 // w_h times the row's scale

  // Of the lane's pairs of the product and of w_h's.
  __device__ IndexQueryRow(const CudaIndexSelectParams& p, const IndexQueryInput<kLanes>& in,
                           const IndexAngles<kLanes>& angles, int lane) {
    uint32_t pairs[kValues / 2];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) pairs[i] = in.pairs[i];
    if (lane % kLanes >= kLanes / 2) {
#pragma unroll
      for (int i = 0; i < kValues / 2; ++i) {
        const float4 two = angles.pairs[i / 2];
        const float2 angle = i % 2 == 0 ? float2{two.x, two.y} : float2{two.z, two.w};
        const float2 x = RotatePair(UnpackBf16(pairs[i]), angle);
        pairs[i] = PackBf16(x.x, x.y);
      }
    }
    float x[kValues];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const float2 pair = UnpackBf16(pairs[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
    RotateIndexVector<kLanes>(x, lane);
    const float scale = QuantizeQuery<kLanes>(x, p.dtype, codes);
    weight = RoundBf16(in.projected * p.weight_scale) * scale;
  }
};

// Where the codes of a row's values 4 * four .. lie: rows of 128 bytes, 8-row groups, swizzled.
__device__ __forceinline__ int64_t QueryCodesOffset(int64_t row, int four) {
  const int chunk = four % 8 ^ static_cast<int>(row % 8);
  return row / 8 * 1024 + row % 8 * 128 + chunk * 16 + four / 8 * 4;
}
// The lane's codes.
__device__ __forceinline__ void StoreQueryCodes(uint8_t* rows, int64_t row, int lane,
                                                const IndexQueryRow<kQueryLanes>& query) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t offset = QueryCodesOffset(row, lane % kQueryLanes * 4 + i);
    *reinterpret_cast<uint32_t*>(rows + offset) = query.codes[i];
  }
}

}  // namespace fathom::kernels
