// Attention of one token over so many keys that a block for each tile of them would leave more
// parts than can be added up quickly. All multiprocessors work on it in two phases: a block scores
// a tile of 64 keys for 64 heads and tells the others its probabilities; when all are there, it
// adds up the values of a group of tiles in one slice of 64 columns. So there is a part for each
// group, not for each tile. A tile's probabilities are relative to its maxima rounded up to whole
// powers of two, so that they are brought to another tile's exactly. Blocks wait for each other:
// they all run at once. All of it runs once, when instructions take longer to come than to do, so
// what can be a loop is one, over data that has been copied to shared memory. Device code only.
#pragma once

#include "kernels/aligned_shared.cuh"
#include "kernels/gemm/wgmma.cuh"
#include "kernels/launch.cuh"
#include "kernels/sm90.cuh"
#include "kernels/sparse_attention/attention_decode.cuh"
#include "kernels/sparse_attention/head_rows.cuh"
#include "kernels/sparse_attention/key_rows.cuh"
#include "kernels/sparse_attention/wgmma_values.cuh"

namespace fathom::kernels {

inline constexpr int kTwoPhaseThreads = 512;
inline constexpr int kSlices = 8;      // of 64 columns, as a tile's column blocks
inline constexpr int kGroupTiles = 9;  // of a block in the second phase
inline constexpr int kGroupKeys = kGroupTiles * kKeyTile;
inline constexpr int kScoringThreads = 256;  // two warpgroups, half of a tile's keys each
inline constexpr int kScoringBarrier = 1, kValuesBarrier = 2, kShareBarrier = 3;  // named
inline constexpr int kShareTiles = (kGroupTiles + 3) / 4;  // tiles of a warpgroup

inline constexpr int kStepBytes = 128 * sizeof(uint4);  // A registers of one product

// In device memory, zero between launches.
struct TwoPhaseCounters {
  int32_t tiles;   // whose probabilities are there
  int32_t passed;  // blocks that have seen them all
};

// A tile of 64 keys and 64 heads, as blocks tell each other.
struct TileProbabilities {
  uint4 p[kKeyTile / 16][128];  // of 16 keys: a warpgroup's A registers, as gemm/wgmma.cuh says
  // A head's maximum (log2 units, a whole number), and its sums over half of the keys each.
  float4 scales[kHeadTile];
};

// What a warpgroup has of a group: probabilities of its tiles, then the sums of its values.
union GroupShare {
  uint4 probabilities[kShareTiles * kKeyTile / 16][128];
  float sums[kHeadTile][64 + 8];
};

struct TwoPhaseShared {
  union {
    struct {
      uint8_t keys[kKeyTileBytes];
      uint8_t queries[kKeyTileBytes];  // heads like keys
    };
    GroupShare shares[4];
  };
  uint8_t values[kGroupTiles][kColumnBlockBytes];  // and FP8 of keys on their way
  uint2 scales[kGroupKeys];
  KeyBytes group_keys[kGroupKeys];
  float max[4][kHeadTile];            // of halves of a tile; then of each warpgroup's tiles
  float probabilities[4][kHeadTile];  // their sums, likewise
};
inline constexpr size_t kTwoPhaseSharedBytes = sizeof(TwoPhaseShared) + 1024;

// 16 or 8 bytes into shared memory, without waiting; zeros where there is nothing.
__device__ __forceinline__ void CopyAhead(uint32_t to, const uint4* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAhead(uint32_t to, const uint2* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 8 : 0)
               : "memory");
}
// The thread's copies since the last call are a group.
__device__ __forceinline__ void CloseCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until all of the thread's groups but the last kPending are there.
template <int kPending>
__device__ __forceinline__ void FinishCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Block b scores tile b; in the second phase it has slice b % kSlices of group b / kSlices.
class TwoPhaseAttention {
 public:
  __device__ TwoPhaseAttention(const CudaSparseAttentionParams& params, TwoPhaseShared& shared,
                               const TokenKeys& keys, TileProbabilities* tiles, int first_head)
      : p_(params),
        s_(shared),
        keys_(keys),
        tiles_(tiles),
        first_head_(first_head),
        block_(static_cast<int>(blockIdx.x)),
        thread_(static_cast<int>(threadIdx.x)),
        num_tiles_((keys.size() + kKeyTile - 1) / kKeyTile),
        num_groups_((num_tiles_ + kGroupTiles - 1) / kGroupTiles) {}

  __device__ void Run(const AttentionParts& parts, TwoPhaseCounters* counters) {
    const int tile_key = block_ * kKeyTile + row(), entry = keys_.Entry(tile_key);
    const int page = keys_.Page(tile_key, entry);
    const int key = first_tile() * kKeyTile + thread_, last_key = key + kTwoPhaseThreads;
    const int key_page = keys_.Page(key, keys_.Entry(key));
    const bool has_last = thread_ < kGroupKeys - kTwoPhaseThreads;
    const int last_page = has_last ? keys_.Page(last_key, keys_.Entry(last_key)) : 0;
    const bool padding = p_.batch.token_seq[0] < 0;
    LoadAngles();
    if (!p_.step_is_early) WaitForPredecessor();
    const uint2 scales = CopyKeys(keys_.Bytes(tile_key, entry, page));
    s_.group_keys[thread_] = keys_.Bytes(key, keys_.Entry(key), key_page);
    if (has_last) {
      s_.group_keys[thread_ + kTwoPhaseThreads] =
          keys_.Bytes(last_key, keys_.Entry(last_key), last_page);
    }
    WaitForPredecessor();
    AllowSuccessor();
    CopyQueries();
    FinishCopies<1>();
    WidenKeys(scales);
    FinishCopies<0>();
    __syncwarp();
    PrepareQueries();
    FenceSharedForWgmma();
    __syncthreads();
    if (padding || (!scores() && !adds())) return;
    if (thread_ >= kScoringThreads) {
      if (adds()) PrepareValues(thread_ - kScoringThreads);
    } else if (scores()) {
      Score();
      NamedBarrier(kScoringBarrier, kScoringThreads);
      if (thread_ == 0) ReleaseAdd(&counters->tiles, 1);
    }
    if (!adds()) return;
    if (thread_ == 0) AwaitTiles(counters);
    __syncthreads();
    int passed = 0;  // before this block; known when the part is written
    if (thread_ == 0) passed = atomicAdd(&counters->passed, 1);
    AddValues();
    __syncthreads();
    WritePart(parts);
    // The last block to pass leaves the counters as they were.
    if (passed == num_groups_ * kSlices - 1) counters->tiles = counters->passed = 0;
  }

 private:
  static constexpr float kScale = 0.044194173824159216f;  // 512^-0.5
  static constexpr float kNothing = -__builtin_huge_valf();

  __device__ bool scores() const { return block_ < num_tiles_; }
  __device__ bool adds() const { return block_ < num_groups_ * kSlices; }
  __device__ int slice() const { return block_ % kSlices; }
  __device__ bool is_bf16() const { return slice() == kSlices - 1; }
  __device__ int first_tile() const { return block_ / kSlices * kGroupTiles; }
  __device__ int group() const { return thread_ / 128; }
  // Of wgmma's D and A: this head and the eighth after it.
  __device__ int head() const { return thread_ / 32 % 4 * 16 + thread_ % 32 / 4; }
  __device__ int quad() const { return thread_ % 4; }
  // Of eight threads a row: a head or a key, and which of the eight.
  __device__ int row() const { return thread_ / 8; }
  __device__ int lane() const { return thread_ % 8; }

  // Each thread copies the chunks of eight columns that it prepares: every eighth of a head's.
  __device__ uint32_t query() const {
    return SharedAddress(s_.queries) + ChunkOffset(row(), lane());
  }
  __device__ void CopyQueries() const {
    const int head = first_head_ + row();
    const bool exists = head < p_.num_heads;
    const __nv_bfloat16* const q = p_.q + (exists ? int64_t{head} * kHeadDim : 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      CopyAhead(query() + i * kColumnBlockBytes, reinterpret_cast<const uint4*>(q) + lane() + 8 * i,
                exists);
    }
    CloseCopies();
  }
  __device__ void LoadAngles() {
    const auto* angles = reinterpret_cast<const float4*>(p_.angles) + 2 * lane();
    angles_[0] = angles[0], angles_[1] = angles[1];
  }
  __device__ void PrepareQueries() const {
    const uint32_t scale = HeadNormScale(SumOfSquares(), p_.norm_eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t place = query() + i * kColumnBlockBytes;
      uint4 x = LoadShared(place);
      x = {MultiplyBf16(x.x, scale), MultiplyBf16(x.y, scale), MultiplyBf16(x.z, scale),
           MultiplyBf16(x.w, scale)};
      if (i == 7) {
        x = {RotateBf16(x.x, {angles_[0].x, angles_[0].y}),
             RotateBf16(x.y, {angles_[0].z, angles_[0].w}),
             RotateBf16(x.z, {angles_[1].x, angles_[1].y}),
             RotateBf16(x.w, {angles_[1].z, angles_[1].w})};
      }
      StoreShared(place, x);
    }
  }
  // Of the thread's head: a quarter of each of the warp's four heads is a row that is multiplied
  // with ones.
  __device__ float SumOfSquares() const {
    constexpr uint32_t kOnes = 0x3f803f80;
    const int lane = thread_ % 32, head = thread_ / 32 * 4 + lane % 4, quarter = lane % 16 / 4;
    float d[4] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {  // of 16 columns
      uint32_t a[4];
      LoadMatrices(a,
                   SharedAddress(s_.queries) + ChunkOffset(head, quarter * 16 + k * 2 + lane / 16));
#pragma unroll
      for (uint32_t& x : a) x = MultiplyBf16(x, x);
      WarpMultiply(d, a, kOnes, kOnes);
    }
    // Lane l has rows l / 4 and l / 4 + 8: two quarters of head l / 4 % 4.
    const float two = d[0] + d[2];
    const float sum = two + __shfl_xor_sync(0xffffffffu, two, 16);
    return __shfl_sync(0xffffffffu, sum, lane / 8 * 4);
  }

  // Likewise of a key every eighth chunk of 16 bytes. Returns its scales.
  __device__ uint2 CopyKeys(const KeyBytes& key) const {
    const bool exists = key.data != nullptr;
    const auto* data = reinterpret_cast<const uint4*>(exists ? key.data : p_.fresh) + lane();
    const uint32_t raw = SharedAddress(s_.values) + row() * kNumFp8 + lane() * 16;
#pragma unroll
    for (int n = 0; n < 5; ++n) {
      const int c = lane() + 8 * n;
      if (n == 4 && c >= kKvDataBytes / 16) break;
      if (c < kNumFp8 / 16) {
        CopyAhead(raw + n * 128, data + 8 * n, exists);
      } else {
        CopyAhead(SharedAddress(s_.keys) + ChunkOffset(row(), 56 + c - kNumFp8 / 16), data + 8 * n,
                  exists);
      }
    }
    CloseCopies();
    return exists ? __ldg(reinterpret_cast<const uint2*>(key.scales)) : uint2{0, 0};
  }
  __device__ void WidenKeys(uint2 scales) const {
    const uint32_t raw = SharedAddress(s_.values) + row() * kNumFp8, to = SharedAddress(s_.keys);
#pragma unroll 1
    for (int c = lane(); c < kNumFp8 / 16; c += 8) {
      const uint4 codes = LoadShared(raw + c * 16);
      const uint32_t factor = FactorOf(scales, c / 4);
      const uint2 a = WidenCodes(codes.x, factor), b = WidenCodes(codes.y, factor);
      const uint2 x = WidenCodes(codes.z, factor), y = WidenCodes(codes.w, factor);
      const uint4 low{a.x, a.y, b.x, b.y}, high{x.x, x.y, y.x, y.y};
      // Four lanes begin with what the others end with: eight lanes, eight places of a row.
      const int first = lane() / 4;
      StoreShared(to + ChunkOffset(row(), 2 * c + first), first == 0 ? low : high);
      StoreShared(to + ChunkOffset(row(), 2 * c + 1 - first), first == 0 ? high : low);
    }
  }

  // Half of the tile's keys, by a warpgroup.
  __device__ void Score() {
    float d[16] = {};
    const uint32_t q = SharedAddress(s_.queries);
    const uint32_t keys = SharedAddress(s_.keys) + group() * 32 * 128;
#pragma unroll 1
    for (uint32_t block = 0; block < 8 * kColumnBlockBytes; block += kColumnBlockBytes) {
      WgmmaFence();
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        Wgmma<WgmmaType::kBf16, 32>::FromSmem(d, SmemDescriptor(q + block + k * 32),
                                              SmemDescriptor(keys + block + k * 32), 1);
      }
      WgmmaCommit();
    }
    WgmmaWait<0>();
    const int first = block_ * kKeyTile + group() * 32 + 2 * quad();
    float max[2] = {kNothing, kNothing};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (first + i / 4 * 8 + i % 2 >= keys_.size()) d[i] = kNothing;
      max[i / 2 % 2] = fmaxf(max[i / 2 % 2], d[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = ceilf(WarpMax<4>(max[r]) * (kScale * kLog2E));
      if (quad() == 0) s_.max[group()][head() + 8 * r] = max[r];
    }
    NamedBarrier(kScoringBarrier, kScoringThreads);
    TileProbabilities& tile = tiles_[block_];
    float sums[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = fmaxf(max[r], s_.max[1 - group()][head() + 8 * r]);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      d[i] = exp2f(fmaf(d[i], kScale * kLog2E, -max[i / 2 % 2]));
      sums[i / 2 % 2] += d[i];
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float* const x = d + 8 * k;
      tile.p[2 * group() + k][thread_ % 128] = {PackBf16(x[0], x[1]), PackBf16(x[2], x[3]),
                                                PackBf16(x[4], x[5]), PackBf16(x[6], x[7])};
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = WarpSum<4>(sums[r]);
      if (quad() != 0) continue;
      float4& scales = tile.scales[head() + 8 * r];
      if (group() == 0) {
        scales.x = max[r], scales.y = sum;
      } else {
        scales.z = sum;
      }
    }
  }

  // The slice of the group's keys, by 256 threads, four of them a key. FP8 codes come into the
  // second half of where their tile's values will be.
  __device__ void PrepareValues(int thread) const {
    const int chunk = thread % 4, row = thread / 4;
    const uint32_t to = SharedAddress(s_.values);
    const uint32_t codes = to + kColumnBlockBytes / 2 + row * 64 + chunk * 16;
#pragma unroll 3
    for (int i = 0; i < kGroupTiles; ++i) {
      const KeyBytes key = s_.group_keys[i * kKeyTile + row];
      const bool exists = key.data != nullptr;
      const auto* data =
          reinterpret_cast<const uint4*>((exists ? key.data : p_.fresh) + slice() * 64) + chunk;
      const uint32_t tile = i * kColumnBlockBytes;
      if (is_bf16()) {
        CopyAhead(to + tile + ChunkOffset(row, chunk), data, exists);
        CopyAhead(to + tile + ChunkOffset(row, chunk + 4), data + 4, exists);
        continue;
      }
      CopyAhead(codes + tile, data, exists);
      if (chunk > 0) continue;
      CopyAhead(SharedAddress(s_.scales + i * kKeyTile + row),
                reinterpret_cast<const uint2*>(exists ? key.scales : p_.fresh), exists);
    }
    CloseCopies();
    FinishCopies<0>();
    const auto* scales = reinterpret_cast<const uint8_t*>(s_.scales + row) + slice();
    const uint32_t low = to + ChunkOffset(row, 2 * chunk);
    const uint32_t high = to + ChunkOffset(row, 2 * chunk + 1);
    uint4 next = LoadShared(codes);
#pragma unroll 1
    for (int i = 0; i < kGroupTiles && !is_bf16(); ++i) {
      const uint32_t tile = i * kColumnBlockBytes;
      const uint4 raw = next;
      NamedBarrier(kValuesBarrier, kTwoPhaseThreads - kScoringThreads);  // all have theirs
      if (i + 1 < kGroupTiles) next = LoadShared(codes + tile + kColumnBlockBytes);
      const uint32_t factor = WideningFactor(scales[i * kKeyTile * sizeof(uint2)]);
      const uint2 a = WidenCodes(raw.x, factor), b = WidenCodes(raw.y, factor);
      const uint2 c = WidenCodes(raw.z, factor), d = WidenCodes(raw.w, factor);
      StoreShared(low + tile, {a.x, a.y, b.x, b.y});
      StoreShared(high + tile, {c.x, c.y, d.x, d.y});
    }
    FenceSharedForWgmma();
  }

  // By one thread.
  __device__ void AwaitTiles(const TwoPhaseCounters* counters) const {
    while (AcquireLoad(&counters->tiles) < num_tiles_) {
    }
  }

  // Every fourth tile of the group, by a warpgroup; probabilities of tiles past the last are zero.
  __device__ void AddValues() {
    const int num_tiles = min(kGroupTiles, num_tiles_ - first_tile());
    const TileProbabilities* const tiles = tiles_ + first_tile() + group();
    GroupShare& share = s_.shares[group()];
    const uint32_t p = SharedAddress(&share.probabilities[0][thread_ % 128]);
    float4 scales[kShareTiles][2];
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j) {
      const bool exists = group() + 4 * j < num_tiles;
      const TileProbabilities* const tile = exists ? tiles + 4 * j : tiles_;
#pragma unroll
      for (int k = 0; k < kKeyTile / 16; ++k) {
        CopyAhead(p + (j * kKeyTile / 16 + k) * kStepBytes, tile->p[k] + thread_ % 128, exists);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scales[j][r] = {kNothing, 0, 0, 0};
        if (exists) scales[j][r] = __ldcg(tile->scales + head() + 8 * r);
      }
    }
    CloseCopies();
    float max[2] = {kNothing, kNothing}, sums[2] = {};
    uint32_t factors[kShareTiles][2];  // pairs of BF16 numbers, powers of two
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kShareTiles; ++j) max[r] = fmaxf(max[r], scales[j][r].x);
#pragma unroll
      for (int j = 0; j < kShareTiles; ++j) {
        const float factor = scales[j][r].x == kNothing ? 0 : exp2f(scales[j][r].x - max[r]);
        sums[r] = fmaf(factor, scales[j][r].y + scales[j][r].z, sums[r]);
        factors[j][r] = PackBf16(factor, factor);
      }
    }
    float d[32] = {};
    FinishCopies<0>();
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j) {
      AddTile(d, p + j * kKeyTile / 16 * kStepBytes,
              SharedAddress(s_.values[min(group() + 4 * j, kGroupTiles - 1)]), factors[j]);
    }
    NamedBarrier(kShareBarrier + group(), 128);  // all have used their probabilities
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = head() + 8 * r;
      float* const to = &share.sums[row][2 * quad()];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = {d[4 * j + 2 * r], d[4 * j + 2 * r + 1]};
      }
      if (quad() == 0) s_.max[group()][row] = max[r], s_.probabilities[group()][row] = sums[r];
    }
  }
  __device__ static void AddTile(float (&d)[32], uint32_t probabilities, uint32_t values,
                                 const uint32_t (&factors)[2]) {
    uint4 p[kKeyTile / 16];
#pragma unroll
    for (int k = 0; k < kKeyTile / 16; ++k) {
      const uint4 x = LoadShared(probabilities + k * kStepBytes);
      p[k] = {MultiplyBf16(x.x, factors[0]), MultiplyBf16(x.y, factors[1]),
              MultiplyBf16(x.z, factors[0]), MultiplyBf16(x.w, factors[1])};
      asm volatile("" : "+r"(p[k].x), "+r"(p[k].y), "+r"(p[k].z), "+r"(p[k].w));
    }
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kKeyTile / 16; ++k) {
      WgmmaValues(d, p[k], TransposedDescriptor(values + k * 2048, kColumnBlockBytes));
    }
    WgmmaCommit();
    WgmmaWait<0>();
  }

  // All warpgroups' sums.
  __device__ void WritePart(const AttentionParts& parts) const {
    const int column = thread_ % 16 * 4;
#pragma unroll 1
    for (int head = thread_ / 16; head < kHeadTile; head += kTwoPhaseThreads / 16) {
      if (first_head_ + head >= p_.num_heads) break;
      float max = s_.max[0][head], sum = 0;
#pragma unroll
      for (int g = 1; g < 4; ++g) max = fmaxf(max, s_.max[g][head]);
      float4 o{0, 0, 0, 0};
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const float factor = exp2f(s_.max[g][head] - max);
        const auto v = *reinterpret_cast<const float4*>(&s_.shares[g].sums[head][column]);
        sum = fmaf(factor, s_.probabilities[g][head], sum);
        o.x = fmaf(factor, v.x, o.x), o.y = fmaf(factor, v.y, o.y);
        o.z = fmaf(factor, v.z, o.z), o.w = fmaf(factor, v.w, o.w);
      }
      const int64_t part = int64_t{first_head_ + head} * parts.max_splits + block_ / kSlices;
      *reinterpret_cast<float4*>(parts.sums + part * kHeadDim + slice() * 64 + column) = o;
      if (slice() == 0 && column == 0) parts.scales[part] = {max, sum};
    }
  }

  const CudaSparseAttentionParams& p_;
  TwoPhaseShared& s_;
  const TokenKeys& keys_;
  TileProbabilities* tiles_;
  int first_head_, block_, thread_, num_tiles_, num_groups_;
  float4 angles_[2];  // of the thread's last chunk of a head
};

// Heads first_head .. + 63.
__global__ void __launch_bounds__(kTwoPhaseThreads, 1)
    TwoPhaseAttentionKernel(const __grid_constant__ CudaSparseAttentionParams p,
                            AttentionParts parts, TileProbabilities* tiles, int first_head) {
  extern __shared__ uint8_t dynamic[];
  const TokenKeys keys(p);
  TwoPhaseAttention(p, AlignedShared<TwoPhaseShared>(dynamic), keys, tiles, first_head)
      .Run(parts, reinterpret_cast<TwoPhaseCounters*>(p.counters));
}

}  // namespace fathom::kernels
