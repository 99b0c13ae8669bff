// Attention of up to 64 heads of one token over a range of its key tiles, by one block: a
// producer warpgroup widens keys into two tiles in shared memory; two consumer warpgroups score one
// of them each (heads are the rows of wgmma), then each adds both tiles' values to its half of the
// 512 output columns, which stay in registers. Device code only.
#pragma once

#include "kernels/gemm/wgmma.cuh"
#include "kernels/sparse_attention/head_rows.cuh"
#include "kernels/sparse_attention/key_tile.cuh"
#include "kernels/sparse_attention/wgmma_values.cuh"

namespace fathom::kernels {

inline constexpr int kConsumers = 256;
inline constexpr int kAttentionThreads = kConsumers + kProducerThreads;
inline constexpr int kProbabilityBytes = kHeadTile * 128;
inline constexpr int kConsumerBarrier = 1;  // named

// Dynamic shared memory, from a multiple of 1024.
struct AttentionShared {
  uint8_t q[8 * kColumnBlockBytes];  // [64 heads, 512] like a key tile; the output at the end
  uint8_t keys[2][kKeyTileBytes];
  uint8_t p[2][kProbabilityBytes];
  KeyProducer::Shared producer;
  float max[kHeadTile];         // running, in log2 units
  float rescale[2][kHeadTile];  // of the sums before the tile
  float sum[2][kHeadTile];
  float sink[kHeadTile];
  float2 angles[kRopeDim / 2];
  uint64_t full[2], empty[2], ready[2];  // keys widened; tile free; probabilities written
  uint64_t scored[2][4];                 // the tile's maxima are known, of each warp's rows
};
inline constexpr size_t kAttentionSharedBytes = sizeof(AttentionShared) + 1024;

// The consumers' part: 8 warps, 8 head rows each, into shared memory; all loads first.
__device__ inline void LoadQueries(const CudaSparseAttentionParams& p, int token, int first_head,
                                   AttentionShared& shared) {
  constexpr int kRows = kHeadTile / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto* angles = reinterpret_cast<const float2*>(p.angles + int64_t{token} * kRopeDim);
  // Lane l has the pairs of columns 64 n + 2 l: all lanes have one that is rotated.
  uint32_t rows[kRows][1][8];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int head = first_head + r * 8 + warp;
    const auto* in =
        reinterpret_cast<const uint32_t*>(p.q + (int64_t{token} * p.num_heads + head) * kHeadDim);
#pragma unroll
    for (int n = 0; n < 8; ++n) rows[r][0][n] = head < p.num_heads ? __ldg(in + 32 * n + lane) : 0;
  }
  const float2 angle = angles[lane];
  if (threadIdx.x < kRopeDim / 2) shared.angles[threadIdx.x] = angles[threadIdx.x];
  if (threadIdx.x < kHeadTile) {
    const int head = first_head + threadIdx.x;
    shared.sink[threadIdx.x] = head < p.num_heads ? p.sink[head] : 0;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    NormHead(rows[r], p.norm_eps);
    rows[r][0][7] = RotateBf16(rows[r][0][7], angle);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint32_t offset = ChunkOffset(r * 8 + warp, 8 * n + lane / 4) + lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(shared.q + offset) = rows[r][0][n];
    }
  }
  FenceSharedForWgmma();
  NamedBarrier(kConsumerBarrier, kConsumers);
}

// One consumer warpgroup's sums over the tiles. A thread holds rows `row` and `row + 8`.
class AttentionConsumer {
 public:
  __device__ AttentionConsumer(AttentionShared& shared, int num_keys)
      : s_(shared), num_keys_(num_keys) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    group_ = threadIdx.x / 128;
    row_ = thread / 32 * 16 + lane / 4;
    quad_ = lane % 4;
#pragma unroll
    for (float& o : o_) o = 0;
  }

  // The block's tile i holds keys from `first_key + 64 i`.
  __device__ void Run(int num_tiles, int first_key) {
    for (int i = 0; i < num_tiles; i += 2) {
      const int own = i + group_;
      float tile_sum[2] = {0, 0};
      if (own < num_tiles) Scores(own, first_key + own * kKeyTile, tile_sum);
#pragma unroll 1
      for (int tile = i; tile < min(i + 2, num_tiles); ++tile) {
        BarrierWait(s_.ready + tile % 2, tile / 2 % 2);
        AddValues(tile);
#pragma unroll
        for (int r = 0; r < 2; ++r) sum_[r] += tile == own ? tile_sum[r] : 0;
      }
    }
    ShareSums();
  }

  // After Run: row r's maximum and sum, and the thread's values.
  __device__ float max(int r) const { return s_.max[row_ + 8 * r]; }
  __device__ float sum(int r) const { return s_.sum[0][row_ + 8 * r] + s_.sum[1][row_ + 8 * r]; }
  __device__ int row(int r) const { return row_ + 8 * r; }
  // Pair j of 32: columns column(j) and + 1.
  __device__ int column(int j) const { return group_ * 256 + 8 * j + 2 * quad_; }
  __device__ float2 value(int r, int j) const { return {o_[4 * j + 2 * r], o_[4 * j + 2 * r + 1]}; }
  static constexpr int kPairs = 32;
  static constexpr int kPlainPairs = 24;  // of these no column is rotated, of the others some

 private:
  static constexpr float kScale = 0.044194173824159216f;  // 512^-0.5

  __device__ void Scores(int i, int first_key, float (&tile_sum)[2]) {
    float d[32];
    BarrierWait(s_.full + i % 2, i / 2 % 2);
    const uint32_t q = SharedAddress(s_.q), keys = SharedAddress(s_.keys[i % 2]);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const uint32_t offset = k / 4 * kColumnBlockBytes + k % 4 * 32;
      Wgmma<WgmmaType::kBf16, 64>::FromSmem(d, SmemDescriptor(q + offset),
                                            SmemDescriptor(keys + offset), k != 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    if (i > 0) BarrierWait(&s_.scored[(i - 1) % 2][warp], (i - 1) / 2 % 2);
    float max[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = Maximum(d, r, i, first_key);
    WarpArrive(&s_.scored[i % 2][warp]);
#pragma unroll
    for (int r = 0; r < 2; ++r) tile_sum[r] = Probabilities(d, r, i, max[r]);
    FenceSharedForWgmma();
    BarrierArrive(s_.ready + i % 2);
  }

  // Row r's with this tile; scores past the last key become nothing.
  __device__ float Maximum(float (&d)[32], int r, int i, int first_key) {
    const int row = row_ + 8 * r;
    float tile_max = -__builtin_huge_valf();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = d[4 * j + 2 * r + e];
        if (first_key + 8 * j + 2 * quad_ + e >= num_keys_) x = -__builtin_huge_valf();
        tile_max = fmaxf(tile_max, x);
      }
    }
    tile_max = WarpMax<4>(tile_max) * (kScale * kLog2E);
    const float old_max = i == 0 ? -__builtin_huge_valf() : s_.max[row];
    const float max = fmaxf(old_max, tile_max);
    __syncwarp();  // the quad has read the old maximum
    if (quad_ == 0) {
      s_.max[row] = max;
      s_.rescale[i % 2][row] = exp2f(old_max - max);
    }
    return max;
  }

  // Row r's probabilities into shared memory; returns the thread's part of their sum.
  __device__ float Probabilities(const float (&d)[32], int r, int i, float max) {
    const int row = row_ + 8 * r;
    float sum = 0;
    const uint32_t p = SharedAddress(s_.p[i % 2]) + row * 128 + quad_ * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = exp2f(fmaf(d[4 * j + 2 * r], kScale * kLog2E, -max));
      const float b = exp2f(fmaf(d[4 * j + 2 * r + 1], kScale * kLog2E, -max));
      sum += a + b;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(p + (j ^ (row % 8)) * 16), "r"(PackBf16(a, b))
                   : "memory");
    }
    return sum;
  }

  __device__ void AddValues(int i) {
    const float scale[2] = {s_.rescale[i % 2][row_], s_.rescale[i % 2][row_ + 8]};
    sum_[0] *= scale[0], sum_[1] *= scale[1];
    if (__any_sync(0xffffffffu, scale[0] != 1.0f || scale[1] != 1.0f)) {
#pragma unroll
      for (int j = 0; j < 128; ++j) o_[j] *= scale[j / 2 % 2];
    }
    const uint32_t p = SharedAddress(s_.p[i % 2]);
    const uint32_t values = SharedAddress(s_.keys[i % 2]) + group_ * 4 * kColumnBlockBytes;
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kKeyTile / 16; ++k) {
      WgmmaValues(o_, SmemDescriptor(p + k * 32),
                  TransposedDescriptor(values + k * 2048, kColumnBlockBytes));
    }
    WgmmaCommit();
    WgmmaWait<0>();
    WarpArrive(s_.empty + i % 2);
  }

  __device__ void ShareSums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = WarpSum<4>(sum_[r]);
      if (quad_ == 0) s_.sum[group_][row_ + 8 * r] = sum;
    }
    NamedBarrier(kConsumerBarrier, kConsumers);
  }

  AttentionShared& s_;
  int num_keys_;
  int group_, row_, quad_;
  float sum_[2] = {0, 0};
  float o_[128];
};

}  // namespace fathom::kernels
