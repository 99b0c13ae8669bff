// Blocks split by role, all of 256 threads: first one a sequence and compressor (the long ones:
// they read and write state), then groups of tokens whose entries need this step's rows only, then
// one a token for its KV row and one a token for its query row. The query products, which read only
// weights before they wait, may start at once, beside the input products.
#include "kernels/attention_prologue/attention_prologue_cuda.h"
#include "kernels/compressor/compressor.cuh"
#include "kernels/launch.cuh"
#include "kernels/rope/rope.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = kCompressorThreads;
constexpr int kWindow = 128;
constexpr int kMaxQueryRank = 8 * kThreads;

// Blocks of each role.
struct Roles {
  int sequences = 0;  // of each compressor
  int groups = 0;     // likewise
  int compressors = 0;
  int tokens = 0;
};

__device__ void LoadEight(const __nv_bfloat16* from, float (&to)[8]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = UnpackBf16(words[i]);
    to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
  }
}

// q_norm and FP8 of one row: thread i holds 8 columns from 8 * i, so 16 threads a scale.
__device__ void QueryRow(const CudaAttentionPrologueParams& p, int token, float* sums) {
  const int column = 8 * threadIdx.x;
  const bool active = column < p.q_lora_rank;
  float x[8] = {}, weight[8] = {};
  AllowSuccessor();
  if (active) LoadEight(p.q_norm + column, weight);
  WaitForPredecessor();
  if (active) LoadEight(p.qr + token * p.qr_stride + column, x);
  float squares = 0;
#pragma unroll
  for (float v : x) squares += v * v;
  const float sum = BlockSum256(squares, sums);
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(p.q_lora_rank) + p.norm_eps);
  float max = 0;
  if (active) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = RoundBf16(x[i] * scale * weight[i]);
      max = fmaxf(max, fabsf(x[i]));
    }
  }
  const uint32_t byte = Fp8Scale(WarpMax<16>(max));
  if (!active) return;
  const float inverse = Ue8m0Inverse(byte);
#pragma unroll
  for (float& v : x) v *= inverse;
  const uint2 codes{Fp8Codes(x[0], x[1], x[2], x[3]), Fp8Codes(x[4], x[5], x[6], x[7])};
  *reinterpret_cast<uint2*>(p.q.codes + Fp8TileOffset(token, column, p.q.row_groups)) = codes;
  if (threadIdx.x % 16 == 0) {
    p.q.scales[column / 128 * p.q.row_groups * 8 + token] = Ue8m0Value(byte);
  }
}

// The place of the token's window entry; null when no later step can reach it.
__device__ DeviceEntry WindowEntry(const CudaAttentionPrologueParams& p, int seq, int position) {
  const CudaBatch& b = p.batch;
  const int end = b.num_computed[seq] + b.cu_seqlens_q[seq + 1] - b.cu_seqlens_q[seq];
  const int per_page = p.pages.entries_per_page;
  const int page = position / per_page - b.first_window_page[seq];
  if (position < end - kCompressorMaxRollback - (kWindow - 1) || page < 0) return {};
  const int32_t id = b.window_tables[int64_t{seq} * b.max_window_pages + page];
  return EntryAt(p.pages, id, position % per_page);
}

// Thread i holds columns 2i and 2i + 1.
__device__ void KvRow(const CudaAttentionPrologueParams& p, int token, float* sums) {
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

// Registers for a block beside two blocks of products.
template <int kRatio>
__global__ void __maxnreg__(72)
    AttentionPrologueKernel(const __grid_constant__ CudaAttentionPrologueParams p, Roles roles) {
  __shared__ CompressorShared shared;
  int block = blockIdx.x;
  if constexpr (kRatio != 0) {
    const int per_compressor = roles.sequences + roles.groups;
    const bool index = block >= per_compressor;
    if (block < per_compressor * roles.compressors) {
      block -= index ? per_compressor : 0;
      if constexpr (kRatio == 128) {
        if (block < roles.sequences) return CompressSequenceC128(p, block, shared);
        return CompressFresh<128, kHeadDim>(p, p.main, block - roles.sequences, shared);
      } else if (index) {
        if (block < roles.sequences) {
          return CompressSequenceC4<kIndexDim>(p, p.index, block, shared);
        }
        return CompressFresh<4, kIndexDim>(p, p.index, block - roles.sequences, shared);
      } else {
        if (block < roles.sequences) return CompressSequenceC4<kHeadDim>(p, p.main, block, shared);
        return CompressFresh<4, kHeadDim>(p, p.main, block - roles.sequences, shared);
      }
    }
    block -= per_compressor * roles.compressors;
  }
  if (block < roles.tokens) return KvRow(p, block, shared.sums);
  QueryRow(p, block - roles.tokens, shared.sums);
}

}  // namespace

void Launch(const CudaAttentionPrologueParams& p, device::Stream& stream) {
  if (p.batch.num_tokens == 0) return;
  CHECK_LE(p.q_lora_rank, kMaxQueryRank);
  CHECK_EQ(p.q_lora_rank % 128, 0);
  CHECK(p.index_dtype != config::IndexKeyDType::kFp32);
  Roles roles{.tokens = p.batch.num_tokens};
  if (p.ratio != 0) {
    roles.sequences = p.batch.num_seqs;
    roles.groups = (p.batch.num_tokens + p.ratio - 1) / p.ratio;
    roles.compressors = p.ratio == 4 ? 2 : 1;
  }
  const int queries = p.num_queries < 0 ? roles.tokens : p.num_queries;
  const int blocks = (roles.sequences + roles.groups) * roles.compressors + roles.tokens + queries;
  const auto kernel = p.ratio == 0   ? AttentionPrologueKernel<0>
                      : p.ratio == 4 ? AttentionPrologueKernel<4>
                                     : AttentionPrologueKernel<128>;
  LaunchKernel(kernel, blocks, kThreads, 0, stream, p, roles);
}

}  // namespace fathom::kernels
