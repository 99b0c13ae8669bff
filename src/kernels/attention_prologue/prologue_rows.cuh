// What the prologue makes of one row of the input products: a query row's FP8, a window entry.
// Device code only.
#pragma once

#include "kernels/attention_prologue/attention_prologue_cuda.h"
#include "kernels/compressor/compressor.cuh"
#include "kernels/launch.cuh"
#include "kernels/rope/rope.cuh"

namespace fathom::kernels {

inline constexpr int kPrologueThreads = kCompressorThreads;
inline constexpr int kPrologueWindow = 128;

__device__ inline void LoadEight(const __nv_bfloat16* from, float (&to)[8]) {
  UnpackEight(*reinterpret_cast<const uint4*>(from), to);
}

// Eight columns of a query row as codes, and the scale of 16 threads' columns.
struct QueryEight {
  uint2 codes;
  uint32_t scale;
};
// scale: of the norm.
__device__ __forceinline__ QueryEight QuantizeEight(float (&x)[8], const float (&weight)[8],
                                                    float scale) {
  float max = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = RoundBf16(x[i] * scale * weight[i]);
    max = fmaxf(max, fabsf(x[i]));
  }
  const uint32_t byte = Fp8Scale(WarpMax<16>(max));
  const float inverse = Ue8m0Inverse(byte);
#pragma unroll
  for (float& v : x) v *= inverse;
  return {{Fp8Codes(x[0], x[1], x[2], x[3]), Fp8Codes(x[4], x[5], x[6], x[7])}, byte};
}
__device__ __forceinline__ float Squares(const float (&x)[8]) {
  float squares = 0;
#pragma unroll
  for (const float v : x) squares += v * v;
  return squares;
}
// q_norm and FP8 of one row: thread i holds 8 columns from 8 * i. sum: over the row's threads.
template <typename Sum>
__device__ __forceinline__ QueryEight QuantizeQuery(float (&x)[8], const float (&weight)[8],
                                                    int columns, float eps, const Sum& sum) {
  const float squares = sum(Squares(x));
  return QuantizeEight(x, weight, 1.0f / sqrtf(squares / static_cast<float>(columns) + eps));
}
__device__ __forceinline__ void StoreQuery(const CudaAttentionPrologueParams& p, int token,
                                           int column, const QueryEight& eight) {
  *reinterpret_cast<uint2*>(p.q.codes + Fp8TileOffset(token, column, p.q.row_groups)) = eight.codes;
  if (threadIdx.x % 16 != 0) return;
  p.q.scales[column / 128 * p.q.row_groups * 8 + token] = Ue8m0Value(eight.scale);
}

// A block's query row.
__device__ inline void QueryRow(const CudaAttentionPrologueParams& p, int token, float* sums) {
  const int column = 8 * threadIdx.x;
  const bool active = column < p.q_lora_rank;
  float x[8] = {}, weight[8] = {};
  AllowSuccessor();
  if (active) LoadEight(p.q_norm + column, weight);
  WaitForPredecessor();
  if (active) LoadEight(p.qr + token * p.qr_stride + column, x);
  const QueryEight eight = QuantizeQuery(x, weight, p.q_lora_rank, p.norm_eps,
                                         [&](float v) { return BlockSum256(v, sums); });
  if (active) StoreQuery(p, token, column, eight);
}

// The place of the token's window entry; null when no later step can reach it.
__device__ inline DeviceEntry WindowEntry(const CudaAttentionPrologueParams& p, int seq,
                                          int position) {
  const CudaBatch& b = p.batch;
  const int end = b.num_computed[seq] + b.cu_seqlens_q[seq + 1] - b.cu_seqlens_q[seq];
  const int per_page = p.pages.entries_per_page;
  const int page = position / per_page - b.first_window_page[seq];
  if (position < end - kCompressorMaxRollback - (kPrologueWindow - 1) || page < 0) return {};
  const int32_t id = b.window_tables[int64_t{seq} * b.max_window_pages + page];
  return EntryAt(p.pages, id, position % per_page);
}

// Thread i holds columns 2i and 2i + 1.
__device__ inline void KvRow(const CudaAttentionPrologueParams& p, int token, float* sums) {
  AllowSuccessor();
  const int i = threadIdx.x, seq = p.batch.token_seq[token];
  const DeviceEntry entry = seq < 0 ? DeviceEntry{} : WindowEntry(p, seq, p.batch.positions[token]);
  const float2 weight = UnpackBf16(reinterpret_cast<const uint32_t*>(p.kv_norm)[i]);
  float2 angle{1, 0};
  if (i >= kNumFp8 / 2) {
    const float* angles = p.angles + int64_t{token} * kRopeDim;
    angle = reinterpret_cast<const float2*>(angles)[i - kNumFp8 / 2];
  }
  WaitForPredecessor();
  const float2 raw = UnpackBf16(reinterpret_cast<const uint32_t*>(p.kv + token * p.kv_stride)[i]);
  const float sum = BlockSum256(raw.x * raw.x + raw.y * raw.y, sums);
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(kHeadDim) + p.norm_eps);
  float2 x{RoundBf16(raw.x * scale * weight.x), RoundBf16(raw.y * scale * weight.y)};
  if (i >= kNumFp8 / 2) {
    x = RotatePair(x, angle);
    x = {RoundBf16(x.x), RoundBf16(x.y)};
  }
  const KvPair pair = EncodeKvPair(x, i);
  uint8_t* fresh = p.fresh + int64_t{token} * kFreshRowBytes;
  StoreKvPair(pair, i, {fresh, fresh + kKvDataBytes});
  if (entry.data != nullptr) StoreKvPair(pair, i, entry);
}

// Rows by warps: of many rows, for which blocks are few at a time for their registers. A warp has
// in turn what the warps of a block have, and adds up likewise: the same sums.
inline constexpr int kRowWarps = kPrologueThreads / 32;

// squares(w): of what thread w * 32 + lane of a block has.
template <typename Squares>
__device__ __forceinline__ float SumOfRow(const Squares& squares) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) sum += WarpSum(squares(w));
  return sum;
}

// Behind the wait, as the next one.
__device__ inline void QueryRowOfWarp(const CudaAttentionPrologueParams& p, int token) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto column = [&](int w) { return (w * 32 + lane) * 8; };
  uint4 row[kRowWarps];
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) {
    row[w] = {};
    if (column(w) >= p.q_lora_rank) continue;
    row[w] = *reinterpret_cast<const uint4*>(p.qr + token * p.qr_stride + column(w));
  }
  const float sum = SumOfRow([&](int w) {
    float x[8];
    UnpackEight(row[w], x);
    return Squares(x);
  });
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(p.q_lora_rank) + p.norm_eps);
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) {
    if (w * 256 >= p.q_lora_rank) break;
    const bool active = column(w) < p.q_lora_rank;
    float x[8], weight[8] = {};
    UnpackEight(row[w], x);
    if (active) LoadEight(p.q_norm + column(w), weight);
    const QueryEight eight = QuantizeEight(x, weight, scale);
    if (active) StoreQuery(p, token, column(w), eight);
  }
}

__device__ inline void KvRowOfWarp(const CudaAttentionPrologueParams& p, int token) {
  const int lane = static_cast<int>(threadIdx.x) % 32, seq = p.batch.token_seq[token];
  const DeviceEntry entry = seq < 0 ? DeviceEntry{} : WindowEntry(p, seq, p.batch.positions[token]);
  const auto* const from = reinterpret_cast<const uint32_t*>(p.kv + token * p.kv_stride);
  const auto* const norm = reinterpret_cast<const uint32_t*>(p.kv_norm);
  uint32_t row[kRowWarps];
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) row[w] = from[w * 32 + lane];
  const float2 angle = reinterpret_cast<const float2*>(p.angles + int64_t{token} * kRopeDim)[lane];
  const float sum = SumOfRow([&](int w) {
    const float2 x = UnpackBf16(row[w]);
    return x.x * x.x + x.y * x.y;
  });
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(kHeadDim) + p.norm_eps);
  uint8_t* const fresh = p.fresh + int64_t{token} * kFreshRowBytes;
  static_assert(kNumFp8 / 2 == (kRowWarps - 1) * 32);
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) {
    const float2 raw = UnpackBf16(row[w]), weight = UnpackBf16(norm[w * 32 + lane]);
    float2 x{RoundBf16(raw.x * scale * weight.x), RoundBf16(raw.y * scale * weight.y)};
    if (w == kRowWarps - 1) {
      x = RotatePair(x, angle);
      x = {RoundBf16(x.x), RoundBf16(x.y)};
    }
    const int i = w * 32 + lane;
    const KvPair pair = EncodeKvPair(x, i);
    StoreKvPair(pair, i, {fresh, fresh + kKvDataBytes});
    if (entry.data != nullptr) StoreKvPair(pair, i, entry);
  }
}

}  // namespace fathom::kernels
