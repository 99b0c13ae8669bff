// The phases of attention of steps of few tokens (attention_decode.cuh, attention_cluster.cuh):
// what a block does with the queries of 8, 16 or 32 heads and a tile of 64 or 80 keys, of each of
// which four threads fetch a quarter. Keys (in shared memory as BF16) are the rows of mma, heads
// its columns; a warp scores 16 keys over half the columns, turns the scores of a head in eight
// into probabilities, and adds up 64 output columns. Device code only.
#pragma once

#include "kernels/mma.cuh"
#include "kernels/sm90.cuh"
#include "kernels/sparse_attention/head_rows.cuh"
#include "kernels/sparse_attention/key_rows.cuh"

namespace fathom::kernels {

// Warps beyond these score only.
inline constexpr int kHeadWarps = 8;

template <int kHeads, int kKeys>
struct DecodeShared {
  uint8_t keys[kKeys * kHeadDim * 2];
  uint8_t q[kHeads * kHeadDim * 2];  // of 8 heads: column blocks of [8 heads, 64], swizzled
  alignas(16) float scores[2][kHeads][kKeys + 4];  // of half the columns each
  uint32_t p[kHeads][kKeys / 2 + 4];               // pairs
  alignas(16) float rescale[kHeads];
};

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
// Phases are a __syncthreads() apart. kOneTile: there is no other tile.
template <int kHeads, int kKeys, bool kOneTile>
class DecodeTile {
 public:
  static constexpr int kThreads = 4 * kKeys;

 protected:
  using Shared = DecodeShared<kHeads, kKeys>;
  static constexpr int kTiles = kHeads / 8;
  static constexpr int kHeadLanes = 32 / kTiles;
  static constexpr int kKeyRows = kKeys / 16;
  static constexpr float kScale = 0.044194173824159216f;  // 512^-0.5
  static constexpr float kNothing = -__builtin_huge_valf();

  __device__ DecodeTile(const CudaSparseAttentionParams& params, Shared& shared, int token,
                        int first_head)
      : p_(params),
        s_(shared),
        token_(token),
        first_head_(first_head),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  // The key that the thread fetches a quarter of, and which.
  __device__ static int key_row() { return static_cast<int>(threadIdx.x) / 4; }
  __device__ static int key_lane() { return static_cast<int>(threadIdx.x) % 4; }
  __device__ uint32_t tile() const { return SharedAddress(s_.keys); }
  __device__ bool has_heads() const {
    return kThreads > kHeadWarps * 32 ? warp_ < kHeadWarps : true;
  }

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
  // The same of words, where all of the warp's have the number.
  __device__ bool IsTold(uint4 (&q)[kTiles][2], uint32_t number) const {
    const int head = first_head_ + prepared_head();
    const uint2* in = p_.words.q + (int64_t{token_} * p_.num_heads + head) * (kHeadDim / 2);
    bool there = true;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      uint4 low{0, number, 0, number}, high = low;
      const uint2* words = in + (i % 2 * 32 + chunk(i / 2)) * 4;
      if (head < p_.num_heads) low = LoadTwoNumbered(words), high = LoadTwoNumbered(words + 2);
      q[i / 2][i % 2] = {low.x, low.z, high.x, high.z};
      there = there && HaveNumber(low, number) && HaveNumber(high, number);
    }
    return __all_sync(0xffffffffu, there);
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
  __device__ void Score() {
    const uint32_t q = SharedAddress(s_.q);
    const uint32_t key = warp_ % kKeyRows * 16 + lane_ % 16;
    const uint32_t half = warp_ / kKeyRows, group = lane_ / 8;
    float d[kTiles][2][4] = {};
#pragma unroll((kOneTile ? 8 : 4) / kTiles)  // all at once do not fit beside the next tile's keys
    for (uint32_t k = 0; k < kHeadDim / 2 / 32; ++k) {
      const uint32_t chunk = half * 32 + k * 4;  // of 8 columns
      uint32_t a[2][4];
      LoadMatrices(a[0], tile() + ChunkOffset<kKeys>(key, chunk + group / 2));
      LoadMatrices(a[1], tile() + ChunkOffset<kKeys>(key, chunk + 2 + group / 2));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        uint32_t b[4];
        LoadMatrices(b, q + QueryChunk(8 * t + lane_ % 8, chunk + group));
        WarpMultiply(d[t][0], a[0], b[0], b[1]);
        WarpMultiply(d[t][1], a[1], b[2], b[3]);
      }
    }
    const int row = warp_ % kKeyRows * 16 + lane_ / 4;
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
  // l + kHeadLanes * r would have, were they one after another. Of 80 keys the last pairs count
  // with the first ones. `count` keys are left, those past them count nothing.
  __device__ void MakeProbabilities(int count) {
    constexpr int kRuns = kTiles + (kKeys > 64 ? 1 : 0);
    const int head = scored_head();
    float2 x[kRuns];
    float max = max_;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      x[r] = {kNothing, kNothing};
      if (r == kTiles && lane_ % kHeadLanes >= (kKeys - 64) / 2) continue;
      const int key = 2 * chunk(r);
      const float2 a = *reinterpret_cast<const float2*>(s_.scores[0][head] + key);
      const float2 b = *reinterpret_cast<const float2*>(s_.scores[1][head] + key);
      if (key < count) x[r].x = __fmul_rn(a.x + b.x, kScale * kLog2E);
      if (key + 1 < count) x[r].y = __fmul_rn(a.y + b.y, kScale * kLog2E);
      max = fmaxf(max, fmaxf(x[r].x, x[r].y));
    }
    max = WarpMax<kHeadLanes>(max);
    float sums[kTiles];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if (r == kTiles && lane_ % kHeadLanes >= (kKeys - 64) / 2) continue;
      const float p = exp2f(x[r].x - max), q = exp2f(x[r].y - max);
      s_.p[head][chunk(r)] = PackBf16(p, q);
      r < kTiles ? sums[r % kTiles] = p + q : sums[0] += p + q;
    }
    const float sum = WarpSum<kHeadLanes>(SumOfRuns(sums));
    if constexpr (kOneTile) {
      sum_ = sum;
    } else {
      const float rescale = exp2f(max_ - max);
      if (lane_ % kHeadLanes == 0) s_.rescale[head] = rescale;
      sum_ = fmaf(sum_, rescale, sum);
    }
    max_ = max;
  }

  // 64 columns of the heads. Of keys beyond `count` there are no probabilities.
  __device__ void AddValues(int count) {
    uint32_t b[kTiles][kKeyRows][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint32_t* p = s_.p[8 * t + lane_ / 4] + lane_ % 4;
#pragma unroll
      for (int k = 0; k < kKeyRows; ++k) b[t][k][0] = p[k * 8], b[t][k][1] = p[k * 8 + 4];
      if constexpr (!kOneTile) {
        const float2 rescale = *reinterpret_cast<const float2*>(s_.rescale + 8 * t + lane_ % 4 * 2);
#pragma unroll
        for (float (&o)[4] : o_[t]) {
          o[0] *= rescale.x, o[1] *= rescale.y, o[2] *= rescale.x, o[3] *= rescale.y;
        }
      }
    }
    const uint32_t key = lane_ % 8 + lane_ / 16 * 8;
#pragma unroll
    for (uint32_t k = 0; k < kKeyRows; ++k) {
      if (kOneTile && static_cast<int>(k * 16) >= count) break;
#pragma unroll
      for (uint32_t m = 0; m < 4; ++m) {
        uint32_t a[4];
        LoadMatricesTransposed(
            a, tile() + ChunkOffset<kKeys>(k * 16 + key, warp_ * 8 + m * 2 + lane_ / 8 % 2));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) WarpMultiply(o_[t][m], a, b[t][k][0], b[t][k][1]);
      }
    }
  }

  const CudaSparseAttentionParams& p_;
  Shared& s_;
  int token_, first_head_;
  int warp_, lane_;
  float max_ = kNothing, sum_ = 0;  // of scored_head
  float o_[kTiles][4][4] = {};      // 4 times 16 columns of the warp's 64, heads as mma has them
};

}  // namespace fathom::kernels
