#include "base/check.h"
#include "kernels/gemm/output_rows_cuda.h"
#include "kernels/gemm/resident_weights.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = kResidentThreads;  // that multiply
constexpr int kWarps = kThreads / 32;
constexpr int kMultiprocessors = 132;
constexpr int kParts = 8;   // of the columns, of one chain of sums each, and blocks of a cluster
constexpr int kTiles = 16;  // column blocks of a part
constexpr int kOnTheirWay = 8;  // so that what others read does not queue behind all weights

__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ int warp() { return static_cast<int>(threadIdx.x / 32); }

template <int kN>
struct RowsShared : WeightPlaces<kTiles> {
  alignas(1024) std::byte x[kTiles][kN * 128];
  alignas(16) float x_scales[kTiles][kN];
  alignas(16) float inbox[kN / 8][kParts][kTileMatrixRows];  // of this block's tokens
  uint64_t full, inbox_full;                                 // activations; all blocks' sums
};

// A cluster has a row tile, a block a part of the columns. The block of rank t % 8 finishes token
// t.
template <int kN>
class OutputRows {
 public:
  using Shared = RowsShared<kN>;

  __device__ OutputRows(const CudaOutputRowsParams& params, Shared& shared)
      : p_(params.product),
        s_(shared),
        num_tokens_(params.num_tokens),
        rank_(static_cast<int>(ClusterRank())),
        tile_(static_cast<int>(blockIdx.x) / kParts) {}

  // The last warp.
  __device__ void FetchWeights() {
    const std::byte* const from =
        p_.w.tiles + int64_t{(tile_ * kParts + rank_) * kTiles} * kWeightTileBytes;
    s_.InitLanded();
    if (lane() == 0) BarrierInit(&s_.full, 1), BarrierInit(&s_.inbox_full, 1);
    BarrierInitFence();
    __syncwarp();
    const int mine = (num_tokens_ - rank_ + kParts - 1) / kParts;
    if (lane() == 0) {
      BarrierExpectBytes(&s_.inbox_full, static_cast<uint32_t>(mine) * sizeof(s_.inbox[0]));
    }
    if (lane() < kOnTheirWay) s_.Fetch(lane(), from + lane() * kWeightTileBytes);
    Meet();
    for (int i = kOnTheirWay; i < kTiles; ++i) {
      BarrierWait(&s_.landed[i - kOnTheirWay], 0);
      if (lane() == 0) s_.Fetch(i, from + i * kWeightTileBytes);
    }
    ClusterWait();
  }

  // The others.
  __device__ void Multiply() {
    float scale[kTiles];
    LoadScales(p_.w.scales + (tile_ / 2 * kParts + rank_) * kTiles, scale);
    Meet();
    WaitForPredecessor();
    FetchActivations();
    BarrierWait(&s_.full, 0);
    const uint64_t b = SmemDescriptor(__shfl_sync(0xffffffffu, SharedAddress(s_.x), 0));
    float d[kN / 2] = {};
#pragma unroll
    for (int first = 0; first < kTiles; first += kTogether) AddTiles(first, b, scale, d);
    ClusterWait();  // all blocks have started
    Send(d);
    Write();
  }

 private:
  static constexpr int kTogether = 8;  // column blocks whose products are under way

  __device__ static void Meet() {
    __syncthreads();
    ClusterArrive();
  }

  // Some column blocks a warp.
  __device__ void FetchActivations() const {
    constexpr int kEach = kTiles / kWarps;
    const uint32_t bytes = static_cast<uint32_t>(num_tokens_) * 128;
    if (threadIdx.x == 0) {
      BarrierExpectBytes(&s_.full, kTiles * (bytes + sizeof(s_.x_scales[0])));
    }
    if (lane() >= 2 * kEach) return;
    const int at = warp() * kEach + lane() % kEach;
    const int64_t block = rank_ * kTiles + at, groups = p_.x_fp8.row_groups;
    if (lane() < kEach) {
      BulkCopyTo(SharedAddress(s_.x[at]), p_.x_fp8.codes + block * groups * kTileBytes, bytes,
                 &s_.full);
    } else {
      BulkCopyTo(SharedAddress(s_.x_scales[at]), p_.x_fp8.scales + block * groups * 8,
                 sizeof(s_.x_scales[0]), &s_.full);
    }
  }

  // The chain's column blocks `first` and on.
  __device__ __forceinline__ void AddTiles(int first, uint64_t b, const float (&scale)[kTiles],
                                           float (&d)[kN / 2]) const {
    float product[kTogether][kN / 2];
    MultiplyTokens<kN>(s_, first, b, product);
    AddTokens<kN>(product, first, scale, s_.x_scales, d);
  }

  // The first of this thread's tokens of eight.
  __device__ static int Token() { return lane() % 4 * 2; }

  // Each sum to the block that finishes its token.
  __device__ void Send(const float (&d)[kN / 2]) const {
    const int row = warp() * 16 + lane() / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int owner = Token() + e;
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        if (8 * j + owner >= num_tokens_) continue;
        SendToBlock(&s_.inbox[j][rank_][row], d[4 * j + e], &s_.inbox_full, owner);
        SendToBlock(&s_.inbox[j][rank_][row + 8], d[4 * j + 2 + e], &s_.inbox_full, owner);
      }
    }
  }

  // A token a warp.
  __device__ void Write() const {
    BarrierWaitCluster(&s_.inbox_full, 0);
    const int token = 8 * warp() + rank_;
    if (warp() >= kN / 8 || token >= num_tokens_) return;
    float2 sums[kParts];
#pragma unroll
    for (int r = 0; r < kParts; ++r) {
      sums[r] = *reinterpret_cast<const float2*>(&s_.inbox[warp()][r][lane() * 2]);
    }
#pragma unroll
    for (int apart = 1; apart < kParts; apart *= 2) {
#pragma unroll
      for (int r = 0; r < kParts; r += 2 * apart) sums[r] = Add(sums[r], sums[r + apart]);
    }
    const int64_t to = token * p_.y_stride + tile_ * kTileMatrixRows + lane() * 2;
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p_.y) + to) =
        PackBf16(sums[0].x, sums[0].y);
  }

  const GemmProblem& p_;
  Shared& s_;
  const int num_tokens_, rank_, tile_;
};

template <int kN>
__global__ void __launch_bounds__(kThreads + 32, 1)
    OutputRowsKernel(const __grid_constant__ CudaOutputRowsParams params) {
  extern __shared__ __align__(1024) std::byte memory[];
  AllowSuccessor();
  OutputRows<kN> rows(params, *reinterpret_cast<RowsShared<kN>*>(memory));
  warp() == kWarps ? rows.FetchWeights() : rows.Multiply();
}

template <int kN>
void LaunchRows(const CudaOutputRowsParams& params, device::Stream& stream) {
  LaunchClusters(OutputRowsKernel<kN>, static_cast<unsigned>(kParts * params.product.w.row_tiles()),
                 kParts, kThreads + 32, sizeof(RowsShared<kN>), stream, params);
}

}  // namespace

bool HaveRowsProducts(const TiledMatrix& grouped, const TiledMatrix& rows, int64_t num_tokens) {
  return grouped.kind == TileKind::kFp8AsBf16 && grouped.col_blocks() == kGroupedBlocks &&
         grouped.rows % 128 == 0 && rows.kind == TileKind::kFp8 && rows.is_whole() &&
         rows.col_blocks() == kParts * kTiles && rows.rows % kTileMatrixRows == 0 &&
         kParts * rows.row_tiles() <= kMultiprocessors && num_tokens <= 16;
}

void Launch(const CudaOutputRowsParams& params, device::Stream& stream) {
  CHECK(params.product.output == GemmOutput::kBf16);
  params.num_tokens <= 8 ? LaunchRows<8>(params, stream) : LaunchRows<16>(params, stream);
}

}  // namespace fathom::kernels
