// The inner part of FP4 experts' products of many tokens on sm_90a: y[token, row] of kRowTiles * 64
// weight rows and the tokens of one tile after another. The weights are A of wgmma, one or two row
// tiles for each of two warpgroups, and never lie in shared memory but as FP4: each thread makes
// e4m3 codes of its own rows in the registers of A, relative to the row's largest scale, which
// whoever writes the result applies. The tokens are B, so that a tile wastes little. A warp of the
// last warpgroup, which has given its registers to the others, streams both through a ring in
// shared memory, ahead of the sums and across tiles.
//   A block's sums of 128 columns are the tensor core's own, scaled and added up in FP32: the same
// bits for any kRowTiles and number of tokens.
//   Two row tiles, of up to 224 tokens: a cluster of two blocks multiplies the same tokens. Each
// fetches half of them, for both, because the L2 cache is what limits. Four, of up to 64 tokens: a
// warpgroup has two products under way, for which it loads the tokens' scales once; and of pairs a
// thread uses all that it loads of codes, not half.
// Device code only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/gemm/stream_products.cuh"
#include "kernels/gemm/wgmma.cuh"
#include "kernels/grouped_gemm/expert_plan.h"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

// What a block multiplies.
template <int kRowTiles>
struct Fp4Product {
  ExpertTile tokens;
  const std::byte* weights[kRowTiles];  // row tiles, at the first column block
  const uint8_t* largest[kRowTiles];    // the largest scales of their rows
  const std::byte* x;                   // tiles of the tokens, at the first column block
  const float* x_scales;
  int64_t x_block_bytes;      // from one column block of x to the next; of its scales: 1 / 32
  const float* pair_weights;  // of the tokens
};

inline constexpr int kFp4Warpgroups = 2;  // that multiply
inline constexpr int kFp4Threads = kFp4Warpgroups * 128 + 128;
constexpr int Fp4Cluster(int row_tiles) { return row_tiles == 2 ? 2 : 1; }

template <int kRowTiles, int kMaxTokens, int kStages>
struct Fp4Ring {
  static constexpr int kTileBytes = static_cast<int>(TileMatrixBytes(TileKind::kFp4));
  static constexpr int kEach = kRowTiles / kFp4Warpgroups;  // row tiles of a warpgroup
  // Of a token in `out`, 16 more than a warpgroup's values take, as that spreads tokens over the
  // banks: of the product of pairs for all tokens of a tile, of the other one for 64 at a time.
  static constexpr int kPairRowBytes = kEach * 64 + 16, kRowBytes = kEach * 128 + 16;

  alignas(1024) std::byte x[kStages][kMaxTokens * 128];
  std::byte weights[kStages][kRowTiles][kTileBytes];
  float x_scales[kStages][kMaxTokens];
  float pair_weights[kStages][kMaxTokens];  // of the last step of a product
  uint8_t largest[kStages][kRowTiles][64];  // of its first step
  ExpertTile tokens[kStages];               // likewise
  std::byte out[kFp4Warpgroups][std::max(kMaxTokens * kPairRowBytes, 64 * kRowBytes)];
  float row_largest[2][4 / kEach][kMaxTokens];  // of each warpgroup's columns of 128
  // e4m3 codes of the eight FP4 magnitudes times 2^(6 - i): exact up to i = 14, then to nearest
  // even; from i = 19 on all are zero.
  uint2 codes[256];
  uint64_t full[kStages], empty[kStages], exchange[2];
};

// To the same place of both blocks of a cluster; completes on the barrier of each.
__device__ __forceinline__ void BulkCopyToBoth(uint32_t shared, const void* global, uint32_t bytes,
                                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier)), "h"(static_cast<uint16_t>(3))
      : "memory");
}

// Arrives, if so, at the barrier in the cluster's block `rank`, without a release at the cluster's
// scope, which would wait for all that the warp wrote: who waits here only overwrites what was
// read. No branch, over which the compiler moves hardly anything.
__device__ __forceinline__ void ReleaseAt(uint64_t* barrier, uint32_t rank, bool arrives) {
  asm volatile(
      "{\n.reg .b32 r;\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
      "mapa.shared::cluster.u32 r, %0, %1;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(SharedAddress(barrier)),
      "r"(rank), "r"(static_cast<uint32_t>(arrives))
      : "memory");
}

// Walks the products first, first + stride, … of `work`: int count(), int num_steps() (column
// blocks of 128), Fp4Product<kRowTiles> product(int index), void Write<kTokens>(int index, const
// ExpertTile&, const float (&d)[kEach][kTokens / 2], const float* pair_weights) on the warpgroups
// that multiply, d of each product of a warpgroup. kPairs: the first half of the row tiles are
// w1's, the others the same rows of w3; of a product a warp has eight rows of w1 as A's rows g and
// the same of w3 as g + 8. Else a product is a row tile.
template <int kRowTiles, int kMaxTokens, int kStages, bool kPairs, typename Work>
class Fp4Multiplier {
 public:
  using Ring = Fp4Ring<kRowTiles, kMaxTokens, kStages>;
  static constexpr int kCluster = Fp4Cluster(kRowTiles), kEach = Ring::kEach;

  __device__ Fp4Multiplier(Ring& ring, Work& work, int first, int stride)
      : ring_(ring), work_(work), first_(first), stride_(stride) {}

  __device__ static void Init(Ring& ring) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        BarrierInit(&ring.full[i], 1);
        BarrierInit(&ring.empty[i], kCluster * kFp4Warpgroups * 4 * kWarpArrivals);
      }
      for (uint64_t& exchange : ring.exchange) {
        BarrierInit(&exchange, kFp4Warpgroups * 4 * kWarpArrivals + 1);
      }
      BarrierInitFence();
    }
    if (threadIdx.x < 256) {
      ring.codes[threadIdx.x] =
          Fp4CodesAsFp8(__uint_as_float((133u - min(threadIdx.x, 132u)) << 23));
    }
    __syncthreads();
    if (kCluster > 1) ClusterSync();  // the other block's are ready, too
  }

  // The launch before this one may still run; the block ends after it.
  __device__ __forceinline__ void Run() {
    if (threadIdx.x >= kFp4Warpgroups * 128) {
      GiveRegisters<40>();
      if (threadIdx.x < kFp4Warpgroups * 128 + 32) {
        Produce();
      } else {
        WaitForPredecessor();
      }
    } else {
      TakeRegisters<232>();
      Multiply();
    }
    __syncwarp();
    if (kCluster > 1) ClusterSync();  // until here the other block writes to this one
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // What a lane of the last warp copies: of every step; the lanes after those of the first or last.
  struct Copy {
    const std::byte* from;
    int64_t step_bytes;
    uint32_t bytes, to, stage_bytes;
    int only;  // this step; -1: all
  };
  __device__ Copy MakeCopy(const Fp4Product<kRowTiles>& p, int num_steps) const {
    const auto groups = static_cast<uint32_t>(p.tokens.num_rows + 7) / 8;
    Copy copy{};
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (lane() == i) {
        copy = {p.weights[i],
                Ring::kTileBytes,
                Ring::kTileBytes,
                SharedAddress(ring_.weights[0][i]),
                sizeof(ring_.weights[0]),
                -1};
      }
      if (lane() == kRowTiles + 3 + i) {
        copy = {reinterpret_cast<const std::byte*>(p.largest[i]),
                0,
                64,
                SharedAddress(ring_.largest[0][i]),
                sizeof(ring_.largest[0]),
                0};
      }
    }
    if (lane() == kRowTiles) {
      copy = {p.x, p.x_block_bytes, groups * 1024, SharedAddress(ring_.x), sizeof(ring_.x[0]), -1};
      if constexpr (kCluster > 1) {
        const uint32_t first = (groups + 1) / 2 * 1024, skipped = ClusterRank() * first;
        copy.from += skipped, copy.to += skipped;
        copy.bytes = skipped == 0 ? first : copy.bytes - first;
      }
    } else if (lane() == kRowTiles + 1) {
      copy = {reinterpret_cast<const std::byte*>(p.x_scales),
              p.x_block_bytes / 32,
              groups * 32,
              SharedAddress(ring_.x_scales),
              sizeof(ring_.x_scales[0]),
              -1};
    } else if (lane() == kRowTiles + 2 && kPairs) {
      copy = {reinterpret_cast<const std::byte*>(p.pair_weights),
              0,
              groups * 32,
              SharedAddress(ring_.pair_weights),
              sizeof(ring_.pair_weights[0]),
              num_steps - 1};
    }
    return copy;
  }

  __device__ void Produce() {
    int stage = 0;
    uint32_t parity = 1;
    const int num_steps = work_.num_steps();
    for (int i = first_; i < work_.count(); i += stride_) {
      const Fp4Product<kRowTiles> p = work_.product(i);
      Copy copy = MakeCopy(p, num_steps);
      const auto groups = static_cast<uint32_t>(p.tokens.num_rows + 7) / 8;
      for (int k = 0; k < num_steps; ++k) {
        BarrierWait(&ring_.empty[stage], parity);
        if (lane() == 0) {
          if (k == 0) ring_.tokens[stage] = p.tokens;
          BarrierExpectBytes(&ring_.full[stage],
                             kRowTiles * Ring::kTileBytes + groups * (1024 + 32) +
                                 (k == 0 ? kRowTiles * 64 : 0) +
                                 (kPairs && k == num_steps - 1 ? groups * 32 : 0));
        }
        __syncwarp();
        if (copy.bytes != 0 && (copy.only == -1 || copy.only == k)) {
          const uint32_t to = copy.to + static_cast<uint32_t>(stage) * copy.stage_bytes;
          if (kCluster > 1 && lane() == kRowTiles) {
            BulkCopyToBoth(to, copy.from, copy.bytes, &ring_.full[stage]);
          } else {
            BulkCopyTo(to, copy.from, copy.bytes, &ring_.full[stage]);
          }
        }
        copy.from += copy.step_bytes;
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
  }

  __device__ __forceinline__ void Multiply() {
    for (int i = first_; i < work_.count(); i += stride_) {
      BarrierWait(&ring_.full[stage_], parity_);
      ExpertTile tokens = ring_.tokens[stage_];
      tokens.num_rows = __shfl_sync(0xffffffffu, tokens.num_rows, 0);
#pragma unroll
      for (int p = 0; p < kEach; ++p) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint8_t* const rows = ring_.largest[stage_][FirstTile() + Source(p, r) * kApart];
          row_max_[p][r] = rows[FirstRow() + (Later(p, r) ? 8 : 0)] * 0x01010101u;
        }
      }
      MultiplyNarrowest<kTokenStep>(i, tokens);
    }
  }

  // As a tile of 8, 16, … 64 or of 32, 64, … 224 tokens, whichever is the first that has all.
  static constexpr int kTokenStep = kMaxTokens <= 64 ? 8 : 32;
  template <int kTokens>
  __device__ __forceinline__ void MultiplyNarrowest(int index, const ExpertTile& tokens) {
    if constexpr (kTokens < kMaxTokens) {
      if (tokens.num_rows > kTokens) {
        return MultiplyNarrowest<kTokens + kTokenStep>(index, tokens);
      }
    }
    MultiplyTile<kTokens>(index, tokens);
  }

  template <int kTokens>
  __device__ __forceinline__ void MultiplyTile(int index, const ExpertTile& tokens) {
    float d[kEach][kTokens / 2] = {};
    if constexpr (kEach == 1) {
      AddOne<kTokens>(d[0]);
    } else {
      AddTwo<kTokens>(d);
    }
#pragma unroll
    for (int p = 0; p < kEach; ++p) {
      const float low = Ue8m0Value(row_max_[p][0] & 255u) * 0x1p-6f;
      const float high = Ue8m0Value(row_max_[p][1] & 255u) * 0x1p-6f;
#pragma unroll
      for (int j = 0; j < kTokens / 2; ++j) d[p][j] *= j % 4 < 2 ? low : high;
    }
    work_.template Write<kTokens>(index, tokens, d, ring_.pair_weights[stage_]);
    Release(stage_, true);
    Advance();
  }

  __device__ void Advance() {
    if (++stage_ == kStages) stage_ = 0, parity_ ^= 1;
  }
  // Where `any`. Without a fence: what was loaded from the stage last has been used, and a warp's
  // loads from shared memory come in their order, so that none is under way. (Its lane made of
  // thread_ costs small tiles 1%.)
  __device__ void Release(int stage, bool any) {
    __syncwarp();
    const auto block = static_cast<uint32_t>(lane() % kCluster);
    ReleaseAt(&ring_.empty[stage], block, any && lane() < kCluster * kWarpArrivals);
    if (kCluster > 1 && kWarpArrivals > 1) ReleaseAt(&ring_.empty[stage], block ^ 1, any);
  }

  __device__ static uint32_t InRegister(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  // Where the weights of row g (r 0) and g + 8 (1) of the warpgroup's product p are, for a thread:
  // in its row tiles FirstTile() + Source() * kApart, in row FirstRow() or the one eight later.
  __device__ static constexpr int Source(int p, int r) { return kPairs ? r : p; }
  __device__ bool Later(int p, int r) const { return (kPairs ? p : r) != 0; }
  static constexpr int kApart = kPairs ? kEach : 1;
  static constexpr int kSources = kPairs ? 2 : kEach;
  // Pairs, one product a warpgroup: a fragment's 16 rows are two warps', eight each.
  static constexpr bool kShares = kPairs && kEach == 1;
  __device__ int FirstTile() const {
    return kShares ? 0 : static_cast<int>(thread_) / 128 * (kPairs ? 1 : kEach);
  }
  __device__ int FirstRow() const {
    const int thread = static_cast<int>(thread_), warp = thread / 32;
    return (kShares ? warp % 8 * 8 : warp % 4 * 16) + thread % 32 / 4;
  }
  // Whose chunks of a tile this thread reads.
  __device__ int Fragment() const {
    const int thread = static_cast<int>(thread_), warp = thread / 32;
    return (kShares ? warp % 8 / 2 : warp % 4) * 32 + thread % 32;
  }

  // Where a stage's codes and scales of the first row and the tokens' scales begin for this thread,
  // in bytes.
  __device__ uint32_t CodesPlace() const {
    return static_cast<uint32_t>(FirstTile() * Ring::kTileBytes + Fragment() * 16);
  }
  __device__ uint32_t ScalesPlace() const {
    return static_cast<uint32_t>(FirstTile() * Ring::kTileBytes + 4096 + FirstRow() * 4);
  }
  __device__ uint32_t XScalesPlace() const { return thread_ % 4 * 8; }

  // What a thread has of a stage's weights: codes of 64 columns each, and by how much the scales of
  // its rows are below their largest, a byte for each 32 columns.
  struct Codes {
    uint4 chunks[kSources][2];
    uint32_t below[kEach][2];
  };
  __device__ __forceinline__ void AwaitCodes(Codes& codes) const {
    BarrierWait(&ring_.full[stage_], parity_);
    const std::byte* const weights = ring_.weights[stage_][0];
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      const auto* const from =
          reinterpret_cast<const uint4*>(weights + codes_at_ + s * kApart * Ring::kTileBytes);
      codes.chunks[s][0] = from[0], codes.chunks[s][1] = from[128];
    }
#pragma unroll
    for (int p = 0; p < kEach; ++p) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::byte* const from = weights + scales_at_ +
                                      Source(p, r) * kApart * Ring::kTileBytes +
                                      (Later(p, r) ? 8 * 4 : 0);
        codes.below[p][r] = row_max_[p][r] - *reinterpret_cast<const uint32_t*>(from);
      }
    }
  }

  // A of product p.
  __device__ __forceinline__ void Expand(const Codes& codes, int p, uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 chunk = codes.chunks[Source(p, r)][q / 2];
        const bool later = kShares ? odd_warp_ != 0 : Later(p, r);
        const uint32_t word = q % 2 == 0 ? (later ? chunk.y : chunk.x) : later ? chunk.w : chunk.z;
        const uint2 magnitudes = ring_.codes[codes.below[p][r] >> (8 * q) & 255u];
        ExpandFp4(word, magnitudes.x, magnitudes.y, a[q][r], a[q][r + 2]);
      }
    }
  }

  // Two products, a column block at a time. Both are begun together, as each beginning waits for
  // the warpgroup's four warps; meanwhile the other warpgroup expands. The next block's codes are
  // loaded while the second product is under way, the tokens' scales before products take shared
  // memory. Other orders take longer (docs/performance/prefill.md).
  template <int kTokens>
  __device__ __forceinline__ void AddTwo(float (&d)[2][kTokens / 2]) {
    Codes codes;
    AwaitCodes(codes);
    for (int left = work_.num_steps();; --left) {
      float products[2][kTokens / 2];
      float2 scales[kTokens / 8];
      LoadScales<0>(scales);
      uint32_t first[4][4], second[4][4];
      Expand(codes, 0, first);
      Expand(codes, 1, second);
      __syncwarp();
      Start<kTokens, 0>(first, products[0]);
      Start<kTokens, 0>(second, products[1]);
      WgmmaWait<1>();
      Add<0>(products[0], scales, d[0]);
      const int last = stage_;
      if (left > 1) {
        Advance();
        AwaitCodes(codes);
      }
      WgmmaWait<0>();
      Add<0>(products[1], scales, d[1]);
      if (left == 1) break;
      Release(last, true);
    }
  }

  // One product, a column block at a time, of that a chunk of the tokens, the next one multiplied
  // while this is added.
  template <int kTokens>
  __device__ __forceinline__ void AddOne(float (&d)[kTokens / 2]) {
    int last = -1;
    for (int left = work_.num_steps();; --left) {
      Codes codes;
      AwaitCodes(codes);
      uint32_t a[4][4];
      Expand(codes, 0, a);
      __syncwarp();
      float even[kChunk<kTokens> / 2], odd[kChunk<kTokens> / 2];
      float2 scales[kChunk<kTokens> / 8];
      LoadScales<0>(scales);
      Start<kTokens, 0>(a, even);
      Release(max(last, 0), last >= 0);  // the block before, if any, while products are under way
      AddChunks<kTokens, 0>(a, even, odd, scales, d);
      if (left == 1) break;
      last = stage_;
      Advance();
    }
  }

  // Tokens of a chunk. All are alike: of others ptxas finds no registers for the products of two
  // and waits for each instruction's before it starts the next one (its note C7511).
  template <int kTokens>
  static constexpr int kChunk = kTokens <= 64    ? kTokens
                                : kTokens <= 128 ? kTokens / 2
                                                 : kTokens / 4;

  template <int kTokens, int kAt, int kSize>
  __device__ __forceinline__ void Start(const uint32_t (&a)[4][4], float (&product)[kSize]) {
    constexpr int kN = kChunk<kTokens>;
    const uint64_t x = SmemDescriptor(SharedAddress(ring_.x[stage_] + kAt * 128));
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<WgmmaType::kE4m3, kN>::FromRegisters(product, a[q], x + 2 * q, q != 0);
    }
    WgmmaCommit();
  }

  // Of this thread's columns of a chunk.
  template <int kAt, int kEights>
  __device__ __forceinline__ void LoadScales(float2 (&scales)[kEights]) const {
    const auto* const from =
        reinterpret_cast<const std::byte*>(ring_.x_scales[stage_] + kAt) + x_scales_at_;
#pragma unroll
    for (int j = 0; j < kEights; ++j) scales[j] = *reinterpret_cast<const float2*>(from + j * 32);
  }

  // Of a chunk that has been multiplied.
  template <int kAt, int kSize, int kSums>
  __device__ __forceinline__ static void Add(float (&product)[kSize],
                                             const float2 (&scales)[kSize / 4], float (&d)[kSums]) {
    ReadyRegisters(product);
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
      float* const sums = d + kAt / 2 + 4 * j;
      sums[0] += product[4 * j] * scales[j].x;
      sums[1] += product[4 * j + 1] * scales[j].y;
      sums[2] += product[4 * j + 2] * scales[j].x;
      sums[3] += product[4 * j + 3] * scales[j].y;
    }
  }

  template <int kTokens, int kAt, int kSize>
  __device__ __forceinline__ void AddChunks(const uint32_t (&a)[4][4], float (&product)[kSize],
                                            float (&other)[kSize],
                                            const float2 (&scales)[kSize / 4],
                                            float (&d)[kTokens / 2]) {
    constexpr int kNext = kAt + kChunk<kTokens>, kEights = kChunk<kTokens> / 8;
    // A chunk ahead: loads take long beside products.
    float2 ahead[kEights];
    if constexpr (kNext < kTokens) {
      Start<kTokens, kNext>(a, other);
      LoadScales<kNext>(ahead);
    }
    constexpr int kPending = kNext < kTokens ? 1 : 0;
    WgmmaWait<kPending>();
    Add<kAt>(product, scales, d);
    if constexpr (kNext < kTokens) AddChunks<kTokens, kNext>(a, other, product, ahead, d);
  }

  Ring& ring_;
  Work& work_;
  const int first_, stride_;
  int stage_ = 0;
  uint32_t parity_ = 0;
  // In registers: from threadIdx, which takes long to read, the compiler would make them at every
  // use.
  const uint32_t thread_ = InRegister(threadIdx.x);
  const uint32_t odd_warp_ = kShares ? InRegister(threadIdx.x / 32 % 2) : 0;
  const uint32_t codes_at_ = InRegister(CodesPlace());
  const uint32_t scales_at_ = InRegister(ScalesPlace());
  const uint32_t x_scales_at_ = InRegister(XScalesPlace());
  uint32_t row_max_[kEach][2] = {};  // the largest scales of its rows, in all four bytes
};

}  // namespace fathom::kernels
