// The products of a prompt's step of few tokens, where reading the weights is all the work, and of
// more tokens where larger tiles would be few (gemm_large.cu). Weights are A of wgmma, up to 64
// tokens B, and a block takes 64 rows of one matrix after another, so that even a small matrix
// keeps many multiprocessors busy. A warp streams both through a ring in shared
// memory, across items. FP8 and BF16: two warpgroups take turns, one writes an item's result
// while the other multiplies the next. FP8 for BF16 activations: an item is 128 rows, half of them
// for each warpgroup, which widens them in registers. All columns are one block's, as in
// gemm_large_sm90.cuh: the same sums in the same order.
#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/gemm_large.h"
#include "kernels/gemm/gemm_large_sm90.cuh"
#include "kernels/gemm/stream_products.cuh"

namespace fathom::kernels {
namespace {

constexpr int kTileTokens = 64;
constexpr int kThreads = 256 + 32;

struct NarrowGrid {
  int first[kMaxGemmProblems + 1];  // item of each problem
  int token_tiles;
};

template <bool kWide>
struct NarrowRing {
  static constexpr int kTiles = kWide ? 2 : 1;  // of weights and of x in a step
  static constexpr int kStages = kWide ? 6 : 12;

  alignas(1024) std::byte x[kStages][kTiles][kTileTokens * 128];
  alignas(1024) std::byte weights[kStages][kTiles][8192];
  float x_scales[kWide ? 1 : kStages][kTileTokens];
  float largest[kWide ? 8 : 1][kTileTokens];  // of each warp's rows
  uint64_t full[kStages], empty[kStages], done[2];
};

// 64 rows (kWide: 128) of a matrix and up to 64 tokens. A step is a column block.
struct NarrowItem {
  const GemmProblem& problem;
  int64_t row, token;
  const std::byte* weights;  // its first row tile
  int64_t second_tile;       // bytes to the second
  const uint8_t* scales;
  const std::byte* x;
  const float* x_scales;
  int64_t x_tile_bytes;  // from one block of x's columns to the next; of its scales: 1 / 32
  int num_steps;
};

template <bool kWide>
struct NarrowWork {
  static constexpr int kRows = kWide ? 128 : 64;
  const CudaGemmParams& p;
  const NarrowGrid& grid;

  // Items blockIdx.x, blockIdx.x + gridDim.x, …
  __device__ int count() const {
    const int items = grid.first[kMaxGemmProblems], blocks = static_cast<int>(gridDim.x);
    return (items - static_cast<int>(blockIdx.x) + blocks - 1) / blocks;
  }

  __device__ NarrowItem operator()(int i) const {
    const int item = static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x);
    int index = 0;
    while (item >= grid.first[index + 1]) ++index;
    const int place = item - grid.first[index];
    const GemmProblem& g = p.problems[index];
    const bool fp8 = g.w.kind == TileKind::kFp8;
    const int64_t row = int64_t{place / grid.token_tiles} * kRows;
    const int64_t token = int64_t{place % grid.token_tiles} * kTileTokens;
    const int64_t row_groups = fp8 ? g.x_fp8.row_groups : g.x_bf16.row_groups;
    const int64_t blocks = g.w.col_blocks(), row_tile = row / kTileMatrixRows;
    const int64_t group = g.groups == 1 ? 0 : row / (g.w.rows / g.groups);
    const auto* x = fp8 ? reinterpret_cast<const std::byte*>(g.x_fp8.codes)
                        : reinterpret_cast<const std::byte*>(g.x_bf16.values);
    return {.problem = g,
            .row = row,
            .token = token,
            .weights = g.w.tiles + row_tile * blocks * 8192,
            .second_tile = row_tile + 1 < g.w.row_tiles() ? blocks * 8192 : 0,
            .scales = g.w.scales == nullptr ? nullptr : g.w.scales + row / 128 * blocks,
            .x = x + (group * blocks * (kWide ? 2 : 1) * row_groups + token / 8) * kTileBytes,
            .x_scales = fp8 ? g.x_fp8.scales + token : nullptr,
            .x_tile_bytes = row_groups * kTileBytes,
            .num_steps = static_cast<int>(blocks)};
  }
};

template <int kN, bool kWide>
class NarrowMultiplier {
 public:
  using Ring = NarrowRing<kWide>;
  using Sums = float[kN / 2];

  __device__ NarrowMultiplier(Ring& ring, const NarrowWork<kWide>& work)
      : ring_(ring), work_(work) {}

  __device__ void Init() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Ring::kStages; ++i) {
        BarrierInit(&ring_.full[i], 1);
        BarrierInit(&ring_.empty[i], (kWide ? 8 : 4) * kWarpArrivals);
      }
      for (uint64_t& done : ring_.done) BarrierInit(&done, 4 * kWarpArrivals);
      BarrierInitFence();
    }
    __syncthreads();
  }

  // The last warp.
  __device__ void Produce() {
    Fetch<true>();
    WaitForPredecessor();
    AllowSuccessor();
    Fetch<false>();
  }

  // The two warpgroups.
  __device__ void Consume() {
    const int count = work_.count();
    for (int i = 0; i < count; ++i) {
      const NarrowItem item = work_(i);
      if (kWide || i % 2 == group()) {
        Sums d = {};
        if constexpr (kWide) {
          AddWide(item, d);
        } else {
          // A wait for a step is a wait for the next of its stage: nobody may be a round ahead.
          if (i > 0) BarrierWait(&ring_.done[1 - group()], (i - 1) / 2 & 1);
          item.scales != nullptr ? AddFp8(item, d) : AddBf16(item, d);
          WarpArrive(&ring_.done[group()]);
        }
        Write(item, d);
      }
      step_ += item.num_steps;
    }
  }

 private:
  __device__ static int group() { return static_cast<int>(threadIdx.x) / 128; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // kAhead: only what does not depend on earlier kernels, the weights of as many steps as the ring
  // holds. Else the rest. Lanes 0 and 1 copy weights, 2 and 3 activations, 4 their scales.
  template <bool kAhead>
  __device__ void Fetch() {
    const int count = work_.count();
    for (int i = 0, step = 0; i < count; ++i) {
      const NarrowItem item = work_(i);
      const int64_t tokens = min(int64_t{kTileTokens}, work_.p.num_tokens - item.token);
      const auto groups = static_cast<uint32_t>(tokens + 7) / 8;
      for (int k = 0; k < item.num_steps; ++k, ++step) {
        if (kAhead && step == Ring::kStages) return;
        const int stage = step % Ring::kStages;
        const bool announce = kAhead || step >= Ring::kStages;
        if (announce) {
          BarrierWait(&ring_.empty[stage], (step / Ring::kStages & 1) ^ 1);
          if (lane() == 0) {
            BarrierExpectBytes(&ring_.full[stage],
                               Ring::kTiles * (8192 + groups * 1024) +
                                   (item.x_scales == nullptr ? 0 : groups * 32));
          }
          __syncwarp();
          if (lane() < Ring::kTiles) {
            BulkCopy(ring_.weights[stage][lane()],
                     item.weights + lane() * item.second_tile + int64_t{k} * 8192, 8192,
                     &ring_.full[stage]);
          }
        }
        if (kAhead) continue;
        const int tile = lane() - 2;
        if (tile >= 0 && tile < Ring::kTiles) {
          BulkCopy(ring_.x[stage][tile], item.x + (k * Ring::kTiles + tile) * item.x_tile_bytes,
                   groups * 1024, &ring_.full[stage]);
        } else if (lane() == 4 && item.x_scales != nullptr) {
          BulkCopy(ring_.x_scales[kWide ? 0 : stage], item.x_scales + k * (item.x_tile_bytes / 128),
                   groups * 32, &ring_.full[stage]);
        }
      }
    }
  }

  // Of 32 column blocks from `first` on, a lane each.
  __device__ static uint32_t LoadScales(const NarrowItem& item, int first) {
    const int k = first + lane();
    return k < item.num_steps ? item.scales[k] : 0;
  }
  __device__ static float Scale(uint32_t scales, int k) {
    return Ue8m0Value(__shfl_sync(0xffffffffu, scales, k % 32));
  }

  __device__ int Stage(int k) const { return (step_ + k) % Ring::kStages; }
  __device__ void WaitFull(int k) {
    BarrierWait(&ring_.full[Stage(k)], (step_ + k) / Ring::kStages & 1);
  }
  __device__ void Release(int k) { WarpHandBack(&ring_.empty[Stage(k)]); }
  __device__ uint64_t XDescriptor(int k, int tile) {
    return SmemDescriptor(SharedAddress(ring_.x[Stage(k)][tile]));
  }
  __device__ uint64_t WeightDescriptor(int k) {
    return SmemDescriptor(SharedAddress(ring_.weights[Stage(k)][0]));
  }

  __device__ __forceinline__ void AddFp8(const NarrowItem& item, Sums& d) {
    constexpr int kSteps = kN == 64 ? 2 : 4;  // whose products there are registers for
    uint32_t scales = 0;
    int k = 0;
    for (; k + kSteps <= item.num_steps; k += kSteps) {
      if (k % 32 == 0) scales = LoadScales(item, k);
      AddFp8Steps<kSteps>(k, scales, d);
    }
    if (k % 32 == 0) scales = LoadScales(item, k);
    for (; k < item.num_steps; ++k) AddFp8Steps<1>(k, scales, d);
  }

  template <int kSteps>
  __device__ __forceinline__ void AddFp8Steps(int k, uint32_t scales, Sums& d) {
    float products[kSteps][kN / 2];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      WaitFull(k + i);
      const uint64_t weights = WeightDescriptor(k + i), x = XDescriptor(k + i, 0);
      WgmmaFence();
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        Wgmma<WgmmaType::kE4m3, kN>::FromSmem(products[i], weights + 2 * q, x + 2 * q, q != 0);
      }
      WgmmaCommit();
    }
    Finish<kSteps, 0>(k, scales, products, d);
  }

  template <int kSteps, int kStep>
  __device__ __forceinline__ void Finish(int k, uint32_t scales, float (&products)[kSteps][kN / 2],
                                         Sums& d) {
    WgmmaWait<kSteps - 1 - kStep>();
    ReadyRegisters(products[kStep]);
    const float weight_scale = Scale(scales, k + kStep);
    const float* x_scales = ring_.x_scales[Stage(k + kStep)] + lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float2 v = *reinterpret_cast<const float2*>(x_scales + j * 8);
      const float low = v.x * weight_scale, high = v.y * weight_scale;
      d[4 * j] += products[kStep][4 * j] * low;
      d[4 * j + 1] += products[kStep][4 * j + 1] * high;
      d[4 * j + 2] += products[kStep][4 * j + 2] * low;
      d[4 * j + 3] += products[kStep][4 * j + 3] * high;
    }
    Release(k + kStep);
    if constexpr (kStep + 1 < kSteps) Finish<kSteps, kStep + 1>(k, scales, products, d);
  }

  __device__ __forceinline__ void AddBf16(const NarrowItem& item, Sums& d) {
    int k = 0;
    for (; k + 4 <= item.num_steps; k += 4) AddBf16Steps<4>(k, d);
    for (; k < item.num_steps; ++k) AddBf16Steps<1>(k, d);
  }

  template <int kSteps>
  __device__ __forceinline__ void AddBf16Steps(int k, Sums& d) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      WaitFull(k + i);
      const uint64_t weights = WeightDescriptor(k + i), x = XDescriptor(k + i, 0);
      WgmmaFence();
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        Wgmma<WgmmaType::kBf16, kN>::FromSmem(d, weights + 2 * q, x + 2 * q, 1);
      }
      WgmmaCommit();
    }
    WgmmaWait<0>();
    ReadyRegisters(d);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) Release(k + i);
  }

  // The codes of the next block are widened while this one's are multiplied.
  __device__ __forceinline__ void AddWide(const NarrowItem& item, Sums& d) {
    uint32_t even[8][4], odd[8][4], scales = 0;
    for (int k = 0; k < item.num_steps; k += 2) {
      if (k % 32 == 0) scales = LoadScales(item, k);
      Widen(k, scales, even);
      StartWide(k, even, d);
      const bool both = k + 1 < item.num_steps;
      if (both) Widen(k + 1, scales, odd);
      WgmmaWait<0>();
      ReadyRegisters(d);
      Release(k);
      if (!both) return;
      StartWide(k + 1, odd, d);
      WgmmaWait<0>();
      ReadyRegisters(d);
      Release(k + 1);
    }
  }

  __device__ __forceinline__ void Widen(int k, uint32_t scales, uint32_t (&a)[8][4]) {
    WaitFull(k);
    WidenTile(ring_.weights[Stage(k)][kWide ? group() : 0], WideScale(Scale(scales, k)), a);
    __syncwarp();
  }
  __device__ __forceinline__ void StartWide(int k, const uint32_t (&a)[8][4], Sums& d) {
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      Wgmma<WgmmaType::kBf16, kN>::FromRegisters(d, a[q],
                                                 XDescriptor(k, kWide ? q / 4 : 0) + q % 4 * 2, 1);
    }
    WgmmaCommit();
  }

  // d[4 j + 2 h + e]: row Row() + 8 h, token 8 j + 2 (lane % 4) + e.
  __device__ static int Row() {
    return (kWide ? group() * 64 : 0) + ThreadOfGroup() / 32 * 16 + lane() / 4;
  }
  __device__ static int Token(int j, int e) { return j * 8 + lane() % 4 * 2 + e; }

  __device__ __forceinline__ void Write(const NarrowItem& item, Sums& d) {
    const GemmProblem& g = item.problem;
    if constexpr (kWide) {
      if (g.output == GemmOutput::kFp8Tiles) return WriteFp8(item, d);
    }
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const int64_t token = item.token + Token(i / 4, i % 2),
                    row = item.row + Row() + i % 4 / 2 * 8;
      if (token >= work_.p.num_tokens || row >= g.w.rows) continue;
      const int64_t at = token * g.y_stride + row;
      if (g.output == GemmOutput::kBf16) {
        static_cast<__nv_bfloat16*>(g.y)[at] = __float2bfloat16_rn(d[i]);
      } else {
        static_cast<float*>(g.y)[at] = d[i];
      }
    }
  }

  __device__ __forceinline__ void WriteFp8(const NarrowItem& item, Sums& d) {
#pragma unroll
    for (float& x : d) x = RoundBf16(x);
    NamedBarrier(1, 256);  // the last item's largest values have been read
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const float* rows = d + i / 2 * 4 + i % 2;
      float largest = fmaxf(fabsf(rows[0]), fabsf(rows[2]));
      for (int offset = 4; offset < 32; offset *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
      }
      if (lane() < 4) ring_.largest[threadIdx.x / 32][Token(i / 2, i % 2)] = largest;
    }
    NamedBarrier(1, 256);
    const Fp8Tiles& y = item.problem.y_fp8;
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const int place = Token(i / 2, i % 2);
      const int64_t token = item.token + place;
      if (token >= work_.p.num_tokens) continue;
      float largest = 0;
      for (const auto& of_warp : ring_.largest) largest = fmaxf(largest, of_warp[place]);
      const uint32_t scale = Fp8Scale(largest);
      const float inverse = Ue8m0Inverse(scale), *rows = d + i / 2 * 4 + i % 2;
      const uint32_t codes = Fp8Codes(rows[0] * inverse, rows[2] * inverse);
      uint8_t* const to = y.codes + Fp8TileOffset(token, item.row + Row(), y.row_groups);
      *to = static_cast<uint8_t>(codes);
      y.codes[Fp8TileOffset(token, item.row + Row() + 8, y.row_groups)] =
          static_cast<uint8_t>(codes >> 8);
      if (threadIdx.x < 4) y.scales[item.row / 128 * y.row_groups * 8 + token] = Ue8m0Value(scale);
    }
  }

  Ring& ring_;
  const NarrowWork<kWide>& work_;
  int step_ = 0;  // the first of the item
};

template <int kN, bool kWide>
__global__ void __launch_bounds__(kThreads, 1)
    GemmNarrowKernel(const __grid_constant__ CudaGemmParams params,
                     const __grid_constant__ NarrowGrid grid) {
  extern __shared__ __align__(1024) std::byte shared[];
  const NarrowWork<kWide> work{params, grid};
  NarrowMultiplier<kN, kWide> multiplier(*reinterpret_cast<NarrowRing<kWide>*>(shared), work);
  multiplier.Init();
  if (threadIdx.x >= 256) return multiplier.Produce();
  multiplier.Consume();
}

template <int kN, bool kWide>
void Run(const CudaGemmParams& params, device::Stream& stream) {
  NarrowGrid grid{.first = {}, .token_tiles = static_cast<int>((params.num_tokens + 63) / 64)};
  constexpr int kRows = NarrowWork<kWide>::kRows;
  int items = 0;
  for (int i = 0; i <= kMaxGemmProblems; ++i) {
    grid.first[i] = items;
    if (i >= params.num_problems) continue;
    items += grid.token_tiles * static_cast<int>((params.problems[i].w.rows + kRows - 1) / kRows);
  }
  LaunchKernel(GemmNarrowKernel<kN, kWide>,
               static_cast<unsigned>(std::min(items, NumMultiprocessors())), kThreads,
               sizeof(NarrowRing<kWide>), stream, params, grid);
}

template <int kN>
void Run(const CudaGemmParams& params, device::Stream& stream) {
  params.problems[0].w.kind == TileKind::kFp8AsBf16 ? Run<kN, true>(params, stream)
                                                    : Run<kN, false>(params, stream);
}

}  // namespace

void LaunchNarrow(const CudaGemmParams& params, device::Stream& stream) {
  if (params.num_tokens <= 8) return Run<8>(params, stream);
  if (params.num_tokens <= 16) return Run<16>(params, stream);
  params.num_tokens <= 32 ? Run<32>(params, stream) : Run<64>(params, stream);
}

}  // namespace fathom::kernels
