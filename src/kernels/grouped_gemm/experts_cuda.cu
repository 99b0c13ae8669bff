#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/gemm_sm90.cuh"
#include "kernels/grouped_gemm/experts_cuda.h"
#include "kernels/grouped_gemm/experts_large.h"
#include "kernels/grouped_gemm/experts_stream_cuda.h"
#include "kernels/grouped_gemm/swiglu.cuh"

namespace fathom::kernels {
namespace {

constexpr int kMaxSplit = 8;
constexpr int64_t kTargetBlocks = 264;  // what runs at once
constexpr int kShared = -1;             // as an expert's id

// Which tiles a launch computes: the shared expert's first, then the plan's.
struct Scope {
  int num_shared_tiles;
  bool routed;
  int split;
};

// What a block's tokens are; expert kShared, or num_rows 0: nothing to do.
__device__ ExpertTile FindTile(const CudaExpertParams& p, const Scope& scope, int tile_rows) {
  const int y = static_cast<int>(blockIdx.y);
  if (y < scope.num_shared_tiles) {
    const int first = y * tile_rows;
    return {kShared, first / 8, first / 8,
            static_cast<int>(min(int64_t{tile_rows}, p.num_tokens - first))};
  }
  WaitForPredecessor();
  const int i = y - scope.num_shared_tiles;
  if (i >= *p.plan.num_tiles) return {0, 0, 0, 0};
  return p.plan.tiles[i];
}

// The product of a matrix of `rows` rows and one tile of tokens.
template <int kRowTiles>
__device__ TileProduct MakeProduct(const ExpertTiles& w, const std::byte* tiles,
                                   const uint8_t* scales, int64_t rows, int64_t cols,
                                   const ExpertTile& tile, int row_block, const Fp8Tiles& x,
                                   int x_group, int rank, int split) {
  const int col_blocks = static_cast<int>(cols / 128);
  const int64_t row_tile_bytes = col_blocks * TileMatrixBytes(w.kind);
  const int64_t expert = max(tile.expert, 0);
  const int per_rank = (col_blocks + split - 1) / split;
  return {.kind = w.kind,
          .weights = tiles + (expert * (rows / 64) + row_block * kRowTiles) * row_tile_bytes,
          .row_tile_bytes = row_tile_bytes,
          .scales = w.kind == TileKind::kFp4
                        ? nullptr
                        : scales + (expert * (rows / 128) + row_block * kRowTiles / 2) * col_blocks,
          .scales_stride = col_blocks,
          .x = reinterpret_cast<const std::byte*>(x.codes) + int64_t{x_group} * kTileBytes,
          .x_scales = x.scales + x_group * 8,
          .x_block_bytes = x.row_groups * kTileBytes,
          .x_scales_stride = x.row_groups * 8,
          .first_block = rank * per_rank,
          .num_blocks = max(0, min(per_rank, col_blocks - rank * per_rank))};
}

// t = b(weight * silu(gate) * up) of 128 columns, as FP8: one warp a row.
template <typename Multiplier>
__device__ void WriteIntermediate(const CudaExpertParams& p, const ExpertTile& tile, int column0,
                                  const float* out, int split, int rank) {
  constexpr int kWarps = Multiplier::kConsumers / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int r = warp + rank * kWarps; r < tile.num_rows; r += kWarps * split) {
    const int64_t row = int64_t{tile.pair_group} * 8 + r;
    const float weight = tile.expert == kShared ? 1.0f : p.plan.pair_weight[row];
    const float* sums = out + r * Multiplier::Shared::kOutStride + lane * 4;
    float v[4];
    for (int i = 0; i < 4; ++i) {
      v[i] = Intermediate(ClusterSum(sums + i, split), ClusterSum(sums + 128 + i, split), weight,
                          p.swiglu_limit);
    }
    const float largest =
        WarpMax(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
    const uint32_t scale = Fp8Scale(largest);
    const float inverse = Ue8m0Inverse(scale);
    const uint32_t codes =
        Fp8Codes(v[0] * inverse, v[1] * inverse) | Fp8Codes(v[2] * inverse, v[3] * inverse) << 16;
    *reinterpret_cast<uint32_t*>(p.t.codes +
                                 Fp8TileOffset(row, column0 + lane * 4, p.t.row_groups)) = codes;
    if (lane == 0) p.t.scales[column0 / 128 * p.t.row_groups * 8 + row] = Ue8m0Value(scale);
  }
}

template <typename Multiplier>
__device__ void WriteOutputs(const CudaExpertParams& p, const ExpertTile& tile, int column0,
                             const float* out, int split, int rank) {
  constexpr int kPairs = Multiplier::kRowTiles * 32;
  for (int i = static_cast<int>(threadIdx.x) + rank * Multiplier::kConsumers;
       i < tile.num_rows * kPairs; i += Multiplier::kConsumers * split) {
    const int r = i / kPairs, column = i % kPairs * 2;
    const float* sums = out + r * Multiplier::Shared::kOutStride + column;
    const int64_t row = int64_t{tile.pair_group} * 8 + r;
    *reinterpret_cast<__nv_bfloat162*>(p.y + row * p.y_stride + column0 + column) =
        __floats2bfloat162_rn(ClusterSum(sums, split), ClusterSum(sums + 1, split));
  }
}

// kGateUp: w1 and w3 of 128 columns of t; else w2.
template <bool kGateUp, int kN, int kWarpgroups, int kTiles, int kBlocks, int kStages>
__global__ void __launch_bounds__(
    (TileMultiplier<kN, kWarpgroups, kTiles, kBlocks, kStages, false>::kThreads), 1)
    ExpertKernel(const __grid_constant__ CudaExpertParams p, const Scope scope) {
  using Multiplier = TileMultiplier<kN, kWarpgroups, kTiles, kBlocks, kStages, false>;
  constexpr int kRowTiles = Multiplier::kRowTiles;
  extern __shared__ __align__(1024) std::byte shared[];
  auto& ring = *reinterpret_cast<typename Multiplier::Shared*>(shared);
  const ExpertTile tile = FindTile(p, scope, kN);
  if (tile.num_rows == 0) return;
  Multiplier multiplier(ring);
  multiplier.Init();

  const int row_block = static_cast<int>(blockIdx.x) / scope.split;
  const int rank = static_cast<int>(blockIdx.x) % scope.split;
  const ExpertTiles& w = tile.expert == kShared ? p.shared : p.routed;
  const bool gathered = tile.expert != kShared && p.num_tokens > kDirectTokens;
  const TileProduct product =
      kGateUp ? MakeProduct<kRowTiles>(w, w.gate_up, w.gate_up_scales, 2 * p.intermediate, p.hidden,
                                       tile, row_block, gathered ? p.gathered : p.x, tile.x_group,
                                       rank, scope.split)
              : MakeProduct<kRowTiles>(w, w.down, w.down_scales, p.hidden, p.intermediate, tile,
                                       row_block, p.t, tile.pair_group, rank, scope.split);
  const bool consumer = threadIdx.x < Multiplier::kConsumers;
  if (consumer) {
    typename Multiplier::Sums d;
    multiplier.Consume(product, d);
    multiplier.StoreSums(d);
  } else {
    multiplier.Produce(product);
    __syncwarp();
  }
  if (scope.split > 1) ClusterSync();
  if (consumer) {
    if constexpr (kGateUp) {
      static_assert(kRowTiles == 4);
      WriteIntermediate<Multiplier>(p, tile, row_block * 128, ring.out(), scope.split, rank);
    } else {
      WriteOutputs<Multiplier>(p, tile, row_block * kRowTiles * 64, ring.out(), scope.split, rank);
    }
  }
  if (scope.split > 1) ClusterSync();
}

template <bool kGateUp, int kN, int kWarpgroups, int kTiles, int kBlocks, int kStages>
void Run(const CudaExpertParams& p, Scope scope, device::Stream& stream) {
  using Multiplier = TileMultiplier<kN, kWarpgroups, kTiles, kBlocks, kStages, false>;
  const int64_t rows = kGateUp ? 2 * p.intermediate : p.hidden;
  const int64_t cols = kGateUp ? p.hidden : p.intermediate;
  CHECK_EQ(rows % (Multiplier::kRowTiles * 64), 0);
  const int64_t row_blocks = rows / (Multiplier::kRowTiles * 64);
  const int64_t tiles =
      scope.num_shared_tiles +
      (scope.routed ? MaxExpertTiles(p.num_tokens, p.num_experts, p.num_chosen) : 0);
  scope.split = 1;
  while (scope.split < kMaxSplit && row_blocks * tiles * scope.split * 2 <= kTargetBlocks &&
         cols / 128 / (scope.split * 2) >= 2) {
    scope.split *= 2;
  }
  LaunchClusters(
      ExpertKernel<kGateUp, kN, kWarpgroups, kTiles, kBlocks, kStages>,
      dim3(static_cast<unsigned>(row_blocks * scope.split), static_cast<unsigned>(tiles)),
      static_cast<unsigned>(scope.split), dim3(Multiplier::kThreads),
      sizeof(typename Multiplier::Shared), stream, p, scope);
}

template <bool kGateUp, int kN>
void RunTiles(const CudaExpertParams& p, const Scope& scope, device::Stream& stream) {
  if constexpr (kGateUp) {
    Run<true, kN, 2, 2, 1, kN == 64 ? 4 : 3>(p, scope, stream);
  } else if (kN == 64 && p.hidden % 256 == 0) {
    Run<false, kN, 2, 2, 1, kN == 64 ? 4 : 3>(p, scope, stream);
  } else {
    Run<false, kN, 2, 1, 2, 3>(p, scope, stream);
  }
}

int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

template <bool kGateUp>
void RunStream(const CudaExpertParams& p, int tile_rows, const ExpertScope& scope,
               device::Stream& stream) {
  kGateUp ? LaunchGateUpStream(p, tile_rows, scope, stream)
          : LaunchDownStream(p, tile_rows, scope, stream);
}

template <bool kGateUp>
void RunProduct(const CudaExpertParams& p, device::Stream& stream) {
  if (p.num_tokens == 0) return;
  CHECK_EQ(p.hidden % 128, 0);
  CHECK_EQ(p.intermediate % 128, 0);
  CHECK_LE(std::max(p.hidden, p.intermediate) / 128, kMaxColBlocks);
  if (p.prefill || p.num_tokens >= kLargeExpertTokens) {
    return kGateUp ? LaunchGateUpLarge(p, stream) : LaunchDownLarge(p, stream);
  }
  if (p.num_tokens <= kDirectTokens) {
    return RunStream<kGateUp>(
        p, 8, {.num_shared_tiles = 1, .routed = true, .plan_is_early = !kGateUp}, stream);
  }
  // The shared expert has all tokens, a routed one few: tiles of other sizes.
  const int shared_rows = p.num_tokens <= 16 ? 16 : p.num_tokens <= 32 ? 32 : 64;
  const int shared_tiles = CeilDiv(p.num_tokens, shared_rows);
  if (shared_rows == 16) {
    RunStream<kGateUp>(p, 16, {.num_shared_tiles = shared_tiles}, stream);
  } else {
    const Scope shared{.num_shared_tiles = shared_tiles, .routed = false, .split = 1};
    shared_rows == 32 ? RunTiles<kGateUp, 32>(p, shared, stream)
                      : RunTiles<kGateUp, 64>(p, shared, stream);
  }
  const int rows = ExpertTileRows(p.num_tokens);
  if (rows <= kMaxStreamRows) {
    RunStream<kGateUp>(p, rows, {.routed = true, .plan_is_early = true}, stream);
  } else {
    RunTiles<kGateUp, 32>(p, {.num_shared_tiles = 0, .routed = true, .split = 1}, stream);
  }
}

}  // namespace

void LaunchGateUp(const CudaExpertParams& p, device::Stream& stream) {
  RunProduct<true>(p, stream);
}
void LaunchDown(const CudaExpertParams& p, device::Stream& stream) { RunProduct<false>(p, stream); }

}  // namespace fathom::kernels
