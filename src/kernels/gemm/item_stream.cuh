// What gemm_narrow.cu and gemm_widened.cu share: items, some weight rows times some tokens, which a
// block takes one after another, and two warps that stream them through a ring in shared memory,
// across items: one the weights, which depend on no earlier kernel, the other the activations. (One
// warp for both had 115 instructions a step, for which the others waited.) All columns are one
// block's, in order.
#pragma once

#include <algorithm>

#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/ring_place.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kNearItems = 8;  // tiles of tokens that are computed near each other

struct ItemGrid {
  int first[kMaxGemmProblems + 1];  // item of each problem
  int token_tiles;

  __host__ __device__ int num_items() const { return first[kMaxGemmProblems]; }
};

// Items of `rows` rows and `tokens` tokens.
inline ItemGrid MakeItemGrid(const CudaGemmParams& params, int rows, int tokens) {
  ItemGrid grid{.first = {},
                .token_tiles = static_cast<int>((params.num_tokens + tokens - 1) / tokens)};
  int items = 0;
  for (int i = 0; i <= kMaxGemmProblems; ++i) {
    grid.first[i] = items;
    if (i >= params.num_problems) continue;
    items += grid.token_tiles * static_cast<int>((params.problems[i].w.rows + rows - 1) / rows);
  }
  return grid;
}

// A step is some columns: `kXTiles` tiles of 128-byte rows of x.
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

// Which items are a block's. Weights of a step are kStepBytes of each row tile.
template <int kRows, int kTokens, int kXTiles, int kStepBytes>
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
    const int64_t row = int64_t{rest / width} * kRows;
    const int64_t token = int64_t{first_tile + rest % width} * kTokens;
    const bool fp8 = g.w.kind == TileKind::kFp8;
    const int64_t row_groups = fp8 ? g.x_fp8.row_groups : g.x_bf16.row_groups;
    const int64_t blocks = g.w.col_blocks(), row_tile = row / kTileMatrixRows;
    const int steps = static_cast<int>(blocks * 8192 / kStepBytes);
    const int64_t group = g.groups == 1 ? 0 : row / (g.w.rows / g.groups);
    const auto* x = fp8 ? reinterpret_cast<const std::byte*>(g.x_fp8.codes)
                        : reinterpret_cast<const std::byte*>(g.x_bf16.values);
    return {.problem = g,
            .row = row,
            .token = token,
            .weights = g.w.tiles + row_tile * blocks * 8192 + row % kTileMatrixRows * 128,
            .second_tile = row_tile + 1 < g.w.row_tiles() ? blocks * 8192 : 0,
            .scales = g.w.scales == nullptr ? nullptr : g.w.scales + row / 128 * blocks,
            .x = x + (group * steps * kXTiles * row_groups + token / 8) * kTileBytes,
            .x_scales = fp8 ? g.x_fp8.scales + token : nullptr,
            .x_tile_bytes = row_groups * kTileBytes,
            .num_steps = steps,
            .token_groups =
                static_cast<uint32_t>((min(int64_t{kTokens}, p.num_tokens - token) + 7) / 8)};
  }
};

// kWeightTiles row tiles, or a part of one, of which a step has kWeightBytes; the next step's are
// kStepBytes further.
template <int kTokens, int kWeightTiles, int kWeightBytes, int kStepBytes, int kXTiles, int kStages>
struct ItemRing {
  using Place = RingPlace<kStages>;

  alignas(1024) std::byte x[kStages][kXTiles][kTokens * 128];
  alignas(1024) std::byte weights[kStages][kWeightTiles][kWeightBytes];
  float x_scales[kStages][kTokens];
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
  template <typename Items>
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

  template <typename Items>
  __device__ void ProduceWeights(const Items& items) {
    Place at;
    const int count = items.count();
    for (int i = 0; i < count; ++i) {
      const GemmItem item = items(i);
      const std::byte* from = item.weights;
      for (int k = 0; k < item.num_steps; ++k, from += kStepBytes, at.Next()) {
        AwaitEmpty(at);
        BarrierExpectBytes(&full[at.index], kWeightTiles * kWeightBytes);
#pragma unroll
        for (int tile = 0; tile < kWeightTiles; ++tile) {
          BulkCopy(weights[at.index][tile], from + tile * item.second_tile, kWeightBytes,
                   &full[at.index]);
        }
      }
    }
  }

  template <typename Items>
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
        BarrierExpectBytes(&full[at.index], kXTiles * bytes + scale_bytes);
#pragma unroll
        for (int tile = 0; tile < kXTiles; ++tile, from += item.x_tile_bytes) {
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
