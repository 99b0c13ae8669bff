// What gemm_narrow.cu and gemm_widened.cu share: items, some weight rows (weight_tiles.h) times
// some tokens (tiles.cuh), which a block takes one after another, and two warps that stream them
// through a ring in shared memory, across items: one the weights, which depend on no earlier
// kernel, the other the activations. (One warp for both had 115 instructions a step, for which the
// others waited.) All columns are one block's, in order. A stage is full when both warps' copies
// are there; each warp of those that multiply hands it back once. These may write when they have
// seen a full stage: the activations came behind the wait for the predecessor. Device code but for
// the grid.
#pragma once

#include <algorithm>

#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/ring_place.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kNearItems = 8;  // tiles of tokens that are computed near each other

// Of an item, and of its steps, which are some columns each: `x_tiles` tiles of 128-byte rows of x.
struct ItemShape {
  int rows, tokens;
  int weight_tiles;  // row tiles, or a part of one
  int weight_bytes;  // of each in a step
  int step_bytes;    // from there to the next step's
  int x_tiles;
  int stages;
};

// The items of a launch, gemm_large.cu's, too.
struct ItemGrid {
  int first[kMaxGemmProblems + 1];  // item of each problem
  int token_tiles;
  int tile_tokens;

  __host__ __device__ int num_items() const { return first[kMaxGemmProblems]; }
};

inline ItemGrid MakeItemGrid(const CudaGemmParams& params, int rows, int tokens) {
  ItemGrid grid{.first = {},
                .token_tiles = static_cast<int>((params.num_tokens + tokens - 1) / tokens),
                .tile_tokens = tokens};
  int items = 0;
  for (int i = 0; i <= kMaxGemmProblems; ++i) {
    grid.first[i] = items;
    if (i >= params.num_problems) continue;
    items += grid.token_tiles * static_cast<int>((params.problems[i].w.rows + rows - 1) / rows);
  }
  return grid;
}

struct GemmItem {
  const GemmProblem& problem;
  int64_t row, token;
  const std::byte* weights;  // its first row, in the first step
  int64_t second_tile;       // bytes to its second row tile, if it has one, or 0
  const uint8_t* scales;     // of each column block; BF16: null
  const std::byte* x;
  const float* x_scales;  // FP8 activations, or null
  int64_t x_tile_bytes;   // from one tile of x's columns to the next; of its scales: 1 / 32
  int num_steps;
  uint32_t token_groups;  // of 8 tokens
};

// Which items are a block's.
template <ItemShape kShape>
struct GemmItems {
  const CudaGemmParams& p;
  const ItemGrid& grid;

  // Items blockIdx.x, blockIdx.x + gridDim.x, …
  __device__ int count() const {
    const int blocks = static_cast<int>(gridDim.x);
    return (grid.num_items() - static_cast<int>(blockIdx.x) + blocks - 1) / blocks;
  }

  __device__ GemmItem operator()(int i) const {
    const int item = static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x);
    int index = 0;
    while (item >= grid.first[index + 1]) ++index;
    const GemmProblem& g = p.problems[index];
    const int place = item - grid.first[index];
    int first_tile = 0, rest = place, width = grid.token_tiles;
    if (grid.token_tiles > kNearItems) {
      const int row_blocks = (grid.first[index + 1] - grid.first[index]) / grid.token_tiles;
      first_tile = place / (kNearItems * row_blocks) * kNearItems;
      rest = place % (kNearItems * row_blocks);
      width = min(kNearItems, grid.token_tiles - first_tile);
    }
    const int64_t row = int64_t{rest / width} * kShape.rows;
    const int64_t token = int64_t{first_tile + rest % width} * kShape.tokens;
    const bool fp8 = g.w.kind == TileKind::kFp8;
    const int64_t row_groups = fp8 ? g.x_fp8.row_groups : g.x_bf16.row_groups;
    const int64_t blocks = g.w.col_blocks(), row_tile = row / kTileMatrixRows;
    const int steps = static_cast<int>(blocks * 8192 / kShape.step_bytes);
    const int64_t group = g.groups == 1 ? 0 : row / (g.w.rows / g.groups);
    const auto* x = fp8 ? reinterpret_cast<const std::byte*>(g.x_fp8.codes)
                        : reinterpret_cast<const std::byte*>(g.x_bf16.values);
    return {.problem = g,
            .row = row,
            .token = token,
            .weights = g.w.tiles + row_tile * blocks * 8192 + row % kTileMatrixRows * 128,
            .second_tile = row_tile + 1 < g.w.row_tiles() ? blocks * 8192 : 0,
            .scales = g.w.scales == nullptr ? nullptr : g.w.scales + row / 128 * blocks,
            .x = x + (group * steps * kShape.x_tiles * row_groups + token / 8) * kTileBytes,
            .x_scales = fp8 ? g.x_fp8.scales + token : nullptr,
            .x_tile_bytes = row_groups * kTileBytes,
            .num_steps = steps,
            .token_groups =
                static_cast<uint32_t>((min(int64_t{kShape.tokens}, p.num_tokens - token) + 7) / 8)};
  }
};

// Of a block, in shared memory.
template <ItemShape kShape>
struct ItemRing {
  static constexpr int kStages = kShape.stages;
  using Place = RingPlace<kStages>;
  using Items = GemmItems<kShape>;

  alignas(1024) std::byte x[kStages][kShape.x_tiles][kShape.tokens * 128];
  alignas(1024) std::byte weights[kStages][kShape.weight_tiles][kShape.weight_bytes];
  float x_scales[kStages][kShape.tokens];
  uint64_t full[kStages], empty[kStages];

  // All threads.
  __device__ void Init(int consumer_warps) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        BarrierInit(&full[i], 2);
        BarrierInit(&empty[i], consumer_warps * kWarpArrivals);
      }
      BarrierInitFence();
    }
    __syncthreads();
  }
  __device__ void AwaitFull(const Place& at) { BarrierWait(&full[at.index], at.parity); }

  // Two warps, behind `consumers` threads.
  __device__ void Produce(const Items& items, int consumers) {
    const int thread = static_cast<int>(threadIdx.x) - consumers;
    if (thread == 0) ProduceWeights(items);
    if (thread != 32) return;
    WaitForPredecessor();
    AllowSuccessor();
    ProduceX(items);
  }

 private:
  __device__ void AwaitEmpty(const Place& at) { BarrierWait(&empty[at.index], at.parity ^ 1); }

  __device__ void ProduceWeights(const Items& items) {
    Place at;
    const int count = items.count();
    for (int i = 0; i < count; ++i) {
      const GemmItem item = items(i);
      const std::byte* from = item.weights;
      for (int k = 0; k < item.num_steps; ++k, from += kShape.step_bytes, at.Next()) {
        AwaitEmpty(at);
        BarrierExpectBytes(&full[at.index], kShape.weight_tiles * kShape.weight_bytes);
#pragma unroll
        for (int tile = 0; tile < kShape.weight_tiles; ++tile) {
          BulkCopy(weights[at.index][tile], from + tile * item.second_tile, kShape.weight_bytes,
                   &full[at.index]);
        }
      }
    }
  }

  __device__ void ProduceX(const Items& items) {
    Place at;
    const int count = items.count();
    for (int i = 0; i < count; ++i) {
      const GemmItem item = items(i);
      const std::byte* from = item.x;
      const float* scales = item.x_scales;
      const uint32_t bytes = item.token_groups * kTileBytes;
      const uint32_t scale_bytes = scales == nullptr ? 0 : item.token_groups * 32;
      for (int k = 0; k < item.num_steps; ++k, at.Next()) {
        AwaitEmpty(at);
        BarrierExpectBytes(&full[at.index], kShape.x_tiles * bytes + scale_bytes);
#pragma unroll
        for (int tile = 0; tile < kShape.x_tiles; ++tile, from += item.x_tile_bytes) {
          BulkCopy(x[at.index][tile], from, bytes, &full[at.index]);
        }
        if (scales == nullptr) continue;
        BulkCopy(x_scales[at.index], scales, scale_bytes, &full[at.index]);
        scales += item.x_tile_bytes / 128;
      }
    }
  }
};

// The scales of an item's column blocks, 32 on the lanes of a warp, and the next 32 on their way.
class ItemScales {
 public:
  __device__ explicit ItemScales(const GemmItem& item)
      : scales_(item.scales),
        blocks_(static_cast<int>(item.problem.w.col_blocks())),
        now_(Load(0)),
        next_(Load(32)) {}

  // Of block k; k goes up by one.
  __device__ float operator()(int k) {
    if (k > 0 && k % 32 == 0) now_ = next_, next_ = Load(k + 32);
    return Ue8m0Value(__shfl_sync(0xffffffffu, now_, k % 32));
  }

 private:
  __device__ uint32_t Load(int first) const {
    const int k = first + static_cast<int>(threadIdx.x) % 32;
    return k < blocks_ ? __ldg(scales_ + k) : 0;
  }

  const uint8_t* const scales_;
  const int blocks_;
  uint32_t now_, next_;
};

}  // namespace fathom::kernels
