// FP8: a launch for the routed experts and one for the shared one. Gate and up: a cluster of two
// blocks makes 128 columns of t, each 64 of them, so that one block's tile has gate and up of the
// same columns; the blocks tell each other their largest values, of which FP8's scale is made.
#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/gemm_large_sm90.cuh"
#include "kernels/gemm/large_output.cuh"
#include "kernels/grouped_gemm/experts_large.h"
#include "kernels/grouped_gemm/swiglu.cuh"

namespace fathom::kernels {
namespace {

using Fp8Ring = LargeRing<TileKind::kFp8>;
constexpr int kThreads = kLargeThreads;

// The tokens of this thread's sums: rows of the tile.
__device__ int Row(int i, int half) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int token_tile = static_cast<int>(threadIdx.x) / 128 + kMathWarpgroups * i;
  return token_tile * 64 + thread / 32 * 16 + thread % 32 / 4 + half * 8;
}

struct ExpertWork {
  const CudaExpertParams& p;
  const bool shared;
  const int num_tiles;
  const int64_t row_blocks;  // of a tile

  __device__ int count() const { return num_tiles * static_cast<int>(row_blocks); }
  __device__ int64_t row_block(int index) const { return index % row_blocks; }

  __device__ ExpertTile Tokens(int index) const {
    const int i = index / static_cast<int>(row_blocks);
    if (!shared) return p.plan.tiles[i];
    const int first = i * kLargeTokens;
    return {0, first / 8, first / 8,
            static_cast<int>(min(int64_t{kLargeTokens}, p.shared_tokens() - first))};
  }

  // Row tiles `first` and `second` of matrices with `cols` columns, times x.
  __device__ LargeTile Make(const std::byte* tiles, const uint8_t* scales, int64_t cols,
                            int64_t first, int64_t second, const Fp8Tiles& x, int x_group,
                            int num_rows) const {
    const int64_t blocks = cols / 128, row_tile_bytes = blocks * TileMatrixBytes(TileKind::kFp8);
    return {.weights = {tiles + first * row_tile_bytes, tiles + second * row_tile_bytes},
            .scales = {scales + first / 2 * blocks, scales + second / 2 * blocks},
            .x = reinterpret_cast<const std::byte*>(x.codes) + int64_t{x_group} * kTileBytes,
            .x_scales = x.scales + x_group * 8,
            .x_step_bytes = x.row_groups * kTileBytes,
            .num_steps = static_cast<int>(blocks),
            .token_tiles = (num_rows + 63) / 64};
  }
};

struct GateUpWork : ExpertWork {
  Fp8Ring& ring;
  const uint32_t rank;  // which 64 of 128 columns of t
  uint32_t written = 0;

  __device__ LargeTile tile(int index) const {
    const ExpertTile tokens = Tokens(index);
    const ExpertTiles& w = shared ? p.shared : p.routed;
    const int64_t gate =
        int64_t{tokens.expert} * (p.intermediate / 32) + row_block(index) * 4 + rank;
    return Make(w.gate_up, w.gate_up_scales, p.hidden, gate, gate + 2, shared ? p.x : p.gathered,
                tokens.x_group, tokens.num_rows);
  }

  // t = b(weight * silu(gate) * up) as FP8.
  __device__ void Write(int index, LargeSums& d) {
    const ExpertTile tokens = Tokens(index);
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    const int mine = ((tokens.num_rows + 63) / 64 - warpgroup + 1) / kMathWarpgroups;
    if (mine <= 0) return;
    const uint32_t turn = written++ & 1;
    uint64_t* const exchange = &ring.exchange[warpgroup];
    NamedBarrier(1 + warpgroup, 128);  // all have read what the other block sent the last time
    if (threadIdx.x % 128 == 0) BarrierExpectBytes(exchange, static_cast<uint32_t>(mine) * 256);
    float largest[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Row(i, half);
        largest[i][half] = ActivateRow(tokens, row, half, d[i]);
        if (threadIdx.x % 4 == 0 && i < mine) {
          SendToBlock(&ring.exchanged[turn][row], largest[i][half], exchange, rank ^ 1);
        }
      }
    }
    BarrierWait(exchange, turn);
    const int64_t column = row_block(index) * 128 + rank * 64;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Row(i, half);
        const float all = fmaxf(largest[i][half], ring.exchanged[turn][row]);
        const int64_t pair = int64_t{tokens.pair_group} * 8 + row;
        WriteRow(column, row < tokens.num_rows ? pair : -1, half, Fp8Scale(all), d[i]);
      }
    }
  }

  // Into d[4 j + 2 half + {0, 1}] for j < 8; the largest magnitude of the row's 64 columns.
  __device__ float ActivateRow(const ExpertTile& tokens, int row, int half, float (&d)[64]) const {
    const int64_t pair = int64_t{tokens.pair_group} * 8 + row;
    const float weight = shared ? 1.0f : row < tokens.num_rows ? p.plan.pair_weight[pair] : 0.0f;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& gate = d[i / 2 * 4 + 2 * half + i % 2];
      const float up = d[32 + i / 2 * 4 + 2 * half + i % 2];
      gate = Intermediate(gate, up, weight, p.swiglu_limit);
      largest = fmaxf(largest, fabsf(gate));
    }
    return QuadMax(largest);
  }

  __device__ void WriteRow(int64_t column, int64_t pair, int half, uint32_t scale,
                           const float (&d)[64]) const {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = d[i / 2 * 4 + 2 * half + i % 2];
    WriteFp8Chunks(v, Ue8m0Inverse(scale), p.t, pair, column, &p.mirrors);
    if (pair >= 0 && threadIdx.x % 4 == 0 && rank == 0) {
      StoreMirrored(&p.t.scales[column / 128 * p.t.row_groups * 8 + pair], Ue8m0Value(scale),
                    &p.mirrors);
    }
  }
};

struct DownWork : ExpertWork {
  __device__ LargeTile tile(int index) const {
    const ExpertTile tokens = Tokens(index);
    const ExpertTiles& w = shared ? p.shared : p.routed;
    const int64_t first = int64_t{tokens.expert} * (p.hidden / 64) + row_block(index) * 2;
    return Make(w.down, w.down_scales, p.intermediate, first, first + 1, p.t, tokens.pair_group,
                tokens.num_rows);
  }

  __device__ void Write(int index, LargeSums& d) const {
    const ExpertTile tokens = Tokens(index);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Row(i, half);
        const int64_t pair = int64_t{tokens.pair_group} * 8 + row;
        __nv_bfloat16* y = p.outputs(shared) + pair * p.y_stride + row_block(index) * kLargeRows;
        WriteBf16Row(d[i], 2 * half, row < tokens.num_rows ? y : nullptr);
      }
    }
  }
};

__device__ int NumTiles(const CudaExpertParams& p, bool shared) {
  return shared ? static_cast<int>((p.shared_tokens() + kLargeTokens - 1) / kLargeTokens)
                : *p.plan.num_tiles;
}

__global__ void __launch_bounds__(kThreads, 1)
    GateUpLargeKernel(const __grid_constant__ CudaExpertParams p, bool shared) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& ring = *reinterpret_cast<Fp8Ring*>(memory);
  LargeMultiplier<TileKind::kFp8, GateUpWork>::Init(ring);
  ClusterSync();  // the other block's barrier is ready, too
  WaitForPredecessor();
  AllowSuccessor();
  GateUpWork work{{p, shared, NumTiles(p, shared), p.intermediate / 128}, ring, ClusterRank()};
  LargeMultiplier<TileKind::kFp8, GateUpWork>(ring, work, static_cast<int>(blockIdx.x) / 2,
                                              static_cast<int>(gridDim.x) / 2)
      .Run();
  if (p.mirrors.count > 0) __threadfence_system();
  __syncwarp();
  ClusterSync();  // until here the other block writes to this one
}

__global__ void __launch_bounds__(kThreads, 1)
    DownLargeKernel(const __grid_constant__ CudaExpertParams p, bool shared) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& ring = *reinterpret_cast<Fp8Ring*>(memory);
  LargeMultiplier<TileKind::kFp8, DownWork>::Init(ring);
  WaitForPredecessor();
  AllowSuccessor();
  DownWork work{{p, shared, NumTiles(p, shared), p.hidden / 128}};
  LargeMultiplier<TileKind::kFp8, DownWork>(ring, work, static_cast<int>(blockIdx.x),
                                            static_cast<int>(gridDim.x))
      .Run();
}

void RunGateUp(const CudaExpertParams& p, bool shared, device::Stream& stream) {
  LaunchClusters(GateUpLargeKernel, static_cast<unsigned>(NumMultiprocessors() / 2 * 2), 2,
                 kThreads, sizeof(Fp8Ring), stream, p, shared);
}
void RunDown(const CudaExpertParams& p, bool shared, device::Stream& stream) {
  LaunchKernel(DownLargeKernel, static_cast<unsigned>(NumMultiprocessors()), kThreads,
               sizeof(Fp8Ring), stream, p, shared);
}

// One thread a row.
__global__ void LargestScalesKernel(const std::byte* tiles, int64_t col_blocks, uint8_t* largest) {
  const int64_t row_tile = blockIdx.x;
  uint32_t most = 0;
  for (int64_t b = 0; b < col_blocks; ++b) {
    const std::byte* tile = tiles + (row_tile * col_blocks + b) * TileMatrixBytes(TileKind::kFp4);
    most = __vmaxu4(most, reinterpret_cast<const uint32_t*>(tile + 4096)[threadIdx.x]);
  }
  most = __vmaxu4(most, most >> 16);
  largest[row_tile * 64 + threadIdx.x] = static_cast<uint8_t>(__vmaxu4(most, most >> 8));
}

}  // namespace

void LaunchGateUpLarge(const CudaExpertParams& p, device::Stream& stream) {
  RunGateUp(p, true, stream);
  p.routed.kind == TileKind::kFp8 ? RunGateUp(p, false, stream) : LaunchGateUpLargeFp4(p, stream);
}

void LaunchDownLarge(const CudaExpertParams& p, device::Stream& stream) {
  RunDown(p, true, stream);
  p.routed.kind == TileKind::kFp8 ? RunDown(p, false, stream) : LaunchDownLargeFp4(p, stream);
}

void LaunchLargestScales(const std::byte* tiles, int64_t row_tiles, int64_t col_blocks,
                         uint8_t* largest, device::Stream& stream) {
  LargestScalesKernel<<<static_cast<unsigned>(row_tiles), 64, 0,
                        static_cast<cudaStream_t>(stream.native_handle())>>>(tiles, col_blocks,
                                                                             largest);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace fathom::kernels
