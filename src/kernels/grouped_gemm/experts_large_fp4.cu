// Narrow tiles: 256 weight rows a block, so that a block makes all 128 columns of t that share FP8
// scales. Wide ones: 128 weight rows a block, and a cluster of two makes the 128 columns. Whoever
// has columns of a token tells the others the largest magnitude of them.
//   A launch for the wide tiles, if there may be any, and one for the narrow ones. That runs beside
// the last blocks of the launch before, be it the wide tiles' or the shared expert's, which has
// waited for what both read. (The wide tiles beside the shared expert's took 2% longer.)
#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/gemm_large_sm90.cuh"
#include "kernels/gemm/large_output.cuh"
#include "kernels/grouped_gemm/experts_large.h"
#include "kernels/grouped_gemm/fp4_multiplier.cuh"
#include "kernels/grouped_gemm/swiglu.cuh"

namespace fathom::kernels {
namespace {

__device__ int Thread() { return static_cast<int>(threadIdx.x) % 128; }
__device__ int Group() { return static_cast<int>(threadIdx.x) / 128; }
__device__ int Warp() { return Thread() / 32; }
__device__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }

// In the cluster.
template <int kRowTiles>
__device__ int Rank() {
  return Fp4Cluster(kRowTiles) == 1 ? 0 : static_cast<int>(ClusterRank());
}

constexpr bool IsNarrow(int row_tiles) { return row_tiles == 4; }

template <int kRowTiles>
struct Work {
  const CudaExpertParams& p;
  const int row_blocks;  // of a tile
  const int first_tile = IsNarrow(kRowTiles) ? p.plan.num_tiles[1] : 0;
  const int num_tiles = p.plan.num_tiles[IsNarrow(kRowTiles) ? 0 : 1] - first_tile;

  __device__ int count() const { return num_tiles * row_blocks; }
  __device__ int row_block(int index) const { return index % row_blocks; }
  __device__ const ExpertTile& tokens(int index) const {
    return p.plan.tiles[first_tile + index / row_blocks];
  }

  __device__ Fp4Product<kRowTiles> Make(const ExpertTile& tokens, const Fp8Tiles& x,
                                        int x_group) const {
    return {.tokens = tokens,
            .x = reinterpret_cast<const std::byte*>(x.codes) + int64_t{x_group} * kTileBytes,
            .x_scales = x.scales + x_group * 8,
            .x_block_bytes = x.row_groups * kTileBytes,
            .pair_weights = p.plan.pair_weight + int64_t{tokens.pair_group} * 8};
  }
};

template <int kRowTiles, int kMaxTokens, int kStages>
struct Fp4GateUp : Work<kRowTiles> {
  using Base = Work<kRowTiles>;
  using Ring = Fp4Ring<kRowTiles, kMaxTokens, kStages>;
  static constexpr int kBlocks = Fp4Cluster(kRowTiles);  // that make 128 columns of t
  static constexpr int kEach = Ring::kEach;
  static constexpr int kColumns = kEach * 32;  // of a warpgroup
  Ring& ring;
  uint32_t written = 0;

  __device__ int num_steps() const { return static_cast<int>(this->p.hidden / 128); }

  __device__ Fp4Product<kRowTiles> product(int index) const {
    const CudaExpertParams& p = this->p;
    const ExpertTile& tokens = this->tokens(index);
    Fp4Product<kRowTiles> product = this->Make(tokens, p.gathered, tokens.x_group);
    const int64_t bytes = p.hidden / 128 * Ring::kTileBytes;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const int64_t row_tile = tokens.expert * (p.intermediate / 32) + this->row_block(index) * 4 +
                               i * kBlocks + Rank<kRowTiles>();
      product.weights[i] = p.routed.gate_up + row_tile * bytes;
      product.largest[i] = p.routed.gate_up_largest + row_tile * 64;
    }
    return product;
  }

  // t = b(weight * silu(gate) * up) as FP8.
  template <int kTokens>
  __device__ __forceinline__ void Write(int index, const ExpertTile& tokens,
                                        const float (&d)[kEach][kTokens / 2],
                                        const float* pair_weights) {
    NamedBarrier(1 + Group(), 128);  // the last product's values have been read
#pragma unroll
    for (int i = 0; i < kEach; ++i) Activate<kTokens>(d[i], pair_weights, i);
    NamedBarrier(1 + Group(), 128);
    const int turn = written & 1;
    float (&all)[4 / kEach][kMaxTokens] = ring.row_largest[turn];
    const int part = Rank<kRowTiles>() * kFp4Warpgroups + Group();
    uint64_t* const exchange = &ring.exchange[turn];
    if (threadIdx.x == 0) {  // what comes from the other block
      BarrierExpectBytes(exchange, (kBlocks - 1) * kFp4Warpgroups * tokens.num_rows * 4);
    }
#pragma unroll
    for (int token = Thread(); token < kMaxTokens; token += 128) {
      if (token >= tokens.num_rows) continue;
      const float largest = all[part][token] = Largest(token);
      if (kBlocks > 1) SendToBlock(&all[part][token], largest, exchange, Rank<kRowTiles>() ^ 1);
    }
    WarpArrive(exchange);
    BarrierWait(exchange, written / 2 & 1);
    ++written;
    const int64_t column = this->row_block(index) * int64_t{128} + part * kColumns;
#pragma unroll
    for (int first = 0; first < kMaxTokens; first += 64) {
      const int token = first + Warp() * 16 + TokenOfLane();
      if (token >= tokens.num_rows) continue;
      float largest = 0;
#pragma unroll
      for (int i = 0; i < 4 / kEach; ++i) largest = fmaxf(largest, all[i][token]);
      WriteHalfRow(int64_t{tokens.pair_group} * 8 + token, token, column, Fp8Scale(largest));
    }
  }

  // Two lanes write 32 columns of a token, so that these are one sector, here and in other ranks'
  // memory. Of 16 tokens: eight lanes have four whose rows in Ring::out lie in different banks.
  __device__ static int TokenOfLane() {
    const int pair = Lane() / 2;
    return pair % 2 + pair / 2 % 2 * 4 + pair / 4 % 2 * 2 + pair / 8 * 8;
  }

  __device__ std::byte* Out(int token) const {
    return ring.out[Group()] + token * Ring::kPairRowBytes;
  }

  // The eight columns of t that are this warp's of the product, of all tokens.
  template <int kTokens>
  __device__ void Activate(const float (&d)[kTokens / 2], const float* pair_weights,
                           int product) const {
    const float limit = this->p.swiglu_limit;
#pragma unroll
    for (int j = 0; j < kTokens / 8; j += 4) {
      uint32_t values[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (j + i >= kTokens / 8) continue;
        const float* sums = d + 4 * (j + i);
        const float2 w =
            *reinterpret_cast<const float2*>(pair_weights + (j + i) * 8 + Lane() % 4 * 2);
        values[i] = PackBf16(Intermediate(sums[0], sums[2], w.x, limit),
                             Intermediate(sums[1], sums[3], w.y, limit));
      }
      StoreTransposed(SharedAddress(Out(j * 8 + Lane())) + (Warp() * kEach + product) * 16, values);
    }
  }

  // Of this warpgroup's columns.
  __device__ float Largest(int token) const {
    const auto* chunks = reinterpret_cast<const uint4*>(Out(token));
    __nv_bfloat162 largest{};
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
      const uint4 chunk = chunks[c];
      for (const uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w}) {
        largest = __hmax2(largest, __habs2(reinterpret_cast<const __nv_bfloat162&>(pair)));
      }
    }
    const float2 both = __bfloat1622float2(largest);
    return fmaxf(both.x, both.y);
  }

  // Of each 32 columns the half Lane() % 2.
  __device__ void WriteHalfRow(int64_t pair, int token, int64_t column, uint32_t scale) const {
    const Fp8Tiles& t = this->p.t;
    const Mirrors* const mirrors = &this->p.mirrors;
    const int half = Lane() % 2;
    const float inverse = Ue8m0Inverse(scale);
#pragma unroll
    for (int first = half * 16; first < kColumns; first += 32) {
      const auto* chunks = reinterpret_cast<const uint4*>(Out(token)) + first / 8;
      uint32_t codes[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 chunk = chunks[i];
        codes[2 * i] = Codes(chunk.x, inverse) | Codes(chunk.y, inverse) << 16;
        codes[2 * i + 1] = Codes(chunk.z, inverse) | Codes(chunk.w, inverse) << 16;
      }
      StoreMirrored(t.codes + Fp8TileOffset(pair, column + first, t.row_groups),
                    uint4{codes[0], codes[1], codes[2], codes[3]}, mirrors);
    }
    if (column % 128 != 0 || half != 0) return;
    StoreMirrored(&t.scales[column / 128 * t.row_groups * 8 + pair], Ue8m0Value(scale), mirrors);
  }
  __device__ static uint32_t Codes(uint32_t pair, float inverse) {
    const float2 v = UnpackBf16(pair);
    return Fp8Codes(v.x * inverse, v.y * inverse);
  }
};

template <int kRowTiles, int kMaxTokens, int kStages>
struct Fp4Down : Work<kRowTiles> {
  using Ring = Fp4Ring<kRowTiles, kMaxTokens, kStages>;
  static constexpr int kEach = Ring::kEach;
  Ring& ring;

  // The first row tile of this block's.
  __device__ int64_t RowTile(int index) const {
    return int64_t{this->row_block(index) * Fp4Cluster(kRowTiles) + Rank<kRowTiles>()} * kRowTiles;
  }

  __device__ int num_steps() const { return static_cast<int>(this->p.intermediate / 128); }

  __device__ Fp4Product<kRowTiles> product(int index) const {
    const CudaExpertParams& p = this->p;
    const ExpertTile& tokens = this->tokens(index);
    Fp4Product<kRowTiles> product = this->Make(tokens, p.t, tokens.pair_group);
    const int64_t bytes = p.intermediate / 128 * Ring::kTileBytes;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      // What is beyond the last row tile is not written.
      const int64_t tile = min(RowTile(index) + i, p.hidden / 64 - 1);
      const int64_t row_tile = tokens.expert * (p.hidden / 64) + tile;
      product.weights[i] = p.routed.down + row_tile * bytes;
      product.largest[i] = p.routed.down_largest + row_tile * 64;
    }
    return product;
  }

  // Rows of y as BF16, 64 tokens at a time.
  template <int kTokens>
  __device__ __forceinline__ void Write(int index, const ExpertTile& tokens,
                                        const float (&d)[kEach][kTokens / 2], const float*) const {
    const int64_t column = (RowTile(index) + Group() * kEach) * 64;
    std::byte* const out = ring.out[Group()];
#pragma unroll
    for (int first = 0; first < kTokens; first += 64) {
      NamedBarrier(1 + Group(), 128);  // what was there has been read
#pragma unroll
      for (int i = 0; i < kEach; ++i) Store<kTokens>(d[i], first, out + i * 128);
      NamedBarrier(1 + Group(), 128);
      CopyOut(out, int64_t{tokens.pair_group} * 8 + first, column,
              min(64, tokens.num_rows - first));
    }
  }

  // The 64 columns of a product of tokens `first` and on, up to 64.
  template <int kTokens>
  __device__ __forceinline__ static void Store(const float (&d)[kTokens / 2], int first,
                                               std::byte* out) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      if (first + j * 8 >= kTokens) continue;
      uint32_t values[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (first / 8 + j + i / 2) * 4 + i % 2 * 2;
        if (at < kTokens / 2) values[i] = PackBf16(d[at], d[at + 1]);
      }
      const int token = (j + Lane() / 16) * 8 + Lane() % 8;
      StoreTransposed(
          SharedAddress(out + token * Ring::kRowBytes + Warp() * 32 + Lane() / 8 % 2 * 16), values);
    }
  }

  __device__ void CopyOut(const std::byte* out, int64_t pair, int64_t column, int rows) const {
    constexpr int kChunks = kEach * 8;
    __nv_bfloat16* const y = this->p.y + pair * this->p.y_stride + column;
#pragma unroll 1
    for (int i = Thread(); i < rows * kChunks; i += 128) {
      const int row = i / kChunks, chunk = i % kChunks;
      if (column + chunk * 8 >= this->p.hidden) continue;
      *reinterpret_cast<uint4*>(y + row * static_cast<int>(this->p.y_stride) + chunk * 8) =
          *reinterpret_cast<const uint4*>(out + row * Ring::kRowBytes + chunk * 16);
    }
  }
};

template <int kRowTiles, int kMaxTokens, int kStages>
__global__ void __launch_bounds__(kFp4Threads, 1)
    Fp4GateUpKernel(const __grid_constant__ CudaExpertParams p) {
  using GateUp = Fp4GateUp<kRowTiles, kMaxTokens, kStages>;
  using Multiplier = Fp4Multiplier<kRowTiles, kMaxTokens, kStages, true, GateUp>;
  constexpr int kCluster = Fp4Cluster(kRowTiles);
  extern __shared__ __align__(1024) std::byte memory[];
  auto& ring = *reinterpret_cast<typename GateUp::Ring*>(memory);
  Multiplier::Init(ring);
  if (!IsNarrow(kRowTiles)) WaitForPredecessor();
  AllowSuccessor();
  const int block = static_cast<int>(blockIdx.x);
  GateUp work{{p, static_cast<int>(p.intermediate / 128)}, ring};
  Multiplier(ring, work, block / kCluster, static_cast<int>(gridDim.x) / kCluster).Run();
  if (p.mirrors.count > 0) __threadfence_system();
}

template <int kRowTiles, int kMaxTokens, int kStages>
__global__ void __launch_bounds__(kFp4Threads, 1)
    Fp4DownKernel(const __grid_constant__ CudaExpertParams p) {
  using Down = Fp4Down<kRowTiles, kMaxTokens, kStages>;
  using Multiplier = Fp4Multiplier<kRowTiles, kMaxTokens, kStages, false, Down>;
  constexpr int kCluster = Fp4Cluster(kRowTiles), kTogether = kRowTiles * kCluster;
  extern __shared__ __align__(1024) std::byte memory[];
  auto& ring = *reinterpret_cast<typename Down::Ring*>(memory);
  Multiplier::Init(ring);
  if (!IsNarrow(kRowTiles)) WaitForPredecessor();
  AllowSuccessor();
  const int block = static_cast<int>(blockIdx.x);
  Down work{{p, static_cast<int>((p.hidden / 64 + kTogether - 1) / kTogether)}, ring};
  Multiplier(ring, work, block / kCluster, static_cast<int>(gridDim.x) / kCluster).Run();
}

template <bool kGateUp, int kRowTiles, int kMaxTokens, int kStages>
void Run(const CudaExpertParams& p, device::Stream& stream) {
  constexpr auto kKernel = kGateUp ? Fp4GateUpKernel<kRowTiles, kMaxTokens, kStages>
                                   : Fp4DownKernel<kRowTiles, kMaxTokens, kStages>;
  LaunchClusters(kKernel, static_cast<unsigned>(NumMultiprocessors() / 2 * 2),
                 Fp4Cluster(kRowTiles), kFp4Threads,
                 sizeof(Fp4Ring<kRowTiles, kMaxTokens, kStages>), stream, p);
}

template <bool kGateUp>
void RunTiles(const CudaExpertParams& p, device::Stream& stream) {
  CHECK(p.plan.has_narrow);
  if (HasWideTiles(true, p.num_tokens, p.num_experts, p.num_chosen)) {
    Run<kGateUp, 2, kWideTileRows, 4>(p, stream);
  }
  Run<kGateUp, 4, kNarrowTileRows, 7>(p, stream);
}

}  // namespace

void LaunchGateUpLargeFp4(const CudaExpertParams& p, device::Stream& stream) {
  CHECK(p.routed.gate_up_largest != nullptr);
  RunTiles<true>(p, stream);
}

void LaunchDownLargeFp4(const CudaExpertParams& p, device::Stream& stream) {
  CHECK(p.routed.down_largest != nullptr);
  RunTiles<false>(p, stream);
}

}  // namespace fathom::kernels
