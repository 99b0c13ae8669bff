// Attention of steps of few tokens: latency counts, so a token's work is spread thin. A block takes
// 8, 16 or 32 heads and a split of the keys, 64 at a time: keys (in shared memory as BF16) are the
// rows of mma, heads its columns; a warp scores 16 keys over half the columns, turns the scores of
// a head in eight into probabilities, and adds up 64 output columns. A tile is fetched while the
// one before is added up, the first before the wait where earlier launches than the last wrote it.
// A few splits of a token's heads are a cluster, which adds its parts through distributed shared
// memory in the order of its ranks; many leave their parts to CombineKernel, whose blocks start
// beside them. Device code only.
#pragma once

#include "kernels/aligned_shared.cuh"
#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/sm90.cuh"
#include "kernels/sparse_attention/head_rows.cuh"
#include "kernels/sparse_attention/key_rows.cuh"

namespace fathom::kernels {

inline constexpr int kDecodeThreads = 256;
inline constexpr int kMaxClusterSplits = 4;
inline constexpr int kSplitGranule = 8;  // keys

// The splits' parts of each head: 512 sums; their maximum (log2 units) and sum of p.
struct AttentionParts {
  float* sums = nullptr;     // [num_tokens, num_heads, max_splits, 512]
  float2* scales = nullptr;  // [num_tokens, num_heads, max_splits]
  int max_splits = 0;
  int least_keys = 0;  // of a decode's splits (KeysOfSplit); 0: KeySplits says how many there are
};

// Keys of each of at most `splits` splits of a token, at least `least` of them.
__device__ __forceinline__ int KeysOfSplit(int num_keys, int splits, int least) {
  const int each = (num_keys + splits - 1) / splits;
  return max((each + kSplitGranule - 1) / kSplitGranule * kSplitGranule, least);
}

template <int kHeads>
struct DecodeShared {
  uint8_t keys[kKeyTileBytes];       // the block's part of the sums at the end
  uint8_t q[kHeads * kHeadDim * 2];  // of 8 heads: column blocks of [8 heads, 64], swizzled
  alignas(16) float scores[2][kHeads][kKeyTile + 4];  // of half the columns each
  uint32_t p[kHeads][kKeyTile / 2 + 4];               // pairs
  alignas(16) float rescale[kHeads];
  float2 part[kHeads];                       // maximum (log2 units), sum
  float weights[kHeads][kMaxClusterSplits];  // of the cluster's parts
};
template <int kHeads>
inline constexpr size_t kDecodeSharedBytes = sizeof(DecodeShared<kHeads>) + 1024;

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

template <int kHeads>
class DecodeAttention {
 public:
  using Shared = DecodeShared<kHeads>;

  __device__ DecodeAttention(const CudaSparseAttentionParams& params, Shared& shared,
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
    // The next key's entry and page are read ahead of its bytes.
    int entry = 0, page = 0;
    const auto locate = [&](int i) {
      const int k = first + i * kKeyTile + row;
      if (k < end) entry = keys_.Entry(k), page = keys_.Page(k, entry);
    };
    const auto fetch = [&](int i) {
      const int k = first + i * kKeyTile + row;
      key.Fetch(k < end ? keys_.Bytes(k, entry, page) : KeyBytes{}, lane);
    };
    // Before the wait: what the last launch has not written, and all that can be done with it.
    const bool early = first + row < keys_.num_early();
    const AngleQuad angles = LoadAngles();
    const int head = first_head_ + warp_;
    sink_ = head < p_.num_heads ? p_.sink[head] : 0;
    // A selection lets this launch start behind its own wait, and so behind the queries.
    const bool queries_early = p_.ratio == 4;
    uint4 q[kTiles][2];
#pragma unroll 1  // instructions that run once are slow
    for (int after = 0; after < 2; ++after) {
      if (after == 1) {
        WaitForPredecessor();
        AllowSuccessor();
      }
      const bool prepare = (after == 0) == queries_early;
      if (prepare) LoadHead(q);
      if (early == (after == 0)) {
        locate(0);
        fetch(0);
        key.Place(tile, row, lane);
      }
      if (after == 1) locate(1);
      if (prepare) PrepareHead(q, angles);
    }
    for (int i = 0; i < num_tiles; ++i) {
      if (i > 0) {
        __syncthreads();  // all are done with the tile before
        key.Place(tile, row, lane);
      }
      if (i + 1 < num_tiles) {  // on its way while this tile is added up
        fetch(i + 1);
        locate(i + 2);
      }
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
    for (int i = threadIdx.x; i < kHeads * pairs; i += kDecodeThreads) {
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

  // This block's part, where another kernel adds the parts up.
  __device__ void WritePart(const AttentionParts& parts, int split) const {
    __syncthreads();
    const auto* from = reinterpret_cast<const float*>(s_.keys);
    for (int i = threadIdx.x; i < kHeads * kHeadDim / 4; i += kDecodeThreads) {
      const int h = i / (kHeadDim / 4), column = i % (kHeadDim / 4) * 4;
      if (first_head_ + h >= p_.num_heads) break;
      const int64_t head = int64_t{token_} * p_.num_heads + first_head_ + h;
      const int64_t part = head * parts.max_splits + split;
      *reinterpret_cast<float4*>(parts.sums + part * kHeadDim + column) =
          *reinterpret_cast<const float4*>(from + PartOffset(h, column));
      if (column == 0) parts.scales[part] = s_.part[h];
    }
  }

 private:
  static constexpr int kTiles = kHeads / 8;
  static constexpr int kHeadLanes = 32 / kTiles;
  static constexpr float kScale = 0.044194173824159216f;  // 512^-0.5
  static constexpr float kNothing = -__builtin_huge_valf();

  __device__ static int PartOffset(int head, int column) { return head * (kHeadDim + 4) + column; }

  struct AngleQuad {
    float2 angles[4];
  };
  __device__ AngleQuad LoadAngles() const {
    AngleQuad quad = {};
    const auto* angles = reinterpret_cast<const float2*>(p_.angles + int64_t{token_} * kRopeDim);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (rope_chunk() >= 0) quad.angles[i] = angles[rope_chunk() * 4 + i];
    }
    return quad;
  }
  // kTiles heads of the warp at once: norm, rope, into shared memory. Of a head each of kHeadLanes
  // lanes has every kHeadLanes-th chunk of eight columns: of run r, which NormHead names, two.
  __device__ int prepared_head() const { return warp_ * kTiles + lane_ / kHeadLanes; }
  __device__ int chunk(int run) const { return run * kHeadLanes + lane_ % kHeadLanes; }
  // Whose probabilities the lane makes: four heads of a warp are four apart, for the banks.
  __device__ int scored_head() const {
    return kTiles == 4 ? warp_ / 4 * 16 + warp_ % 4 + lane_ / 8 * 4 : prepared_head();
  }
  // Which of the eight chunks that are rotated is the lane's last one; negative: none.
  __device__ int rope_chunk() const { return lane_ % kHeadLanes - (kHeadLanes - 8); }
  __device__ void LoadHead(uint4 (&q)[kTiles][2]) const {
    const int head = first_head_ + prepared_head();
    const auto* in =
        reinterpret_cast<const uint4*>(p_.q + (int64_t{token_} * p_.num_heads + head) * kHeadDim);
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      q[r][0] = q[r][1] = {0, 0, 0, 0};
      if (head < p_.num_heads) q[r][0] = in[chunk(r)], q[r][1] = in[32 + chunk(r)];
    }
  }
  __device__ void PrepareHead(const uint4 (&in)[kTiles][2], const AngleQuad& quad) {
    uint32_t row[kTiles][8];
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      const uint4 a = in[r][0], b = in[r][1];
      row[r][0] = a.x, row[r][1] = a.y, row[r][2] = a.z, row[r][3] = a.w;
      row[r][4] = b.x, row[r][5] = b.y, row[r][6] = b.z, row[r][7] = b.w;
    }
    NormHead(row, p_.norm_eps);
    if (rope_chunk() >= 0) {
      uint32_t* const last = row[kTiles - 1] + 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) last[i] = RotateBf16(last[i], quad.angles[i]);
    }
    const uint32_t q = SharedAddress(s_.q);
    const int head = prepared_head();
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      const auto& x = row[r];
      StoreShared(q + QueryChunk(head, chunk(r)), {x[0], x[1], x[2], x[3]});
      StoreShared(q + QueryChunk(head, 32 + chunk(r)), {x[4], x[5], x[6], x[7]});
    }
  }
  __device__ static uint32_t QueryChunk(uint32_t head, uint32_t chunk) {
    return head / 8 * (8 * kHeadDim * 2) + chunk / 8 * 1024 + head % 8 * 128 +
           ((chunk % 8) ^ (head % 8)) * 16;
  }

  // 16 keys over half the columns.
  __device__ void Score(uint32_t tile) {
    const uint32_t q = SharedAddress(s_.q);
    const uint32_t key = warp_ % 4 * 16 + lane_ % 16;
    const uint32_t half = warp_ / 4, group = lane_ / 8;
    float d[kTiles][2][4] = {};
#pragma unroll(4 / kTiles)  // all at once do not fit beside the next tile's keys
    for (uint32_t k = 0; k < kHeadDim / 2 / 32; ++k) {
      const uint32_t chunk = half * 32 + k * 4;  // of 8 columns
      uint32_t a[2][4];
      LoadMatrices(a[0], tile + ChunkOffset(key, chunk + group / 2));
      LoadMatrices(a[1], tile + ChunkOffset(key, chunk + 2 + group / 2));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        uint32_t b[4];
        LoadMatrices(b, q + QueryChunk(8 * t + lane_ % 8, chunk + group));
        WarpMultiply(d[t][0], a[0], b[0], b[1]);
        WarpMultiply(d[t][1], a[1], b[2], b[3]);
      }
    }
    const int row = warp_ % 4 * 16 + lane_ / 4;
    auto& scores = s_.scores[half];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int head = 8 * t + lane_ % 4 * 2 + e % 2;
        scores[head][row + e / 2 * 8] = d[t][0][e] + d[t][1][e];
      }
    }
  }

  // kTiles heads of the warp at once, as when they are prepared: the lane's run r is what lane
  // l + kHeadLanes * r would have, were they one after another. `count` keys are left, those past
  // them count nothing.
  __device__ void MakeProbabilities(int count) {
    const int head = scored_head();
    float2 x[kTiles];
    float max = max_;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      const int key = 2 * chunk(r);
      const float2 a = *reinterpret_cast<const float2*>(s_.scores[0][head] + key);
      const float2 b = *reinterpret_cast<const float2*>(s_.scores[1][head] + key);
      x[r].x = key < count ? (a.x + b.x) * (kScale * kLog2E) : kNothing;
      x[r].y = key + 1 < count ? (a.y + b.y) * (kScale * kLog2E) : kNothing;
      max = fmaxf(max, fmaxf(x[r].x, x[r].y));
    }
    max = WarpMax<kHeadLanes>(max);
    float sums[kTiles];
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      const float p = exp2f(x[r].x - max), q = exp2f(x[r].y - max);
      s_.p[head][chunk(r)] = PackBf16(p, q);
      sums[r] = p + q;
    }
    const float rescale = exp2f(max_ - max);
    if (lane_ % kHeadLanes == 0) s_.rescale[head] = rescale;
    sum_ = sum_ * rescale + WarpSum<kHeadLanes>(SumOfRuns(sums));
    max_ = max;
  }

  // 64 columns of the heads.
  __device__ void AddValues(uint32_t tile) {
    uint32_t b[kTiles][kKeyTile / 16][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float2 rescale = *reinterpret_cast<const float2*>(s_.rescale + 8 * t + lane_ % 4 * 2);
      const uint32_t* p = s_.p[8 * t + lane_ / 4] + lane_ % 4;
#pragma unroll
      for (int k = 0; k < kKeyTile / 16; ++k) b[t][k][0] = p[k * 8], b[t][k][1] = p[k * 8 + 4];
#pragma unroll
      for (float (&o)[4] : o_[t]) {
        o[0] *= rescale.x, o[1] *= rescale.y, o[2] *= rescale.x, o[3] *= rescale.y;
      }
    }
    const uint32_t key = lane_ % 8 + lane_ / 16 * 8;
#pragma unroll
    for (uint32_t m = 0; m < 4; ++m) {
#pragma unroll
      for (uint32_t k = 0; k < kKeyTile / 16; ++k) {
        uint32_t a[4];
        LoadMatricesTransposed(a,
                               tile + ChunkOffset(k * 16 + key, warp_ * 8 + m * 2 + lane_ / 8 % 2));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) WarpMultiply(o_[t][m], a, b[t][k][0], b[t][k][1]);
      }
    }
  }

  // Over the keys, which are no longer needed.
  __device__ void KeepPart() {
    auto* sums = reinterpret_cast<float*>(s_.keys);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int head = 8 * t + lane_ % 4 * 2 + e % 2;
          sums[PartOffset(head, warp_ * 64 + m * 16 + lane_ / 4 + e / 2 * 8)] = o_[t][m][e];
        }
      }
    }
    if (lane_ % kHeadLanes == 0) s_.part[scored_head()] = {max_, sum_};
  }

  // The warp's head: what each part is multiplied with.
  __device__ void WeighParts(int splits) {
    static_assert(kHeads == 8);
    float2 part{kNothing, 0};
    if (lane_ < splits) part = LoadPairFromBlock(s_.part + warp_, lane_);
    const float max = WarpMax(part.x);
    const float weight = exp2f(part.x - max);
    const float sum = WarpSum(weight * part.y) + exp2f(sink_ * kLog2E - max);
    if (lane_ < splits) s_.weights[warp_][lane_] = weight / sum;
  }

  const CudaSparseAttentionParams& p_;
  Shared& s_;
  const TokenKeys& keys_;
  int token_, first_head_;
  int warp_, lane_;
  float sink_;                      // of the warp's head, where a block has 8
  float max_ = kNothing, sum_ = 0;  // of scored_head
  float o_[kTiles][4][4] = {};      // 4 times 16 columns of the warp's 64, heads as mma has them
};

// The splits of a token and kHeads of its heads are a cluster, or leave parts to CombineKernel.
// Up to 16 heads have registers beside a block of the query products.
template <int kHeads, bool kClusters>
__global__ void __maxnreg__(kHeads == 8    ? 128
                            : kHeads == 16 ? 144
                                           : 255)
    DecodeAttentionKernel(const __grid_constant__ CudaSparseAttentionParams p,
                          AttentionParts parts) {
  extern __shared__ uint8_t dynamic[];
  auto& shared = AlignedShared<DecodeShared<kHeads>>(dynamic);
  const int split = blockIdx.x, splits = gridDim.x, token = blockIdx.z;
  const TokenKeys keys(p, token);
  if (keys.is_padding()) {
    WaitForPredecessor();
    AllowSuccessor();
    return;
  }
  keys.PrefetchTable();
  const int each = KeysOfSplit(keys.size(), splits, parts.least_keys);
  const int first = min(split * each, keys.size()), end = min(first + each, keys.size());
  if (!kClusters && first == end) return;  // the launch ends with others, which wait
  DecodeAttention<kHeads> attention(p, shared, keys, token, static_cast<int>(blockIdx.y) * kHeads);
  attention.Run(first, end);
  if constexpr (kClusters) {
    attention.Combine(splits);
  } else {
    attention.WritePart(parts, split);
  }
}

}  // namespace fathom::kernels
