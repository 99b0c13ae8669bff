#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/gemm_large.h"
#include "kernels/gemm/gemm_sm90.cuh"
#include "kernels/gemm/gemm_stream_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int kMaxSplit = 8;
constexpr int64_t kTargetBlocks = 264;  // what runs at once: two on each of 132 multiprocessors
constexpr int64_t kMinSplitBlocks = 4;  // column blocks of 128 that are worth a block

struct Grid {
  int first_tile[kMaxGemmProblems + 1];  // of each problem, in tiles of rows
  int split;
};

// The part of one problem that a block computes.
struct Place {
  const GemmProblem& problem;
  int64_t row0;
  int64_t token0;
};

template <typename Multiplier>
__device__ void WriteRows(const Place& at, const float* out, int64_t tokens, int split, int rank) {
  constexpr int kPairs = Multiplier::kConsumers / 4;  // of rows: 64 a warpgroup
  constexpr int kStride = Multiplier::Shared::kOutStride;
  const GemmProblem& p = at.problem;
  for (int64_t i = threadIdx.x + rank * Multiplier::kConsumers; i < tokens * kPairs;
       i += Multiplier::kConsumers * split) {
    const int64_t t = i / kPairs;
    const int row = static_cast<int>(i % kPairs) * 2;
    if (at.row0 + row >= p.w.rows) continue;
    const float a = ClusterSum(out + t * kStride + row, split);
    const float b = ClusterSum(out + t * kStride + row + 1, split);
    const int64_t offset = (at.token0 + t) * p.y_stride + at.row0 + row;
    if (p.output == GemmOutput::kBf16) {
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.y) + offset) =
          __floats2bfloat162_rn(a, b);
    } else {
      *reinterpret_cast<float2*>(static_cast<float*>(p.y) + offset) = {a, b};
    }
  }
}

// One warp a token: 128 rows are one block of FP8 columns of y.
template <typename Multiplier>
__device__ void WriteFp8(const Place& at, const float* out, int64_t tokens, int split, int rank) {
  constexpr int kWarps = Multiplier::kConsumers / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Fp8Tiles& y = at.problem.y_fp8;
  for (int64_t t = warp + rank * kWarps; t < tokens; t += kWarps * split) {
    const float* row = out + t * Multiplier::Shared::kOutStride + lane * 4;
    float v[4];
    for (int i = 0; i < 4; ++i) v[i] = RoundBf16(ClusterSum(row + i, split));
    const float largest =
        WarpMax(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
    const uint32_t scale = Fp8Scale(largest);
    const float inverse = Ue8m0Inverse(scale);
    const uint32_t codes =
        Fp8Codes(v[0] * inverse, v[1] * inverse) | Fp8Codes(v[2] * inverse, v[3] * inverse) << 16;
    const int64_t token = at.token0 + t;
    *reinterpret_cast<uint32_t*>(y.codes + Fp8TileOffset(token, at.row0 + lane * 4, y.row_groups)) =
        codes;
    if (lane == 0) y.scales[at.row0 / 128 * y.row_groups * 8 + token] = Ue8m0Value(scale);
  }
}

template <int kN, int kRowTiles, int kBlocks, int kStages, bool kWideX>
__global__ void __launch_bounds__(
    (TileMultiplier<kN, kRowTiles, 1, kBlocks, kStages, kWideX>::kThreads), 1)
    GemmKernel(const __grid_constant__ CudaGemmParams params, const __grid_constant__ Grid grid) {
  using Multiplier = TileMultiplier<kN, kRowTiles, 1, kBlocks, kStages, kWideX>;
  extern __shared__ __align__(1024) std::byte shared[];
  auto& ring = *reinterpret_cast<typename Multiplier::Shared*>(shared);
  Multiplier multiplier(ring);
  multiplier.Init();

  const int tile = static_cast<int>(blockIdx.x) / grid.split;
  const int rank = static_cast<int>(blockIdx.x) % grid.split;
  int index = 0;
  while (tile >= grid.first_tile[index + 1]) ++index;
  const GemmProblem& p = params.problems[index];
  const int64_t row_tile = int64_t{tile - grid.first_tile[index]} * kRowTiles;
  const Place at{p, row_tile * kTileMatrixRows, int64_t{blockIdx.y} * kN};

  const auto col_blocks = static_cast<int>(p.w.col_blocks());
  const int per_rank = (col_blocks + grid.split - 1) / grid.split;
  const bool fp8_x = p.w.kind == TileKind::kFp8;
  const int64_t row_groups = fp8_x ? p.x_fp8.row_groups : p.x_bf16.row_groups;
  const int64_t group = p.groups == 1 ? 0 : at.row0 / (p.w.rows / p.groups);
  const int64_t x_block = group * col_blocks * (kWideX ? 2 : 1);
  const int64_t row_tile_bytes = col_blocks * TileMatrixBytes(p.w.kind);
  const std::byte* x = fp8_x ? reinterpret_cast<const std::byte*>(p.x_fp8.codes)
                             : reinterpret_cast<const std::byte*>(p.x_bf16.values);
  const TileProduct product{
      .kind = p.w.kind,
      .weights = p.w.tiles + row_tile * row_tile_bytes,
      // The last block of an odd number of tiles reads its first one twice.
      .row_tile_bytes = row_tile + 1 < p.w.row_tiles() ? row_tile_bytes : 0,
      .scales = p.w.scales == nullptr ? nullptr : p.w.scales + at.row0 / 128 * col_blocks,
      .scales_stride = col_blocks,
      .x = x + (x_block * row_groups + at.token0 / 8) * kTileBytes,
      .x_scales = fp8_x ? p.x_fp8.scales + x_block * row_groups * 8 + at.token0 : nullptr,
      .x_block_bytes = row_groups * kTileBytes,
      .x_scales_stride = row_groups * 8,
      .first_block = rank * per_rank,
      .num_blocks = max(0, min(per_rank, col_blocks - rank * per_rank))};

  const bool consumer = threadIdx.x < Multiplier::kConsumers;
  if (consumer) {
    typename Multiplier::Sums d;
    multiplier.Consume(product, d);
    multiplier.StoreSums(d);
  } else {
    multiplier.Produce(product);
    __syncwarp();
  }
  if (grid.split > 1) ClusterSync();
  if (consumer) {
    const int64_t tokens = min(int64_t{kN}, params.num_tokens - at.token0);
    if (p.output == GemmOutput::kFp8Tiles) {
      if constexpr (kRowTiles == 2) {
        WriteFp8<Multiplier>(at, ring.out(), tokens, grid.split, rank);
      }
    } else {
      WriteRows<Multiplier>(at, ring.out(), tokens, grid.split, rank);
    }
  }
  if (grid.split > 1) ClusterSync();  // a block's sums are read until here
}

template <int kN, int kRowTiles, int kBlocks, int kStages, bool kWideX>
void Run(const CudaGemmParams& params, device::Stream& stream) {
  using Multiplier = TileMultiplier<kN, kRowTiles, 1, kBlocks, kStages, kWideX>;
  Grid grid{};
  int64_t smallest = kMaxColBlocks;  // columns of a problem, in 128
  for (int i = 0; i < params.num_problems; ++i) {
    const TiledMatrix& w = params.problems[i].w;
    const int64_t tiles = (w.row_tiles() + kRowTiles - 1) / kRowTiles;
    grid.first_tile[i + 1] = grid.first_tile[i] + static_cast<int>(tiles);
    smallest = std::min(smallest, w.cols / 128);
  }
  for (int i = params.num_problems; i < kMaxGemmProblems; ++i) {
    grid.first_tile[i + 1] = grid.first_tile[i];
  }
  const int64_t tiles = grid.first_tile[params.num_problems];
  const int64_t token_tiles = (params.num_tokens + kN - 1) / kN;
  grid.split = 1;
  while (grid.split < kMaxSplit && tiles * token_tiles * grid.split * 2 <= kTargetBlocks &&
         smallest / (grid.split * 2) >= kMinSplitBlocks) {
    grid.split *= 2;
  }
  LaunchClusters(
      GemmKernel<kN, kRowTiles, kBlocks, kStages, kWideX>,
      dim3(static_cast<unsigned>(tiles * grid.split), static_cast<unsigned>(token_tiles)),
      static_cast<unsigned>(grid.split), dim3(Multiplier::kThreads),
      sizeof(typename Multiplier::Shared), stream, params, grid);
}

void Check(const CudaGemmParams& params) {
  CHECK_LE(params.num_problems, kMaxGemmProblems);
  for (int i = 0; i < params.num_problems; ++i) {
    const GemmProblem& p = params.problems[i];
    CHECK(p.w.kind != TileKind::kFp4);
    CHECK_EQ(p.w.cols % TileMatrixCols(p.w.kind), 0);
    CHECK_LE(p.w.col_blocks(), kMaxColBlocks);
    CHECK_EQ(p.w.rows % (2 * p.groups), 0);
    CHECK(params.mirrors.count == 0 || (params.prefill && p.w.rows % 128 == 0 &&
                                        p.output != GemmOutput::kF32 && p.y_stride % 8 == 0));
    CHECK(p.groups == 1 || p.w.rows / p.groups % 128 == 0);
    CHECK(p.output != GemmOutput::kFp8Tiles ||
          (p.w.rows % 128 == 0 && p.w.kind == TileKind::kFp8AsBf16));
    CHECK_EQ(p.w.kind == TileKind::kFp8AsBf16, params.problems[0].w.kind == TileKind::kFp8AsBf16);
  }
}

}  // namespace

void Launch(const CudaGemmParams& params, device::Stream& stream) {
  if (params.num_tokens == 0) return;
  Check(params);
  if (IsLarge(params)) return LaunchLarge(params, stream);
  if (params.num_tokens <= kMaxStreamTokens) return LaunchGemmStream(params, stream);
  const int64_t rows = PaddedTokens(params.num_tokens);
  const bool wide = params.problems[0].w.kind == TileKind::kFp8AsBf16;
  if (rows == 64) {
    return wide ? Run<64, 2, 1, 4, true>(params, stream) : Run<64, 1, 2, 4, false>(params, stream);
  }
  wide ? Run<128, 2, 1, 4, true>(params, stream) : Run<128, 2, 1, 5, false>(params, stream);
}

}  // namespace fathom::kernels
