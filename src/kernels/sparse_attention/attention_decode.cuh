// Attention of steps of few tokens: latency counts, so a token's work is spread thin. A block takes
// 8 heads and a split of the keys, 64 at a time: keys (in shared memory as BF16) are the rows of
// mma, heads its columns; a warp scores 16 keys over half the columns, turns one head's scores into
// probabilities, and adds up 64 output columns. The splits of a token and its 8 heads are a
// cluster, which adds its parts through distributed shared memory in the order of its ranks. A tile
// is fetched while the one before is added up, the first before the wait where earlier launches
// than the last wrote it. Device code only.
#pragma once

#include "kernels/aligned_shared.cuh"
#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/sm90.cuh"
#include "kernels/sparse_attention/head_rows.cuh"
#include "kernels/sparse_attention/key_rows.cuh"

namespace fathom::kernels {

inline constexpr int kDecodeThreads = 256;
inline constexpr int kDecodeHeads = 8;       // of a block, one a warp at times
inline constexpr int kMaxDecodeSplits = 16;  // blocks of a cluster
inline constexpr int kSplitGranule = 8;      // keys
// Of keys a split: with more, attention_sm90.cuh is faster.
inline constexpr int kMaxDecodeTiles = 2;

struct DecodeShared {
  uint8_t keys[kKeyTileBytes];             // the block's part of the sums at the end
  uint8_t q[kDecodeHeads * kHeadDim * 2];  // column blocks of [8 heads, 64], swizzled
  alignas(16) float scores[2][kDecodeHeads][kKeyTile + 4];  // of half the columns each
  uint32_t p[kDecodeHeads][kKeyTile / 2 + 4];               // pairs
  alignas(16) float rescale[kDecodeHeads];
  float2 part[kDecodeHeads];                      // maximum (log2 units), sum
  float weights[kDecodeHeads][kMaxDecodeSplits];  // of the cluster's parts
};
inline constexpr size_t kDecodeSharedBytes = sizeof(DecodeShared) + 1024;

__device__ __forceinline__ void LoadMatrices(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}
// The pair at this block's address `p` in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ float2 LoadPairFromBlock(const float2* p, uint32_t rank) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(AddressInBlock(p, rank))
               : "memory");
  return value;
}

class DecodeAttention {
 public:
  __device__ DecodeAttention(const CudaSparseAttentionParams& params, DecodeShared& shared,
                             const TokenKeys& keys, int token, int first_head)
      : p_(params),
        s_(shared),
        keys_(keys),
        token_(token),
        first_head_(first_head),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  // Keys [first, end) of the token: this block's part of the sums.
  __device__ void Run(int first, int end) {
    const int num_tiles = (end - first + kKeyTile - 1) / kKeyTile;
    const int row = static_cast<int>(threadIdx.x) / 4, lane = static_cast<int>(threadIdx.x) % 4;
    const uint32_t tile = SharedAddress(s_.keys);
    KeyRow key;
    const auto fetch = [&](int i) { key.Fetch(BytesOf(first + i * kKeyTile + row, end), lane); };
    // Before the wait: what the last launch has not written, and all that can be done with it.
    const bool early = first + row < keys_.num_early();
    const AngleQuad angles = LoadAngles();
    const int head = first_head_ + warp_;
    sink_ = head < p_.num_heads ? p_.sink[head] : 0;
    uint4 q[2];
#pragma unroll 1  // instructions that run once are slow
    for (int after = 0; after < 2; ++after) {
      if (after == 1) {
        WaitForPredecessor();
        AllowSuccessor();
        LoadHead(q);
      }
      if (early == (after == 0)) {
        fetch(0);
        key.Place(tile, row, lane);
      }
    }
    PrepareHead(q, angles);
    for (int i = 0; i < num_tiles; ++i) {
      if (i > 0) {
        __syncthreads();  // all are done with the tile before
        key.Place(tile, row, lane);
      }
      if (i + 1 < num_tiles) fetch(i + 1);  // on its way while this tile is added up
      __syncthreads();
      Score(tile);
      __syncthreads();
      MakeProbabilities(end - first - i * kKeyTile);
      __syncthreads();
      AddValues(tile);
    }
    __syncthreads();
    KeepPart();
  }

  // Adds up the parts of the cluster: this block 1 / splits of the columns.
  __device__ void Combine(int splits) {
    ClusterSync();
    const int rank = static_cast<int>(ClusterRank());
    WeighParts(splits);
    __syncthreads();
    const int pairs = kHeadDim / 2 / splits;  // of a head
    const auto* angles = reinterpret_cast<const float2*>(p_.angles + int64_t{token_} * kRopeDim);
    for (int i = threadIdx.x; i < kDecodeHeads * pairs; i += kDecodeThreads) {
      const int h = i / pairs, column = 2 * (rank * pairs + i % pairs);
      if (first_head_ + h >= p_.num_heads) break;
      const auto* sums = reinterpret_cast<const float2*>(s_.keys) + PartOffset(h, column) / 2;
      float2 o{0, 0};
#pragma unroll 8
      for (int r = 0; r < splits; ++r) {
        const float2 v = LoadPairFromBlock(sums, r);
        const float weight = s_.weights[h][r];
        o = {fmaf(weight, v.x, o.x), fmaf(weight, v.y, o.y)};
      }
      const int64_t offset =
          Bf16TileOffset(token_, int64_t{first_head_ + h} * kHeadDim + column, p_.out.row_groups);
      *reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(p_.out.values) + offset) =
          FinishPair(o, column, angles);
    }
    ClusterSync();  // no block leaves while another reads its part
  }

 private:
  static constexpr float kScale = 0.044194173824159216f;  // 512^-0.5
  static constexpr float kNothing = -__builtin_huge_valf();

  __device__ static int PartOffset(int head, int column) { return head * (kHeadDim + 4) + column; }

  __device__ KeyBytes BytesOf(int key, int end) const {
    return key < end ? keys_.Bytes(key, keys_.Entry(key)) : KeyBytes{};
  }

  struct AngleQuad {
    float2 angles[4];
  };
  __device__ AngleQuad LoadAngles() const {
    AngleQuad quad = {};
    const auto* angles = reinterpret_cast<const float2*>(p_.angles + int64_t{token_} * kRopeDim);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (lane_ >= 24) quad.angles[i] = angles[(lane_ - 24) * 4 + i];
    }
    return quad;
  }
  // The warp's head, as LoadHead brings it: norm, rope, into shared memory.
  __device__ void LoadHead(uint4 (&q)[2]) const {
    const int head = first_head_ + warp_;
    q[0] = q[1] = {0, 0, 0, 0};
    if (head >= p_.num_heads) return;
    const auto* in =
        reinterpret_cast<const uint4*>(p_.q + (int64_t{token_} * p_.num_heads + head) * kHeadDim);
    q[0] = in[lane_], q[1] = in[32 + lane_];
  }
  __device__ void PrepareHead(const uint4 (&in)[2], const AngleQuad& quad) {
    uint32_t row[8] = {in[0].x, in[0].y, in[0].z, in[0].w, in[1].x, in[1].y, in[1].z, in[1].w};
    NormHead(row, p_.norm_eps);
    if (lane_ >= 24) {
#pragma unroll
      for (int i = 0; i < 4; ++i) row[4 + i] = RotateBf16(row[4 + i], quad.angles[i]);
    }
    const uint32_t q = SharedAddress(s_.q);
    StoreShared(q + QueryChunk(warp_, lane_), {row[0], row[1], row[2], row[3]});
    StoreShared(q + QueryChunk(warp_, 32 + lane_), {row[4], row[5], row[6], row[7]});
  }
  __device__ static uint32_t QueryChunk(uint32_t head, uint32_t chunk) {
    return chunk / 8 * 1024 + head * 128 + ((chunk % 8) ^ head) * 16;
  }

  // 16 keys over half the columns.
  __device__ void Score(uint32_t tile) {
    const uint32_t q = SharedAddress(s_.q);
    const uint32_t key = warp_ % 4 * 16 + lane_ % 16;
    const uint32_t half = warp_ / 4, group = lane_ / 8;
    float d[2][4] = {};
#pragma unroll 4  // all at once do not fit beside the next tile's keys
    for (uint32_t k = 0; k < kHeadDim / 2 / 32; ++k) {
      const uint32_t chunk = half * 32 + k * 4;  // of 8 columns
      uint32_t a[2][4], b[4];
      LoadMatrices(a[0], tile + ChunkOffset(key, chunk + group / 2));
      LoadMatrices(a[1], tile + ChunkOffset(key, chunk + 2 + group / 2));
      LoadMatrices(b, q + QueryChunk(lane_ % 8, chunk + group));
      WarpMultiply(d[0], a[0], b[0], b[1]);
      WarpMultiply(d[1], a[1], b[2], b[3]);
    }
    const int row = warp_ % 4 * 16 + lane_ / 4, head = lane_ % 4 * 2;
    auto& scores = s_.scores[half];
    scores[head][row] = d[0][0] + d[1][0], scores[head + 1][row] = d[0][1] + d[1][1];
    scores[head][row + 8] = d[0][2] + d[1][2], scores[head + 1][row + 8] = d[0][3] + d[1][3];
  }

  // The warp's head; `count` keys are left, those past them count nothing.
  __device__ void MakeProbabilities(int count) {
    const int key = 2 * lane_;
    const float2 a = *reinterpret_cast<const float2*>(s_.scores[0][warp_] + key);
    const float2 b = *reinterpret_cast<const float2*>(s_.scores[1][warp_] + key);
    const float x = key < count ? (a.x + b.x) * (kScale * kLog2E) : kNothing;
    const float y = key + 1 < count ? (a.y + b.y) * (kScale * kLog2E) : kNothing;
    const float max = fmaxf(max_, WarpMax(fmaxf(x, y)));
    const float p = exp2f(x - max), q = exp2f(y - max);
    s_.p[warp_][lane_] = PackBf16(p, q);
    const float rescale = exp2f(max_ - max);
    if (lane_ == 0) s_.rescale[warp_] = rescale;
    sum_ = sum_ * rescale + WarpSum(p + q);
    max_ = max;
  }

  // 64 columns of the 8 heads.
  __device__ void AddValues(uint32_t tile) {
    const int head = lane_ % 4 * 2;
    const float2 rescale = *reinterpret_cast<const float2*>(s_.rescale + head);
    uint32_t b[kKeyTile / 16][2];
#pragma unroll
    for (int k = 0; k < kKeyTile / 16; ++k) {
      b[k][0] = s_.p[lane_ / 4][k * 8 + lane_ % 4],
      b[k][1] = s_.p[lane_ / 4][k * 8 + 4 + lane_ % 4];
    }
    const uint32_t key = lane_ % 8 + lane_ / 16 * 8;
#pragma unroll
    for (uint32_t m = 0; m < 4; ++m) {
      o_[m][0] *= rescale.x, o_[m][1] *= rescale.y, o_[m][2] *= rescale.x, o_[m][3] *= rescale.y;
#pragma unroll
      for (uint32_t k = 0; k < kKeyTile / 16; ++k) {
        uint32_t a[4];
        LoadMatricesTransposed(a,
                               tile + ChunkOffset(k * 16 + key, warp_ * 8 + m * 2 + lane_ / 8 % 2));
        WarpMultiply(o_[m], a, b[k][0], b[k][1]);
      }
    }
  }

  // Over the keys, which are no longer needed.
  __device__ void KeepPart() {
    auto* sums = reinterpret_cast<float*>(s_.keys);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int head = lane_ % 4 * 2 + e % 2;
        sums[PartOffset(head, warp_ * 64 + m * 16 + lane_ / 4 + e / 2 * 8)] = o_[m][e];
      }
    }
    if (lane_ == 0) s_.part[warp_] = {max_, sum_};
  }

  // The warp's head: what each part is multiplied with.
  __device__ void WeighParts(int splits) {
    float2 part{kNothing, 0};
    if (lane_ < splits) part = LoadPairFromBlock(s_.part + warp_, lane_);
    const float max = WarpMax(part.x);
    const float weight = exp2f(part.x - max);
    const float sum = WarpSum(weight * part.y) + exp2f(sink_ * kLog2E - max);
    if (lane_ < splits) s_.weights[warp_][lane_] = weight / sum;
  }

  const CudaSparseAttentionParams& p_;
  DecodeShared& s_;
  const TokenKeys& keys_;
  int token_, first_head_;
  int warp_, lane_;
  float sink_ = 0, max_ = kNothing, sum_ = 0;  // of the warp's head
  float o_[4][4] = {};  // 4 times 16 columns of the warp's 64, heads as mma has them
};

__global__ void __launch_bounds__(kDecodeThreads, 2)
    DecodeAttentionKernel(const __grid_constant__ CudaSparseAttentionParams p) {
  extern __shared__ uint8_t dynamic[];
  auto& shared = AlignedShared<DecodeShared>(dynamic);
  const int split = blockIdx.x, splits = gridDim.x, token = blockIdx.z;
  const TokenKeys keys(p, token);
  if (keys.is_padding()) {
    WaitForPredecessor();
    AllowSuccessor();
    return;
  }
  keys.PrefetchTable();
  const int each =
      ((keys.size() + splits - 1) / splits + kSplitGranule - 1) / kSplitGranule * kSplitGranule;
  const int first = min(split * each, keys.size()), end = min(first + each, keys.size());
  DecodeAttention attention(p, shared, keys, token, static_cast<int>(blockIdx.y) * kDecodeHeads);
  attention.Run(first, end);
  attention.Combine(splits);
}

}  // namespace fathom::kernels
