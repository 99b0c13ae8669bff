// One launch for the problems of a kind, or for those of FP8 and of BF16, which share out the
// multiprocessors: a block on each takes tile after tile. The tiles of 2,048 tokens follow each
// other, so that their activations stay in the L2 cache.
#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/gemm_large.h"
#include "kernels/gemm/gemm_large_sm90.cuh"
#include "kernels/gemm/item_stream.cuh"
#include "kernels/gemm/large_output.cuh"

namespace fathom::kernels {
namespace {

using enum TileKind;

// The problems of one kind, in tiles of kLargeTokens or half of them.
struct LargeProblems {
  CudaGemmParams params;
  ItemGrid grid;
};

// kMirrored: y goes to p.mirrors, too.
template <bool kMirrored>
struct GemmWork {
  const CudaGemmParams& p;
  const ItemGrid& grid;

  struct Place {
    int problem;
    int64_t row, token;
  };
  __device__ Place Locate(int index) const {
    int problem = 0;
    while (index >= grid.first[problem + 1]) ++problem;
    const int i = index - grid.first[problem];
    const int rows = (grid.first[problem + 1] - grid.first[problem]) / grid.token_tiles;
    const int near = i / (kNearItems * rows), rest = i % (kNearItems * rows);
    const int width = min(kNearItems, grid.token_tiles - near * kNearItems);
    return {problem, int64_t{rest / width} * kLargeRows,
            int64_t{near * kNearItems + rest % width} * grid.tile_tokens};
  }

  __device__ int count() const { return grid.num_items(); }

  __device__ LargeTile tile(int index) const {
    const Place at = Locate(index);
    const GemmProblem& g = p.problems[at.problem];
    const bool fp8 = g.w.kind == kFp8;
    const int64_t row_groups = fp8 ? g.x_fp8.row_groups : g.x_bf16.row_groups;
    const int64_t blocks = g.w.col_blocks(), row_tile = at.row / kTileMatrixRows;
    const int64_t first_step = g.groups == 1 ? 0 : at.row / (g.w.rows / g.groups) * blocks;
    const auto* x = fp8 ? reinterpret_cast<const std::byte*>(g.x_fp8.codes)
                        : reinterpret_cast<const std::byte*>(g.x_bf16.values);
    const std::byte* weights = g.w.tiles + row_tile * blocks * TileMatrixBytes(g.w.kind);
    // The last block of an odd number of row tiles reads its first one twice.
    const bool both = row_tile + 1 < g.w.row_tiles();
    const uint8_t* scales = g.w.scales == nullptr ? nullptr : g.w.scales + at.row / 128 * blocks;
    return {.weights = {weights, weights + (both ? blocks * TileMatrixBytes(g.w.kind) : 0)},
            .scales = {scales, scales},
            .x = x + (first_step * row_groups + at.token / 8) * kTileBytes,
            .x_scales = fp8 ? g.x_fp8.scales + at.token : nullptr,
            .x_step_bytes = row_groups * kTileBytes,
            .num_steps = static_cast<int>(blocks),
            .token_tiles = static_cast<int>(
                min(int64_t{grid.tile_tokens}, p.num_tokens - at.token + 63) / 64)};
  }

  __device__ void Write(int index, LargeSums& d) const {
    const Place at = Locate(index);
    const GemmProblem& g = p.problems[at.problem];
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int64_t end = min(p.num_tokens, at.token + grid.tile_tokens);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token_tile = static_cast<int>(threadIdx.x) / 128 + kMathWarpgroups * i;
      const int64_t token = at.token + token_tile * 64 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        WriteRow(g, kMirrored ? &p.mirrors : nullptr, at.row, token + half * 8,
                 token + half * 8 < end, half * 2, d[i]);
      }
    }
  }

  // d[4 j + first + {0, 1}] are this thread's columns of the j-th eight.
  __device__ static void WriteRow(const GemmProblem& g, const Mirrors* mirrors, int64_t row,
                                  int64_t token, bool real, int first, const float (&d)[64]) {
    const int64_t offset = token * g.y_stride + row;
    if (g.output == GemmOutput::kBf16 && row + kLargeRows <= g.w.rows && g.y_stride % 8 == 0) {
      return WriteBf16Row(d, first, real ? static_cast<__nv_bfloat16*>(g.y) + offset : nullptr,
                          mirrors);
    }
    if (!real) return;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int column = 8 * j + static_cast<int>(threadIdx.x) % 4 * 2;
      if (row + column >= g.w.rows) continue;
      const float a = d[4 * j + first], b = d[4 * j + first + 1];
      if (g.output == GemmOutput::kBf16) {
        *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(g.y) + offset + column) =
            PackBf16(a, b);
      } else {
        *reinterpret_cast<float2*>(static_cast<float*>(g.y) + offset + column) = {a, b};
      }
    }
  }
};

// Tiles first, first + stride, …
template <TileKind kKind, bool kMirrored>
__device__ __forceinline__ void Multiply(std::byte* shared, const LargeProblems& of, int first,
                                         int stride) {
  auto& ring = *reinterpret_cast<LargeRing<kKind>*>(shared);
  LargeMultiplier<kKind, GemmWork<kMirrored>>::Init(ring);
  WaitForPredecessor();
  AllowSuccessor();
  GemmWork<kMirrored> work{of.params, of.grid};
  LargeMultiplier<kKind, GemmWork<kMirrored>>(ring, work, first, stride).Run();
  if (kMirrored) __threadfence_system();
}

template <TileKind kKind, bool kMirrored>
__global__ void __launch_bounds__(kLargeThreads, 1)
    GemmLargeKernel(const __grid_constant__ LargeProblems of) {
  extern __shared__ __align__(1024) std::byte shared[];
  Multiply<kKind, kMirrored>(shared, of, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

// FP8 weights in the first `fp8_blocks` blocks, BF16 ones in the others.
constexpr size_t kBothBytes = std::max(sizeof(LargeRing<kFp8>), sizeof(LargeRing<kBf16>));
__global__ void __launch_bounds__(kLargeThreads, 1)
    GemmLargeBothKernel(const __grid_constant__ LargeProblems fp8,
                        const __grid_constant__ LargeProblems bf16, int fp8_blocks) {
  extern __shared__ __align__(1024) std::byte shared[];
  const auto block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  if (block < fp8_blocks) {
    Multiply<kFp8, false>(shared, fp8, block, fp8_blocks);
  } else {
    Multiply<kBf16, false>(shared, bf16, block - fp8_blocks, blocks - fp8_blocks);
  }
}

LargeProblems ProblemsOf(TileKind kind, const CudaGemmParams& all, int tile_tokens) {
  LargeProblems of{
      .params = {.num_tokens = all.num_tokens, .prefill = all.prefill, .mirrors = all.mirrors},
      .grid = {}};
  for (int i = 0; i < all.num_problems; ++i) {
    const GemmProblem& g = all.problems[i];
    if (g.w.kind == kind) of.params.problems[of.params.num_problems++] = g;
  }
  of.grid = MakeItemGrid(of.params, kLargeRows, tile_tokens);
  return of;
}

int Rounds(int tiles, int blocks) { return (tiles + blocks - 1) / blocks; }
int NumBlocks(int tiles) { return std::min(tiles, NumMultiprocessors()); }

// Of a tile with as many columns, measured: of 256 tokens, and of half as many.
struct TileTime {
  int whole, half;
  int Of(const ItemGrid& grid) const { return grid.tile_tokens == kLargeTokens ? whole : half; }
};
constexpr TileTime TimeOf(TileKind kind) {
  return kind == kFp8 ? TileTime{10, 6} : TileTime{16, 10};
}

// The problems of one kind, or of FP8 and of BF16, whose blocks are shared out.
struct LargeLaunch {
  LargeProblems first, second = {};
  int first_blocks = 0;
  int time = 0;
};

LargeLaunch One(TileKind kind, const CudaGemmParams& params, int tile_tokens) {
  LargeLaunch l{.first = ProblemsOf(kind, params, tile_tokens)};
  l.first_blocks = NumBlocks(l.first.grid.num_items());
  if (l.first_blocks == 0) return l;
  l.time = TimeOf(kind).Of(l.first.grid) * Rounds(l.first.grid.num_items(), l.first_blocks);
  return l;
}

// As many blocks for each kind as end it soonest.
LargeLaunch Both(const CudaGemmParams& params, int tile_tokens) {
  LargeLaunch l{.first = ProblemsOf(kFp8, params, tile_tokens),
                .second = ProblemsOf(kBf16, params, tile_tokens)};
  const ItemGrid &fp8 = l.first.grid, &bf16 = l.second.grid;
  const int blocks = NumBlocks(fp8.num_items() + bf16.num_items());
  for (int i = 1; i < blocks; ++i) {
    const int time = std::max(TimeOf(kFp8).Of(fp8) * Rounds(fp8.num_items(), i),
                              TimeOf(kBf16).Of(bf16) * Rounds(bf16.num_items(), blocks - i));
    if (l.first_blocks > 0 && time >= l.time) continue;
    l.first_blocks = i, l.time = time;
  }
  return l;
}

// With tiles of half as many tokens where these are done sooner.
template <typename Make>
LargeLaunch Soonest(Make make) {
  const LargeLaunch whole = make(kLargeTokens), half = make(kLargeTokens / 2);
  return half.time < whole.time ? half : whole;
}

template <TileKind kKind>
void Run(const CudaGemmParams& params, device::Stream& stream) {
  const LargeLaunch l = Soonest([&](int tokens) { return One(kKind, params, tokens); });
  if (l.first_blocks == 0) return;
  const auto launch = [&](auto kernel) {
    LaunchKernel(kernel, static_cast<unsigned>(l.first_blocks), kLargeThreads,
                 sizeof(LargeRing<kKind>), stream, l.first);
  };
  if constexpr (kKind != kBf16) {
    if (params.mirrors.count > 0) return launch(GemmLargeKernel<kKind, true>);
  }
  CHECK_EQ(params.mirrors.count, 0);
  launch(GemmLargeKernel<kKind, false>);
}

void RunBoth(const CudaGemmParams& params, device::Stream& stream) {
  CHECK_EQ(params.mirrors.count, 0);
  const LargeLaunch l = Soonest([&](int tokens) { return Both(params, tokens); });
  const int blocks = NumBlocks(l.first.grid.num_items() + l.second.grid.num_items());
  LaunchKernel(GemmLargeBothKernel, static_cast<unsigned>(blocks), kLargeThreads, kBothBytes,
               stream, l.first, l.second, l.first_blocks);
}

// Whether tiles of 64 tokens by 64 rows are done sooner: where reading the weights is all the work,
// or where there are no more of them than multiprocessors, so that larger ones would leave most
// idle.
bool IsNarrow(const CudaGemmParams& params) {
  if (params.mirrors.count > 0) return false;
  if (params.num_tokens <= kNarrowTokens) return true;
  return MakeItemGrid(params, kTileMatrixRows, kNarrowTokens).num_items() <= NumMultiprocessors();
}

}  // namespace

bool IsLarge(const CudaGemmParams& params) {
  if (!params.prefill && params.num_tokens < kLargeGemmTokens) return false;
  for (int i = 0; i < params.num_problems; ++i) {
    if (params.problems[i].w.kind == kFp4) return false;
  }
  return true;
}

void LaunchLarge(const CudaGemmParams& params, device::Stream& stream) {
  if (params.problems[0].w.kind == kFp8AsBf16) return LaunchWidened(params, stream);
  if (IsNarrow(params)) return LaunchNarrow(params, stream);
  const auto has = [&](TileKind kind) {
    return std::any_of(params.problems, params.problems + params.num_problems,
                       [&](const GemmProblem& g) { return g.w.kind == kind; });
  };
  if (has(kFp8) && has(kBf16)) {
    RunBoth(params, stream);
  } else {
    Run<kFp8>(params, stream);
    Run<kBf16>(params, stream);
  }
}

}  // namespace fathom::kernels
