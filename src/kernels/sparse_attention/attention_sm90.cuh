// Attention of up to 64 heads of a token over a range of its key tiles. A block takes such items
// one after another, and its warps are at what comes next while others are still at what was. Who
// does what:
//   warpgroup 0    norms an item's queries; scores a tile (heads are the rows of wgmma), keeps the
//                  heads' maxima and sums, and puts probabilities into shared memory;
//   warpgroups 1, 2  add the tile's values to one half each of the 512 output columns, which stay
//                  in registers, and write these at the item's end;
//   warpgroup 3    deals the items out and brings their keys into two tiles in shared memory, in
//                  turn (key_tile.cuh), where keys were widened before (kWide) queries, too.
// Device code only.
#pragma once

#include "kernels/gemm/wgmma.cuh"
#include "kernels/sparse_attention/head_rows.cuh"
#include "kernels/sparse_attention/wgmma_values.cuh"
#include "kernels/sparse_attention/wide_key_tile.cuh"

namespace fathom::kernels {

inline constexpr int kScorers = 128, kAdders = 256;
inline constexpr int kAttentionThreads = kScorers + kAdders + kProducerThreads;
inline constexpr int kProbabilityBytes = kHeadTile * 128;
// Named barriers, of a warpgroup each: of the adders' the first.
inline constexpr int kScorerBarrier = 1, kAdderBarrier = 2;

// Of a head behind an item's last tile.
struct HeadSum {
  float max, sum;  // log2 units; without the sink
  float inverse;   // of the sum with the sink
};

// Dynamic shared memory, from a multiple of 1024.
struct AttentionShared {
  uint8_t q[8 * kColumnBlockBytes];        // [64 heads, 512] like a key tile
  uint8_t keys[kKeyTiles][kKeyTileBytes];  // an item's last one becomes the output
  uint8_t p[kKeyTiles][kProbabilityBytes];
  LocatedKeys located;
  float rescale[kKeyTiles][kHeadTile];  // of the sums before the tile
  HeadSum sums[2][kHeadTile];           // of items in turn
  AttentionItems items;
  // Keys there; tile free; probabilities written.
  uint64_t full[kKeyTiles], empty[kKeyTiles], ready[kKeyTiles];
  QueryBarriers queries;

  // By one thread.
  __device__ void Init() {
    items.Init();
    located.Init();
    queries.Init();
    for (int i = 0; i < kKeyTiles; ++i) {
      BarrierInit(&full[i], kProducerThreads / 32 * kWarpArrivals);
      BarrierInit(&empty[i], kAdders / 32 * kWarpArrivals);
      BarrierInit(&ready[i], kScorers);
    }
    BarrierInitFence();
  }
};
inline constexpr size_t kAttentionSharedBytes = sizeof(AttentionShared) + 1024;

// 2^x, nothing where that is below 2^-126: exp2f takes three instructions more for what no sum with
// a probability of 1 has a place for.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Warpgroup 0. A thread scores rows (heads) `row_` and `row_ + 8`.
template <bool kWide>
class AttentionScorer {
 public:
  __device__ AttentionScorer(const CudaSparseAttentionParams& p, AttentionShared& shared)
      : p_(p), s_(shared) {
    row_ = warp() * 16 + lane() / 4;
    quad_ = lane() % 4;
  }

  __device__ void Run() {
    AttentionItems::Place place;
    const AttentionItem* item = &s_.items.Await(place);
    if constexpr (!kWide) FetchQueries(*item);
    for (int i = 0; item->num_tiles != 0; ++i) {
      BeginHeads(*item);
      if constexpr (kWide) {
        BarrierWait(&s_.queries.full, i % 2);
      } else {
        AwaitCopies();
      }
      PlaceQueries(*item);
      const AttentionItem* next = item;
      int num_keys = item->num_keys;
#pragma unroll 1
      for (int left = item->num_tiles; left > 0; --left, num_keys -= kKeyTile, tile_.Next()) {
        float d[32];
        Scores(d, num_keys);
        if (left == 1) {
          next = &s_.items.Await(place);
          if constexpr (kWide) {
            WarpArrive(&s_.queries.empty);
          } else {
            NamedBarrier(kScorerBarrier, kScorers);  // all have multiplied the queries
            FetchQueries(*next);
          }
        }
        Probabilities(d);
        if (left == 1) Finish(s_.sums[i % 2]);
        FenceSharedForWgmma();
        BarrierArrive(s_.ready + tile_.index);
      }
      item = next;
    }
  }

 private:
  static constexpr float kScale = 0.044194173824159216f;  // 512^-0.5

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // 16 heads a warp, as they are, into their places.
  __device__ void FetchQueries(const AttentionItem& item) const {
    if (item.num_tiles == 0) return;
    constexpr int kChunks = kHeadDim / 8;
    const int first = item.first_head + warp() * 16, heads = p_.num_heads - first;
    const auto* q = reinterpret_cast<const uint4*>(p_.q);
    const auto* from = q + (int64_t{item.token} * p_.num_heads + first) * kChunks + lane();
    const uint32_t to = SharedAddress(s_.q);
#pragma unroll 4
    for (int i = 0; i < 16 * kChunks / 32; ++i) {
      const int row = i / 2, chunk = i % 2 * 32 + lane();
      CopyAhead(to + ChunkOffset(warp() * 16 + row, chunk), row < heads ? from + i * 32 : q,
                row < heads);
    }
  }
  __device__ void BeginHeads(const AttentionItem& item) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = item.first_head + row_ + 8 * r;
      sink_[r] = head < p_.num_heads ? p_.sink[head] : 0;
      max_[r] = -__builtin_huge_valf();
      sum_[r] = 0;
    }
  }
  // Norms and rotates queries where they are. Eight lanes a head, in every other row, so that they
  // do not meet in a bank: lane l of them has the pairs of columns 64 n + 2 l + 16 r, so all have
  // some that are rotated. kSets heads of a lane at once, for one takes as long as two.
  __device__ void PlaceQueries(const AttentionItem& item) {
    constexpr int kRuns = 4, kSets = kWide ? 2 : 1;
    float2 angles[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) angles[r] = item.angles[lane() % 8 + 8 * r];
#pragma unroll 1
    for (int i = 0; i < 4 / kSets; ++i) {
      const int set = i * kSets, row = warp() * 16 + set / 2 * 8 + set % 2 + lane() / 8 * 2;
      // The second set's is the next row.
      uint32_t at[kSets];
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        at[s] = ChunkOffset(row + s, lane() % 8 / 4) + lane() % 4 * 4;
      }
      const auto pair = [&](int s, int r, int n) {
        return reinterpret_cast<uint32_t*>(s_.q + (at[s] ^ r * 32) + n * kColumnBlockBytes);
      };
      uint32_t rows[kSets][kRuns][8];
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
#pragma unroll
        for (int j = 0; j < kRuns * 8; ++j) rows[s][j / 8][j % 8] = *pair(s, j / 8, j % 8);
      }
      NormHeads(rows, p_.norm_eps);
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
#pragma unroll
        for (int r = 0; r < kRuns; ++r) rows[s][r][7] = RotateBf16(rows[s][r][7], angles[r]);
#pragma unroll
        for (int j = 0; j < kRuns * 8; ++j) *pair(s, j / 8, j % 8) = rows[s][j / 8][j % 8];
      }
    }
    FenceSharedForWgmma();
    NamedBarrier(kScorerBarrier, kScorers);
  }

  // Past the last of `num_keys` they become nothing.
  __device__ __forceinline__ void Scores(float (&d)[32], int num_keys) {
    BarrierWait(s_.full + tile_.index, tile_.parity);
    FenceSharedForWgmma();  // for who widened the keys, and for who adds their values
    const uint64_t q = SmemDescriptor(SharedAddress(s_.q));
    const uint64_t keys = SmemDescriptor(SharedAddress(s_.keys[tile_.index]));
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const uint64_t offset = (k / 4 * kColumnBlockBytes + k % 4 * 32) / 16;
      Wgmma<WgmmaType::kBf16, 64>::FromSmem(d, q + offset, keys + offset, k != 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    if (num_keys >= kKeyTile) return;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      if (j / 4 * 8 + 2 * quad_ + j % 2 >= num_keys) d[j] = -__builtin_huge_valf();
    }
  }

  // Into shared memory, and what their maxima make of the sums before.
  __device__ __forceinline__ void Probabilities(const float (&d)[32]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + 8 * r;
      float tile_max = d[2 * r];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        tile_max = fmaxf(tile_max, fmaxf(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]));
      }
      const float max = fmaxf(max_[r], WarpMax<4>(tile_max) * (kScale * kLog2E));
      const float rescale = Exp2(max_[r] - max);
      if (quad_ == 0) s_.rescale[tile_.index][row] = rescale;
      const uint32_t p = SharedAddress(s_.p[tile_.index]) + row * 128 + row % 8 * 16 + quad_ * 4;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float a = Exp2(fmaf(d[4 * j + 2 * r], kScale * kLog2E, -max));
        const float b = Exp2(fmaf(d[4 * j + 2 * r + 1], kScale * kLog2E, -max));
        sum += a + b;
        // As ChunkOffset: chunks of eight columns.
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(p ^ j * 16), "r"(PackBf16(a, b)) : "memory");
      }
      max_[r] = max;
      sum_[r] = fmaf(sum_[r], rescale, sum);
    }
  }

  __device__ void Finish(HeadSum (&sums)[kHeadTile]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = WarpSum<4>(sum_[r]);
      if (quad_ != 0) continue;
      sums[row_ + 8 * r] = {max_[r], sum, 1.0f / (sum + SinkWeight(sink_[r], max_[r]))};
    }
  }

  const CudaSparseAttentionParams& p_;
  AttentionShared& s_;
  int row_, quad_;
  RingPlace<kKeyTiles> tile_;
  float max_[2], sum_[2], sink_[2];  // of the thread's rows; sum_: of its columns
};

// Warpgroups 1 and 2. A thread holds rows `row_` and `row_ + 8`.
class ValueAdder {
 public:
  __device__ ValueAdder(const CudaSparseAttentionParams& p, const AttentionParts& parts,
                        AttentionShared& shared)
      : p_(p), parts_(parts), s_(shared) {
    const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
    group_ = (static_cast<int>(threadIdx.x) - kScorers) / 128;
    row_ = thread / 32 * 16 + lane / 4;
    quad_ = lane % 4;
  }

  __device__ void Run() {
    AttentionItems::Place place;
    RingPlace<kKeyTiles> tile;
    for (int i = 0;; ++i) {
      const AttentionItem& item = s_.items.Await(place);
      const int num_tiles = item.num_tiles;
      if (num_tiles == 0) return;
#pragma unroll
      for (int j = 0; j < 128; ++j) o_[j / 64][j % 64] = 0;
      int last = 0;
#pragma unroll 1
      for (int left = num_tiles; left > 0; --left, tile.Next()) {
        AddValues(tile);
        last = tile.index;
        if (left > 1) WarpArrive(s_.empty + last);
      }
      if (parts_.max_splits > 1) {
        WriteParts(item, s_.sums[i % 2]);
      } else {
        WriteOutput(item, s_.sums[i % 2], s_.keys[last]);
      }
      WarpArrive(s_.empty + last);
    }
  }

 private:
  static constexpr int kPairs = 32;       // pair j: columns Column(j) and + 1
  static constexpr int kPlainPairs = 24;  // of these no column is rotated, of the others some
  static constexpr int kColumns = kHeadDim / 2;

  __device__ int Column(int j) const { return group_ * kColumns + 8 * j + 2 * quad_; }
  __device__ float2 Value(int r, int j) const {
    const float* const two = o_[j / 16] + j % 16 * 4 + 2 * r;
    return {two[0], two[1]};
  }

  __device__ __forceinline__ void AddValues(const RingPlace<kKeyTiles>& tile) {
    BarrierWait(s_.ready + tile.index, tile.parity);
    const float* const rescale = s_.rescale[tile.index] + row_;
    const float scale[2] = {rescale[0], rescale[8]};
    if (__any_sync(0xffffffffu, scale[0] != 1.0f || scale[1] != 1.0f)) {
#pragma unroll
      for (int j = 0; j < 128; ++j) o_[j / 64][j % 64] *= scale[j / 2 % 2];
    }
    const uint64_t p = SmemDescriptor(SharedAddress(s_.p[tile.index]));
    const uint64_t values = TransposedDescriptor(
        SharedAddress(s_.keys[tile.index]) + group_ * 4 * kColumnBlockBytes, kColumnBlockBytes);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kKeyTile / 16; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        WgmmaValues(o_[half], p + k * 32 / 16,
                    values + (half * 2 * kColumnBlockBytes + k * 2048) / 16);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
  }

  // Finished rows go through shared memory, so that whole 128-byte rows of tiles are written: where
  // the warpgroup's values were.
  __device__ void WriteOutput(const AttentionItem& item, const HeadSum* sums, uint8_t* shared) {
    const bool rotates = Column(kPlainPairs) >= kNumFp8;
    NamedBarrier(kAdderBarrier + group_, 128);  // all have multiplied these
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + 8 * r;
      const float inverse = sums[row].inverse;
      const auto column = static_cast<uint32_t>(Column(0));
      const uint32_t to = SharedAddress(shared) + ChunkOffset(row, column / 8) + column % 8 * 2;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const float2 o = Value(r, j), out{o.x * inverse, o.y * inverse};
        const uint32_t pair = j >= kPlainPairs && rotates ? FinishPair(out, Column(j), item.angles)
                                                          : PackBf16(out.x, out.y);
        // As ChunkOffset: chunks of eight columns.
        asm volatile("st.shared.b32 [%0], %1;" ::"r"((to ^ j % 8 * 16) + j / 8 * kColumnBlockBytes),
                     "r"(pair)
                     : "memory");
      }
    }
    NamedBarrier(kAdderBarrier + group_, 128);
    constexpr int kRows = 128 * 8 / kColumns;  // a thread for each chunk
    const int heads = min(kHeadTile, p_.num_heads - item.first_head);
    const int first = static_cast<int>(threadIdx.x) % 128 / (kColumns / 8);
    const int chunk = group_ * (kColumns / 8) + static_cast<int>(threadIdx.x) % (kColumns / 8);
    auto* to = reinterpret_cast<uint8_t*>(p_.out.values) +
               Bf16TileOffset(item.token, int64_t{item.first_head + first} * kHeadDim + chunk * 8,
                              p_.out.row_groups);
    const int64_t stride = Bf16TileOffset(0, kRows * kHeadDim, p_.out.row_groups);
#pragma unroll 4
    for (int row = first; row < heads; row += kRows, to += stride) {
      *reinterpret_cast<uint4*>(to) =
          *reinterpret_cast<const uint4*>(shared + ChunkOffset(row, chunk));
    }
  }

  __device__ void WriteParts(const AttentionItem& item, const HeadSum* sums) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + 8 * r, head = item.first_head + row;
      if (head >= p_.num_heads) continue;
      const int64_t part =
          (int64_t{item.token} * p_.num_heads + head) * parts_.max_splits + item.split;
      float* const to = parts_.sums + part * kHeadDim + Column(0);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = Value(r, j);
      }
      if (Column(0) == 0) parts_.scales[part] = {sums[row].max, sums[row].sum};
    }
  }

  const CudaSparseAttentionParams& p_;
  const AttentionParts& parts_;
  AttentionShared& s_;
  int group_, row_, quad_;
  float o_[2][64];  // of 128 columns each, whose products are separate instructions
};

}  // namespace fathom::kernels
