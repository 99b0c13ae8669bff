#include <algorithm>

#include "base/check.h"
#include "kernels/attention_prologue/prologue_rows.cuh"
#include "kernels/attention_prologue/queries_alone_cuda.h"
#include "kernels/gemm/resident_weights.cuh"
#include "kernels/numbered_words.cuh"

namespace fathom::kernels {
namespace {

constexpr int kBlocks = kResidentBlocks;
constexpr int kColumns = kBlocks * 128;
constexpr int kMostTiles = 128;  // with the other blocks a multiprocessor each

// Of the window entry, and one for each compressor.
constexpr int EntryBlocks(int ratio) { return ratio == 4 ? 3 : ratio == 128 ? 2 : 1; }

struct Params {
  CudaAttentionPrologueParams prologue;
  GemmProblem products[2];
  int num_products;
  LaunchNumber number;
};

struct Shared : WeightPlaces<kBlocks> {
  alignas(128) std::byte x[kColumns + kBehindToken];
  float x_scales[kBlocks];
  alignas(16) float sums[kResidentThreads / 32];
};

__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ int warp() { return static_cast<int>(threadIdx.x / 32); }

// A row tile of one of the products.
struct Item {
  const GemmProblem& p;
  const int tile;

  __device__ bool exists() const { return tile < p.w.row_tiles(); }
  // By a warp.
  __device__ void Fetch(Shared& s) const {
    const std::byte* from = p.w.tiles + int64_t{tile} * kBlocks * kWeightTileBytes;
    if (lane() < kBlocks) s.Fetch(lane(), from + lane() * kWeightTileBytes);
  }
  __device__ const uint8_t* scales() const { return p.w.scales + tile / 2 * kBlocks; }
};

// The block's row tiles of the products.
__device__ void Queries(const Params& p, int tile, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x), column = 8 * thread;
  const bool numbered = p.number.of_step != nullptr;
  const Item first{p.products[0], tile};
  if (warp() == 0) {
    s.InitLanded();
    BarrierInitFence();
    __syncwarp();
    if (first.exists()) first.Fetch(s);
  }
  if (numbered) AllowSuccessor();
  const uint32_t number = numbered ? ValueOf(p.number) : 0;
  float x[8], weight[8], scale[kBlocks] = {};
  LoadEight(p.prologue.q_norm + column, weight);
  if (first.exists()) LoadScales(first.scales(), scale);
  NamedBarrier(1, kResidentThreads);
  WaitForPredecessor();
  if (!numbered) AllowSuccessor();
  LoadEight(p.prologue.qr + column, x);
  const auto sum = [&](float v) {
    v = WarpSum(v);
    if (lane() == 0) s.sums[warp()] = v;
    NamedBarrier(1, kResidentThreads);
    const float4 four = *reinterpret_cast<const float4*>(s.sums);
    return four.x + four.y + four.z + four.w;
  };
  const QueryEight eight = QuantizeQuery(x, weight, kColumns, p.prologue.norm_eps, sum);
  reinterpret_cast<uint2*>(s.x)[thread] = eight.codes;
  if (thread % 16 == 0) s.x_scales[thread / 16] = Ue8m0Value(eight.scale);
  FenceSharedForWgmma();
  NamedBarrier(1, kResidentThreads);
  const uint64_t b = TokenDescriptor(s.x);
  uint32_t parity = 0;
#pragma unroll 1
  for (int i = 0; i < p.num_products; ++i) {
    const Item item{p.products[i], tile};
    if (!item.exists()) continue;
    if (i > 0) {
      NamedBarrier(1, kResidentThreads);  // everybody has multiplied
      if (warp() == 0) item.Fetch(s);
      LoadScales(item.scales(), scale);
    }
    for (uint64_t& landed : s.landed) BarrierWait(&landed, parity);
    parity ^= 1;
    StoreRowTile(item.p, tile, MultiplyLandedFp8(s.weights, b, scale, s.x_scales), number);
  }
}

// By the block that has written the index key.
__device__ void TellBegun(const LaunchNumber& number) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  *static_cast<volatile uint32_t*>(number.begun) = ValueOf(number);
}

// Registers for a block beside one of the selection, which has 36,864. Of one token no entry needs
// this step's rows only, so a compressor is one block.
template <int kRatio>
__global__ void __maxnreg__(104) QueriesAloneKernel(const __grid_constant__ Params p) {
  constexpr int kEntryBlocks = EntryBlocks(kRatio);
  extern __shared__ __align__(1024) std::byte memory[];
  __shared__ CompressorShared shared;
  const int block = static_cast<int>(blockIdx.x);
  if (block >= kEntryBlocks) {
    if (threadIdx.x >= kResidentThreads) return;
    return Queries(p, block - kEntryBlocks, *reinterpret_cast<Shared*>(memory));
  }
  const CudaAttentionPrologueParams& prologue = p.prologue;
  if (block == kEntryBlocks - 1) return KvRow(prologue, 0, shared.sums);
  if constexpr (kRatio == 128) return CompressSequenceC128(prologue, 0, shared);
  if constexpr (kRatio == 4) {
    if (block == 1) return CompressSequenceC4<kHeadDim>(prologue, prologue.main, 0, shared);
    CompressSequenceC4<kIndexDim>(prologue, prologue.index, 0, shared);
    if (p.number.of_step != nullptr) TellBegun(p.number);
  }
}

}  // namespace

bool AreQueriesAlone(const CudaGemmParams& products) {
  if (products.num_tokens != 1 || products.prefill || products.num_problems > 2) return false;
  return std::all_of(products.problems, products.problems + products.num_problems,
                     [](const GemmProblem& p) {
                       return p.w.kind == TileKind::kFp8 && p.w.is_whole() && p.groups == 1 &&
                              p.w.col_blocks() == kBlocks && p.w.rows % kTileMatrixRows == 0 &&
                              p.w.row_tiles() <= kMostTiles &&
                              (p.output == GemmOutput::kBf16 || p.output == GemmOutput::kNumbered);
                     });
}

void Launch(const CudaQueriesAloneParams& params, device::Stream& stream) {
  const CudaGemmParams& products = params.products;
  CHECK_EQ(params.prologue.q_lora_rank, kColumns);
  CHECK_EQ(params.prologue.batch.num_seqs, 1);
  CHECK(params.prologue.has_entries);
  const Params p{.prologue = params.prologue,
                 .products = {products.problems[0], products.problems[1]},
                 .num_products = products.num_problems,
                 .number = products.number};
  int64_t tiles = 0;
  for (int i = 0; i < p.num_products; ++i) tiles = std::max(tiles, p.products[i].w.row_tiles());
  const int ratio = p.prologue.ratio;
  const auto kernel = ratio == 0   ? QueriesAloneKernel<0>
                      : ratio == 4 ? QueriesAloneKernel<4>
                                   : QueriesAloneKernel<128>;
  LaunchKernel(kernel, static_cast<unsigned>(EntryBlocks(ratio) + tiles), kPrologueThreads,
               sizeof(Shared), stream, p);
}

}  // namespace fathom::kernels
