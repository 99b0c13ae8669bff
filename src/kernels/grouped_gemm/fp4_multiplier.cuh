// The inner part of FP4 experts' products of many tokens on sm_90a: y[token, row] of 64 kGroups
// weight rows and the tokens of one tile after another. The weights are A of wgmma, 64 rows a
// warpgroup, and never lie in shared memory but as FP4: each thread makes e4m3 codes of its own
// rows in the registers of A, relative to the row's largest scale, which whoever writes the result
// applies. The tokens are B, so that a tile wastes little. A warp of the last warpgroup, which has
// given its registers to the others, streams both through a ring in shared memory, ahead of the
// sums and across tiles.
//   A block's sums of 128 columns are the tensor core's own, scaled and added up in FP32: the same
// bits for any kGroups and number of tokens.
//   Two groups: a cluster of two blocks multiplies the same tokens. Each fetches half of them, for
// both, because the L2 cache is what limits.
// Device code only.
#pragma once

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
template <int kGroups>
struct Fp4Product {
  ExpertTile tokens;
  const std::byte* weights[kGroups];  // row tiles, at the first column block
  const uint8_t* largest[kGroups];    // the largest scales of their rows
  const std::byte* x;                 // tiles of the tokens, at the first column block
  const float* x_scales;
  int64_t x_block_bytes;      // from one column block of x to the next; of its scales: 1 / 32
  const float* pair_weights;  // of the tokens
};

constexpr int Fp4Threads(int groups) { return groups * 128 + 128; }
constexpr int Fp4Cluster(int groups) { return groups == 2 ? 2 : 1; }

template <int kGroups, int kMaxTokens, int kStages>
struct Fp4Ring {
  static constexpr int kTileBytes = static_cast<int>(TileMatrixBytes(TileKind::kFp4));
  static constexpr int kOutTokens = kMaxTokens < 64 ? 64 : kMaxTokens;

  alignas(1024) std::byte x[kStages][kMaxTokens * 128];
  std::byte weights[kStages][kGroups][kTileBytes];
  float x_scales[kStages][kMaxTokens];
  float pair_weights[kStages][kMaxTokens];  // of the last step of a product
  uint8_t largest[kStages][kGroups][64];    // of its first step
  ExpertTile tokens[kStages];               // likewise
  std::byte out[kGroups][kOutTokens * 80 > 64 * 144 ? kOutTokens * 80 : 64 * 144];
  float row_largest[2][4][kMaxTokens];
  // e4m3 codes of the eight FP4 magnitudes times 2^(6 - i): exact up to i = 11, then to nearest
  // even; below 2^-18 that is zero.
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
// blocks of 128), Fp4Product<kGroups> product(int index), void Write<kTokens>(int index, const
// ExpertTile&, const float (&d)[kTokens / 2], int stage) on the warpgroups that multiply, `stage`
// that of the last step. kPairs: a warpgroup has 32 rows of w1 and the same of w3, thread by thread
// rows g of w1 and as g + 8 of w3; the first half of the row tiles are w1's. Else a row tile.
template <int kGroups, int kMaxTokens, int kStages, bool kPairs, typename Work>
class Fp4Multiplier {
 public:
  using Ring = Fp4Ring<kGroups, kMaxTokens, kStages>;
  static constexpr int kCluster = Fp4Cluster(kGroups);

  __device__ Fp4Multiplier(Ring& ring, Work& work, int first, int stride)
      : ring_(ring), work_(work), first_(first), stride_(stride) {}

  __device__ static void Init(Ring& ring) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        BarrierInit(&ring.full[i], 1);
        BarrierInit(&ring.empty[i], kCluster * kGroups * 4 * kWarpArrivals);
      }
      for (uint64_t& exchange : ring.exchange) {
        BarrierInit(&exchange, kGroups * 4 * kWarpArrivals + 1);
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

  __device__ __forceinline__ void Run() {
    if (threadIdx.x >= kGroups * 128) {
      GiveRegisters<kGroups == 2 ? 40 : 32>();
      if (threadIdx.x < kGroups * 128 + 32) Produce();
    } else {
      TakeRegisters<kGroups == 2 ? 232 : 112>();
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
  __device__ Copy MakeCopy(const Fp4Product<kGroups>& p, int num_steps) const {
    const auto groups = static_cast<uint32_t>(p.tokens.num_rows + 7) / 8;
    Copy copy{};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (lane() == i) {
        copy = {p.weights[i],
                Ring::kTileBytes,
                Ring::kTileBytes,
                SharedAddress(ring_.weights[0][i]),
                sizeof(ring_.weights[0]),
                -1};
      }
      if (lane() == kGroups + 3 + i) {
        copy = {reinterpret_cast<const std::byte*>(p.largest[i]),
                0,
                64,
                SharedAddress(ring_.largest[0][i]),
                sizeof(ring_.largest[0]),
                0};
      }
    }
    if (lane() == kGroups) {
      copy = {p.x, p.x_block_bytes, groups * 1024, SharedAddress(ring_.x), sizeof(ring_.x[0]), -1};
      if constexpr (kCluster > 1) {
        const uint32_t first = (groups + 1) / 2 * 1024, skipped = ClusterRank() * first;
        copy.from += skipped, copy.to += skipped;
        copy.bytes = skipped == 0 ? first : copy.bytes - first;
      }
    } else if (lane() == kGroups + 1) {
      copy = {reinterpret_cast<const std::byte*>(p.x_scales),
              p.x_block_bytes / 32,
              groups * 32,
              SharedAddress(ring_.x_scales),
              sizeof(ring_.x_scales[0]),
              -1};
    } else if (lane() == kGroups + 2 && kPairs) {
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
      const Fp4Product<kGroups> p = work_.product(i);
      Copy copy = MakeCopy(p, num_steps);
      const auto groups = static_cast<uint32_t>(p.tokens.num_rows + 7) / 8;
      for (int k = 0; k < num_steps; ++k) {
        BarrierWait(&ring_.empty[stage], parity);
        if (lane() == 0) {
          if (k == 0) ring_.tokens[stage] = p.tokens;
          BarrierExpectBytes(&ring_.full[stage],
                             kGroups * Ring::kTileBytes + groups * (1024 + 32) +
                                 (k == 0 ? kGroups * 64 : 0) +
                                 (kPairs && k == num_steps - 1 ? groups * 32 : 0));
        }
        __syncwarp();
        if (copy.bytes != 0 && (copy.only == -1 || copy.only == k)) {
          const uint32_t to = copy.to + static_cast<uint32_t>(stage) * copy.stage_bytes;
          if (kCluster > 1 && lane() == kGroups) {
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
      const uint8_t* const low = ring_.largest[stage_][LowTile()];
      const uint8_t* const high = ring_.largest[stage_][HighTile()];
      row_max_[0] = low[LowRow()] * 0x01010101u;
      row_max_[1] = high[HighRow()] * 0x01010101u;
      if constexpr (kMaxTokens <= 64) {
        if (tokens.num_rows <= 8) {
          MultiplyTile<8>(i, tokens);
        } else if (tokens.num_rows <= 16) {
          MultiplyTile<16>(i, tokens);
        } else if (tokens.num_rows <= 32) {
          MultiplyTile<32>(i, tokens);
        } else {
          MultiplyTile<64>(i, tokens);
        }
      } else {
        switch ((tokens.num_rows + 31) / 32) {
          case 1:
            MultiplyTile<32>(i, tokens);
            break;
          case 2:
            MultiplyTile<64>(i, tokens);
            break;
          case 3:
            MultiplyTile<96>(i, tokens);
            break;
          case 4:
            MultiplyTile<128>(i, tokens);
            break;
          case 5:
            MultiplyTile<160>(i, tokens);
            break;
          case 6:
            MultiplyTile<192>(i, tokens);
            break;
          default:
            MultiplyTile<224>(i, tokens);
        }
      }
    }
  }

  template <int kTokens>
  __device__ __forceinline__ void MultiplyTile(int index, const ExpertTile& tokens) {
    float d[kTokens / 2] = {};
    int last = -1;
    for (int left = work_.num_steps();; --left) {
      AddStep<kTokens>(last, d);
      if (left == 1) break;
      last = stage_;
      Advance();
    }
    const float low = Ue8m0Value(row_max_[0] & 255u) * 0x1p-6f;
    const float high = Ue8m0Value(row_max_[1] & 255u) * 0x1p-6f;
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) d[j] *= j % 4 < 2 ? low : high;
    work_.template Write<kTokens>(index, tokens, d, ring_.pair_weights[stage_]);
    Release(stage_, true);
    Advance();
  }

  __device__ void Advance() {
    if (++stage_ == kStages) stage_ = 0, parity_ ^= 1;
  }
  // Where `any`. Of two groups without a fence: what was loaded from the stage last has been used,
  // and a warp's loads from shared memory come in their order, so that none is under way.
  __device__ void Release(int stage, bool any) {
    if constexpr (kCluster == 1) {
      if (any) WarpHandBack(&ring_.empty[stage]);
    } else {
      __syncwarp();
      const auto block = static_cast<uint32_t>(lane() % kCluster);
      ReleaseAt(&ring_.empty[stage], block, any && lane() < kCluster * kWarpArrivals);
      if (kWarpArrivals > 1) ReleaseAt(&ring_.empty[stage], block ^ 1, any);
    }
  }

  __device__ static uint32_t InRegister(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  // The row tiles that rows g and g + 8 of this thread's are of, and the rows in them.
  __device__ int LowTile() const {
    if (kPairs) return kGroups == 2 ? 0 : static_cast<int>(thread_) / 256;
    return static_cast<int>(thread_) / 128;
  }
  __device__ int HighTile() const { return LowTile() + kPairsApart; }
  __device__ int LowRow() const {
    const int thread = static_cast<int>(thread_), warp = thread / 32;
    return (kPairs ? warp % 8 * 8 : warp % 4 * 16) + thread % 32 / 4;
  }
  __device__ int HighRow() const { return kPairs ? LowRow() : LowRow() + 8; }
  // From a thread's codes and scales of row g to those of row g + 8.
  static constexpr int kPairsApart = kPairs ? kGroups / 2 : 0;  // tiles
  static constexpr int kHighBytes = kPairsApart * Ring::kTileBytes;
  static constexpr int kHighScales = kPairs ? kHighBytes : 8 * 4;
  // Whose chunks of a tile this thread reads.
  __device__ int Fragment() const {
    const int thread = static_cast<int>(thread_), warp = thread / 32;
    return (kPairs ? warp % 8 / 2 : warp % 4) * 32 + thread % 32;
  }

  // Where a stage's codes and scales of row g and the tokens' scales begin for this thread, in
  // bytes.
  __device__ uint32_t CodesPlace() const {
    return static_cast<uint32_t>(LowTile() * Ring::kTileBytes + Fragment() * 16);
  }
  __device__ uint32_t ScalesPlace() const {
    return static_cast<uint32_t>(LowTile() * Ring::kTileBytes + 4096 + LowRow() * 4);
  }
  __device__ uint32_t XScalesPlace() const { return thread_ % 4 * 8; }

  // The codes of rows g and g + 8: [row][32 columns].
  __device__ void LoadCodes(uint32_t (&words)[2][4]) const {
    const std::byte* const low =
        ring_.weights[stage_][0] + (kGroups == 2 ? codes_at_ : CodesPlace());
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint4 chunk = reinterpret_cast<const uint4*>(low)[c * 128];
      if constexpr (kPairs) {
        const uint4 other = reinterpret_cast<const uint4*>(low + kHighBytes)[c * 128];
        const bool second = odd_warp_ != 0;
        words[0][2 * c] = second ? chunk.y : chunk.x;
        words[0][2 * c + 1] = second ? chunk.w : chunk.z;
        words[1][2 * c] = second ? other.y : other.x;
        words[1][2 * c + 1] = second ? other.w : other.z;
      } else {
        words[0][2 * c] = chunk.x, words[1][2 * c] = chunk.y;
        words[0][2 * c + 1] = chunk.z, words[1][2 * c + 1] = chunk.w;
      }
    }
  }

  __device__ __forceinline__ void Expand(uint32_t (&a)[4][4]) const {
    uint32_t words[2][4];
    LoadCodes(words);
    const std::byte* const scales =
        ring_.weights[stage_][0] + (kGroups == 2 ? scales_at_ : ScalesPlace());
    const uint32_t below[2] = {
        row_max_[0] - *reinterpret_cast<const uint32_t*>(scales),
        row_max_[1] - *reinterpret_cast<const uint32_t*>(scales + kHighScales)};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint2 codes = ring_.codes[below[r] >> (8 * q) & 255u];
        ExpandFp4(words[r][q], codes.x, codes.y, a[q][r], a[q][r + 2]);
      }
    }
  }

  // One column block, a chunk of the tokens at a time, the next one multiplied while this is added.
  // last: the stage of the block before, if any, handed back here, while products are under way.
  template <int kTokens>
  __device__ __forceinline__ void AddStep(int last, float (&d)[kTokens / 2]) {
    BarrierWait(&ring_.full[stage_], parity_);
    uint32_t a[4][4];
    Expand(a);
    __syncwarp();
    float even[kChunk<kTokens> / 2], odd[kChunk<kTokens> / 2];
    float2 scales[kChunk<kTokens> / 8];
    LoadScales<0>(scales);
    Start<kTokens, 0>(a, even);
    Release(max(last, 0), last >= 0);
    AddChunks<kTokens, 0>(a, even, odd, scales, d);
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
    const auto* const from = reinterpret_cast<const std::byte*>(ring_.x_scales[stage_] + kAt) +
                             (kGroups == 2 ? x_scales_at_ : XScalesPlace());
#pragma unroll
    for (int j = 0; j < kEights; ++j) scales[j] = *reinterpret_cast<const float2*>(from + j * 32);
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
    ReadyRegisters(product);
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      float* sums = d + kAt / 2 + 4 * j;
      sums[0] += product[4 * j] * scales[j].x;
      sums[1] += product[4 * j + 1] * scales[j].y;
      sums[2] += product[4 * j + 2] * scales[j].x;
      sums[3] += product[4 * j + 3] * scales[j].y;
    }
    if constexpr (kNext < kTokens) AddChunks<kTokens, kNext>(a, other, product, ahead, d);
  }

  Ring& ring_;
  Work& work_;
  const int first_, stride_;
  int stage_ = 0;
  uint32_t parity_ = 0;
  // In registers: from threadIdx, which takes long to read, the compiler would make them at every
  // use. The last three only of two groups: of four there are none left.
  const uint32_t thread_ = InRegister(threadIdx.x);
  const uint32_t odd_warp_ = InRegister(threadIdx.x / 32 % 2);
  const uint32_t codes_at_ = kGroups == 2 ? InRegister(CodesPlace()) : 0;
  const uint32_t scales_at_ = kGroups == 2 ? InRegister(ScalesPlace()) : 0;
  const uint32_t x_scales_at_ = kGroups == 2 ? InRegister(XScalesPlace()) : 0;
  uint32_t row_max_[2] = {};  // the largest scales of rows g and g + 8, in all four bytes
};

}  // namespace fathom::kernels
