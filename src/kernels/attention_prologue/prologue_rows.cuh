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
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = UnpackBf16(words[i]);
    to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
  }
}

// Eight columns of a query row as codes, and the scale of 16 threads' columns.
struct QueryEight {
  uint2 codes;
  uint32_t scale;
};
// q_norm and FP8 of one row: thread i holds 8 columns from 8 * i. sum: over the row's threads.
template <typename Sum>
__device__ __forceinline__ QueryEight QuantizeQuery(float (&x)[8], const float (&weight)[8],
                                                    int columns, float eps, const Sum& sum) {
  float squares = 0;
#pragma unroll
  for (float v : x) squares += v * v;
  const float scale = 1.0f / sqrtf(sum(squares) / static_cast<float>(columns) + eps);
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
  if (!active) return;
  *reinterpret_cast<uint2*>(p.q.codes + Fp8TileOffset(token, column, p.q.row_groups)) = eight.codes;
  if (threadIdx.x % 16 == 0) {
    p.q.scales[column / 128 * p.q.row_groups * 8 + token] = Ue8m0Value(eight.scale);
  }
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

}  // namespace fathom::kernels
