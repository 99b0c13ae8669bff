// Attention of steps of few heads and keys over all tokens (attention_decode.cuh), and of larger
// ones (attention_sm90.cuh): a block for each token, 64 heads and split of the keys; with one split
// it writes the output, with more a second kernel adds the parts up.
#include <algorithm>

#include "kernels/aligned_shared.cuh"
#include "kernels/launch.cuh"
#include "kernels/sparse_attention/attention_decode.cuh"
#include "kernels/sparse_attention/attention_sm90.cuh"

namespace fathom::kernels {
namespace {

// A split's part of one head: 512 sums; their maximum (log2 units) and sum of p.
struct Parts {
  float* sums = nullptr;     // [num_tokens, num_heads, max_splits, 512]
  float2* scales = nullptr;  // [num_tokens, num_heads, max_splits]
};

// Finished rows go through shared memory, so that whole 128-byte rows of tiles are written.
__device__ void WriteOutput(const CudaSparseAttentionParams& p, const AttentionConsumer& sums,
                            AttentionShared& shared, int token, int first_head) {
  const bool rotates = sums.column(AttentionConsumer::kPlainPairs) >= kNumFp8;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t row = sums.row(r);
    const float inverse = 1.0f / (sums.sum(r) + exp2f(shared.sink[row] * kLog2E - sums.max(r)));
    const uint32_t column = sums.column(0);
    const uint32_t to = SharedAddress(shared.q) + ChunkOffset(row, column / 8) + column % 8 * 2;
#pragma unroll
    for (int j = 0; j < AttentionConsumer::kPairs; ++j) {
      const float2 o = sums.value(r, j);
      const float2 out{o.x * inverse, o.y * inverse};
      const uint32_t pair = j >= AttentionConsumer::kPlainPairs && rotates
                                ? FinishPair(out, sums.column(j), shared.angles)
                                : PackBf16(out.x, out.y);
      // As ChunkOffset: chunks of eight columns.
      asm volatile("st.shared.b32 [%0], %1;" ::"r"((to ^ j % 8 * 16) + j / 8 * kColumnBlockBytes),
                   "r"(pair)
                   : "memory");
    }
  }
  NamedBarrier(kConsumerBarrier, kConsumers);
  constexpr int kRows = kConsumers / 64;  // a thread for each chunk
  const int heads = min(kHeadTile, p.num_heads - first_head), chunk = threadIdx.x % 64;
  const int first = threadIdx.x / 64;
  auto* to =
      reinterpret_cast<uint8_t*>(p.out.values) +
      Bf16TileOffset(token, int64_t{first_head + first} * kHeadDim + chunk * 8, p.out.row_groups);
  const int64_t stride = Bf16TileOffset(0, kRows * kHeadDim, p.out.row_groups);
#pragma unroll 4
  for (int row = first; row < heads; row += kRows, to += stride) {
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(shared.q + ChunkOffset(row, chunk));
  }
}

__device__ void WriteParts(const Parts& parts, const AttentionConsumer& sums, int num_heads,
                           int token, int first_head, int split, int max_splits) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = first_head + sums.row(r);
    if (head >= num_heads) continue;
    const int64_t part = (int64_t{token} * num_heads + head) * max_splits + split;
#pragma unroll
    for (int j = 0; j < AttentionConsumer::kPairs; ++j) {
      *reinterpret_cast<float2*>(parts.sums + part * kHeadDim + sums.column(j)) = sums.value(r, j);
    }
    if (sums.column(0) == 0) parts.scales[part] = {sums.max(r), sums.sum(r)};
  }
}

__global__ void __launch_bounds__(kAttentionThreads, 1)
    SparseAttentionKernel(const __grid_constant__ CudaSparseAttentionParams p, int head_tiles,
                          Parts parts) {
  extern __shared__ uint8_t dynamic[];
  auto& shared = AlignedShared<AttentionShared>(dynamic);
  const int token = blockIdx.x / head_tiles, first_head = blockIdx.x % head_tiles * kHeadTile;
  const int split = blockIdx.y, max_splits = gridDim.y;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      BarrierInit(shared.full + i, kProducerThreads);
      BarrierInit(shared.empty + i, kConsumers / 32);
      BarrierInit(shared.ready + i, kConsumers / 2);
      for (uint64_t& scored : shared.scored[i]) BarrierInit(&scored, 1);
    }
    BarrierInitFence();
  }
  const TokenKeys keys(p, token);
  WaitForPredecessor();
  AllowSuccessor();
  if (keys.is_padding()) return;
  const KeySplits splits(keys.size(), max_splits);
  if (split >= splits.num_splits) return;
  const int first = split * splits.tiles_per_split;
  const int end = min(first + splits.tiles_per_split, splits.num_tiles);
  __syncthreads();
  // 2 * 200 + 104 is 3 * 168, what the block is given: more would wait for ever.
  if (threadIdx.x >= kConsumers) {
    GiveRegisters<104>();
    KeyProducer(keys, first, end, SharedAddress(shared.keys), shared.producer, shared.full,
                shared.empty, threadIdx.x - kConsumers)
        .Run();
  } else {
    TakeRegisters<200>();
    LoadQueries(p, token, first_head, shared);
    AttentionConsumer sums(shared, keys.size());
    sums.Run(end - first, first * kKeyTile);
    if (max_splits == 1) {
      WriteOutput(p, sums, shared, token, first_head);
    } else {
      WriteParts(parts, sums, p.num_heads, token, first_head, split, max_splits);
    }
  }
}

constexpr int kCombineThreads = 128;  // four columns each

__global__ void __launch_bounds__(kCombineThreads)
    CombineKernel(const __grid_constant__ CudaSparseAttentionParams p, Parts parts,
                  int max_splits) {
  const int head = blockIdx.x, token = blockIdx.y, column = 4 * threadIdx.x;
  __shared__ float weights[kTargetBlocks];
  const TokenKeys keys(p, token);
  WaitForPredecessor();
  AllowSuccessor();
  if (keys.is_padding()) return;
  const int num_splits = KeySplits(keys.size(), max_splits).num_splits;
  const int64_t first = (int64_t{token} * p.num_heads + head) * max_splits;
  // Every warp finds the maximum and the sum; the first keeps the weights.
  float max = -__builtin_huge_valf(), sum = 0;
  for (int i = threadIdx.x % 32; i < num_splits; i += 32) {
    max = fmaxf(max, parts.scales[first + i].x);
  }
  max = WarpMax(max);
  for (int i = threadIdx.x % 32; i < num_splits; i += 32) {
    const float2 scale = parts.scales[first + i];
    const float weight = exp2f(scale.x - max);
    sum += weight * scale.y;
    if (threadIdx.x < 32) weights[i] = weight;
  }
  sum = WarpSum(sum) + exp2f(p.sink[head] * kLog2E - max);
  __syncthreads();
  float4 o{0, 0, 0, 0};
#pragma unroll 8
  for (int i = 0; i < num_splits; ++i) {
    const float weight = weights[i];
    const float4 v = *reinterpret_cast<const float4*>(parts.sums + (first + i) * kHeadDim + column);
    o = {o.x + weight * v.x, o.y + weight * v.y, o.z + weight * v.z, o.w + weight * v.w};
  }
  const float inverse = 1.0f / sum;
  const auto* angles = reinterpret_cast<const float2*>(p.angles + int64_t{token} * kRopeDim);
  const uint2 out{FinishPair({o.x * inverse, o.y * inverse}, column, angles),
                  FinishPair({o.z * inverse, o.w * inverse}, column + 2, angles)};
  const int64_t offset = Bf16TileOffset(token, int64_t{head} * kHeadDim + column, p.out.row_groups);
  *reinterpret_cast<uint2*>(reinterpret_cast<uint8_t*>(p.out.values) + offset) = out;
}

// A step of few heads and keys over all tokens: how many splits a token then has; else 0. As for 64
// heads, so that a rank that has some of them adds up as one that has all.
int DecodeSplits(const CudaSparseAttentionParams& p) {
  const int blocks = p.batch.num_tokens * (kHeadTile / kDecodeHeads);
  int keys = kWindow;
  if (p.ratio == 4) keys += p.topk;
  if (p.ratio == 128) keys += p.batch.max_blocks * p.compressed.entries_per_page;
  int splits = kMaxDecodeSplits;
  while (splits > 1 && blocks * splits > kTargetBlocks) splits /= 2;
  // Block tables are up to twice as wide as the context needs: then a tile more may be counted.
  const int max_tiles = kMaxDecodeTiles + (p.ratio == 128 ? 1 : 0);
  const bool few = blocks * splits <= kTargetBlocks && keys <= splits * max_tiles * kKeyTile;
  // No more than give every split a tile: parts cost time to add up.
  while (splits > 1 && keys <= splits / 2 * kKeyTile) splits /= 2;
  return few ? splits : 0;
}

void LaunchDecode(const CudaSparseAttentionParams& p, int splits, device::Stream& stream) {
  const int tiles = (p.num_heads + kDecodeHeads - 1) / kDecodeHeads;
  device::CheckCuda(cudaFuncSetAttribute(DecodeAttentionKernel,
                                         cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                    __FILE__, __LINE__);
  LaunchClusters(DecodeAttentionKernel, dim3(splits, tiles, p.batch.num_tokens), splits,
                 kDecodeThreads, kDecodeSharedBytes, stream, p);
}

int HeadTiles(int num_heads) { return (num_heads + kHeadTile - 1) / kHeadTile; }

}  // namespace

int64_t SparseAttentionWorkspaceBytes(int num_heads) {
  // A split step has at most kTargetBlocks parts of at most 64 heads.
  const int64_t heads = std::min(num_heads, kHeadTile);
  return kTargetBlocks * heads * (kHeadDim * 4 + int64_t{sizeof(float2)});
}

void Launch(const CudaSparseAttentionParams& p, device::Stream& stream) {
  if (p.batch.num_tokens == 0) return;
  const int decode_splits = p.prefill ? 0 : DecodeSplits(p);
  if (decode_splits > 0) return LaunchDecode(p, decode_splits, stream);
  const int head_tiles = HeadTiles(p.num_heads);
  const int blocks = p.batch.num_tokens * head_tiles;
  const int max_splits = p.prefill ? 1 : std::max(1, kTargetBlocks / blocks);
  Parts parts;
  parts.sums = p.workspace;
  parts.scales = reinterpret_cast<float2*>(p.workspace + int64_t{p.batch.num_tokens} * p.num_heads *
                                                             max_splits * kHeadDim);
  LaunchKernel(SparseAttentionKernel, dim3(blocks, max_splits), kAttentionThreads,
               kAttentionSharedBytes, stream, p, head_tiles, parts);
  if (max_splits == 1) return;
  LaunchKernel(CombineKernel, dim3(p.num_heads, p.batch.num_tokens), kCombineThreads, 0, stream, p,
               parts, max_splits);
}

}  // namespace fathom::kernels
