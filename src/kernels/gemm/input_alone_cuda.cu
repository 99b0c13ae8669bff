#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/input_alone_cuda.h"
#include "kernels/gemm/resident_weights.cuh"
#include "kernels/gemm/stream_products.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"
#include "kernels/tiles.cuh"

namespace fathom::kernels {
namespace {

constexpr int kConsumers = kResidentThreads;
constexpr int kThreads = kConsumers + 32;
constexpr int kBlocks = kResidentBlocks;
constexpr int kCluster = 8;  // one row tile of BF16, or two of FP8
constexpr int kFp8Parts = 4, kBf16Parts = 8;
constexpr int kMostItems = 2;  // of a cluster
// Column blocks of a block's first item on their way at a time: what the boundary before reads does
// not queue behind all of them.
constexpr int kOnTheirWay = 2;
// Clusters for which the boundary's blocks leave no room.
constexpr int kBoundaryClusters = 5;

struct Params {
  GemmProblem problems[kMaxGemmProblems];
  int first_item[kMaxGemmProblems + 1];  // of each
  int num_items;
};

struct Shared {
  alignas(1024) std::byte weights[kBlocks][kWeightTileBytes];
  alignas(128) std::byte x[kBlocks * 128 + kBehindToken];
  float x_scales[kBlocks];
  alignas(16) float inbox[kMostItems][kCluster][kTileMatrixRows];  // [part][row] of a row tile
  uint64_t inbox_full[kMostItems];
  uint64_t landed[kBlocks], used;
};

__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ int warp() { return static_cast<int>(threadIdx.x / 32); }

// What a block has of a cluster's item.
struct Item {
  const GemmProblem* problem;
  bool fp8;
  int parts, part;  // of the columns, and this block's
  int tile;         // of rows
  int first;        // column block, of those of all row tiles

  __device__ Item(const Params& params, int item, int rank) {
    int index = 0;
    while (item >= params.first_item[index + 1]) ++index;
    problem = &params.problems[index];
    fp8 = problem->w.kind == TileKind::kFp8;
    parts = fp8 ? kFp8Parts : kBf16Parts;
    part = rank & (parts - 1);
    tile = (item - params.first_item[index]) * (kCluster / parts) + rank / parts;
    first = (tile * parts + part) * kBlocks;
  }
  // Of FP8.
  __device__ const uint8_t* scales() const {
    const int row_blocks = parts * kBlocks;
    return problem->w.scales + tile / 2 * row_blocks + part * kBlocks;
  }
};

__device__ float2 MultiplyBf16(const Shared& s, uint64_t b) {
  float d[1][4] = {};
  MultiplyLanded<WgmmaType::kBf16>(s.weights, b, d);
  WgmmaWait<0>();
  ReadyRegisters(d[0]);
  return {d[0][0], d[0][2]};
}

class InputAlone {
 public:
  __device__ InputAlone(const Params& params, Shared& shared)
      : p_(params),
        s_(shared),
        cluster_(static_cast<int>(blockIdx.x) / kCluster),
        rank_(static_cast<int>(blockIdx.x) % kCluster),
        step_(static_cast<int>(gridDim.x) / kCluster) {}

  // The last warp: weights, which depend on nothing; of the second item as soon as the first is
  // multiplied.
  __device__ void Fetch() {
    if (lane() == 0) {
      for (uint64_t& barrier : s_.landed) BarrierInit(&barrier, 1);
      BarrierInit(&s_.used, kConsumers);
      BarrierInitFence();
    }
    __syncwarp();
    Meet();
    if (lane() == 0) {
      const uint64_t policy = EvictFirst();
      for (int item = cluster_, n = 0; item < p_.num_items; item += step_, ++n) {
        const Item mine(p_, item, rank_);
        const std::byte* from = mine.problem->w.tiles + int64_t{mine.first} * kWeightTileBytes;
        if (n > 0) BarrierWait(&s_.used, (n - 1) & 1);
        for (int i = 0; i < kBlocks; ++i, from += kWeightTileBytes) {
          if (n == 0 && i >= kOnTheirWay) BarrierWait(&s_.landed[i - kOnTheirWay], 0);
          BarrierExpectBytes(&s_.landed[i], kWeightTileBytes);
          BulkCopyTo(SharedAddress(s_.weights[i]), from, kWeightTileBytes, &s_.landed[i], policy);
        }
      }
    }
    __syncwarp();
    ClusterWait();
  }

  __device__ void Consume() {
    if (threadIdx.x == 0) {
      for (int n = 0; n < kMostItems; ++n) {
        BarrierInit(&s_.inbox_full[n], 1);
        const int item = cluster_ + n * step_;
        if (item >= p_.num_items) continue;
        const int parts = Item(p_, item, rank_).parts;
        BarrierExpectBytes(&s_.inbox_full[n], static_cast<uint32_t>(parts) * kTileMatrixRows * 4);
      }
      BarrierInitFence();
    }
    Meet();
    for (int item = cluster_, n = 0; item < p_.num_items; item += step_, ++n) {
      const Item mine(p_, item, rank_);
      float scale[kBlocks] = {};
      if (mine.fp8) LoadScales(mine.scales(), scale);
      if (n == 0) {
        ClusterWait();
        WaitForPredecessor();
        AllowSuccessor();
      } else {
        NamedBarrier(1, kConsumers);  // everybody has multiplied
      }
      LoadActivations(mine);
      FenceSharedForWgmma();
      NamedBarrier(1, kConsumers);
      const uint64_t b = TokenDescriptor(s_.x);
      for (uint64_t& landed : s_.landed) BarrierWait(&landed, n & 1);
      const float2 d =
          mine.fp8 ? MultiplyLandedFp8(s_.weights, b, scale, s_.x_scales) : MultiplyBf16(s_, b);
      BarrierArrive(&s_.used);
      Send(mine, n, d);
      if (mine.part == 0 && warp() == 0) Write(mine, n);
    }
  }

 private:
  // All threads, once: the block's barriers are ready.
  __device__ void Meet() const {
    NamedBarrier(2, kThreads);
    ClusterArrive();
  }

  // The first threads 16 bytes each of the token's columns, the next ones their scales.
  __device__ void LoadActivations(const Item& mine) {
    const GemmProblem& p = *mine.problem;
    const auto thread = static_cast<int>(threadIdx.x);
    const int64_t groups = mine.fp8 ? p.x_fp8.row_groups : p.x_bf16.row_groups;
    const auto* const tiles = mine.fp8 ? reinterpret_cast<const std::byte*>(p.x_fp8.codes)
                                       : reinterpret_cast<const std::byte*>(p.x_bf16.values);
    const int block = mine.part * kBlocks;
    if (thread < 8 * kBlocks) {
      const std::byte* const x =
          tiles + (block + thread / 8) * groups * kTileBytes + thread % 8 * 16;
      StoreShared(SharedAddress(s_.x) + thread * 16, __ldcg(reinterpret_cast<const uint4*>(x)));
    } else if (const int i = thread - 8 * kBlocks; mine.fp8 && i < kBlocks) {
      s_.x_scales[i] = __ldcg(&p.x_fp8.scales[(block + i) * groups * 8]);
    }
  }

  // To the row tile's first block.
  __device__ void Send(const Item& mine, int n, float2 d) const {
    if (lane() % 4 != 0) return;
    const auto owner = static_cast<uint32_t>(rank_ - mine.part);
    const float* const to = &s_.inbox[n][mine.part][warp() * 16 + lane() / 4];
    SendToBlock(to, d.x, &s_.inbox_full[n], owner);
    SendToBlock(to + 8, d.y, &s_.inbox_full[n], owner);
  }

  // Two rows a lane.
  __device__ void Write(const Item& mine, int n) const {
    BarrierWaitCluster(&s_.inbox_full[n], 0);
    const auto sent = [&](int r) {
      return *reinterpret_cast<const float2*>(&s_.inbox[n][r][lane() * 2]);
    };
    const auto two = [&](int r) { return Add(sent(r), sent(r + 1)); };
    float2 sum = Add(two(0), two(2));
    if (!mine.fp8) sum = Add(sum, Add(two(4), two(6)));
    const GemmProblem& p = *mine.problem;
    const int row = mine.tile * kTileMatrixRows + lane() * 2;
    if (p.output == GemmOutput::kBf16) {
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.y) + row) =
          __floats2bfloat162_rn(sum.x, sum.y);
    } else {
      *reinterpret_cast<float2*>(static_cast<float*>(p.y) + row) = sum;
    }
  }

  const Params& p_;
  Shared& s_;
  const int cluster_, rank_, step_;
};

__global__ void __launch_bounds__(kThreads, 3)
    InputAloneKernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) std::byte memory[];
  InputAlone products(params, *reinterpret_cast<Shared*>(memory));
  if (warp() == kConsumers / 32) {
    products.Fetch();
  } else {
    products.Consume();
  }
}

int Parts(const GemmProblem& p) { return p.w.kind == TileKind::kFp8 ? kFp8Parts : kBf16Parts; }

}  // namespace

bool AreInputAlone(const CudaGemmParams& params) {
  if (params.num_tokens != 1 || params.num_problems < 2 || params.prefill ||
      params.number.of_step != nullptr) {
    return false;
  }
  return std::all_of(
      params.problems, params.problems + params.num_problems, [](const GemmProblem& p) {
        const bool kind = p.w.kind == TileKind::kFp8 || p.w.kind == TileKind::kBf16;
        return kind && p.w.is_whole() && p.groups == 1 && p.output != GemmOutput::kFp8Tiles &&
               p.w.col_blocks() == Parts(p) * kBlocks &&
               p.w.rows % (kTileMatrixRows * kCluster / Parts(p)) == 0;
      });
}

void LaunchInputAlone(const CudaGemmParams& params, device::Stream& stream) {
  Params alone{};
  for (int i = 0; i < params.num_problems; ++i) {
    const GemmProblem& p = alone.problems[i] = params.problems[i];
    alone.first_item[i + 1] =
        alone.first_item[i] + static_cast<int>(p.w.row_tiles()) * Parts(p) / kCluster;
  }
  alone.num_items = alone.first_item[params.num_problems];
  static const int room =
      MaxClusters(InputAloneKernel, kCluster, kThreads, sizeof(Shared)) - kBoundaryClusters;
  const int clusters = std::clamp(room, (alone.num_items + 1) / kMostItems, alone.num_items);
  LaunchClusters(InputAloneKernel, static_cast<unsigned>(clusters * kCluster), kCluster, kThreads,
                 sizeof(Shared), stream, alone);
}

}  // namespace fathom::kernels
