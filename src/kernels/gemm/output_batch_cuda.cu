#include "base/check.h"
#include "kernels/collective/packets.cuh"
#include "kernels/gemm/output_alone_cuda.h"
#include "kernels/gemm/output_batch_cuda.h"
#include "kernels/gemm/resident_weights.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = kResidentThreads, kBlocks = kResidentBlocks;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 16, kFewTokens = 8;
constexpr int kXTileBytes = kTokens * 128;          // of the first product
constexpr int kGroupedCluster = 2 * kGroupedParts;  // blocks

__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ int warp() { return static_cast<int>(threadIdx.x / 32); }

template <int kPlaces>
struct BatchShared : WeightPlaces<kPlaces> {
  uint64_t full, inbox_full;  // activations; other blocks' sums

  // By one warp.
  __device__ void Init(uint32_t inbox_bytes) {
    this->InitLanded(&full, &inbox_full);
    BarrierInitFence();
    __syncwarp();
    if (lane() == 0) BarrierExpectBytes(&inbox_full, inbox_bytes);
  }
};

struct GroupedShared : BatchShared<kBlocks> {
  alignas(16) float inbox[2][kGroupedParts][128];  // of this block's tokens
};

// A cluster has two row tiles, a block for each and each part of the columns. Of eight blocks the
// one of rank t % 8 finishes token t. Activations come to where the first weights were.
template <int kChains>
__global__ void __launch_bounds__(kThreads, 2)
    GroupedBatchKernel(const __grid_constant__ CudaGroupedBatchParams params) {
  constexpr int kAhead = 4;  // column blocks that are widened before there are activations
  static_assert(2 * kBlocks * kXTileBytes <= kAhead * kWeightTileBytes);
  extern __shared__ __align__(1024) std::byte memory[];
  auto& s = *reinterpret_cast<GroupedShared*>(memory);
  const GemmProblem& p = params.product;
  const int num_tokens = params.num_tokens;
  const auto rank = static_cast<int>(ClusterRank());
  const int half = rank / kGroupedParts, part = rank % kGroupedParts;
  const int pair = static_cast<int>(blockIdx.x) / kGroupedCluster, tile = 2 * pair + half;
  AllowSuccessor();
  if (warp() == 0) {
    const int mine = (num_tokens - rank + kGroupedCluster - 1) / kGroupedCluster;
    s.Init(static_cast<uint32_t>(mine) * sizeof(s.inbox[0]));
    if (lane() < kBlocks) {
      s.Fetch(lane(),
              p.w.tiles + int64_t{tile * kGroupedBlocks + BlockOfPart<kChains>(part, lane())} *
                              kWeightTileBytes);
    }
  }
  __nv_bfloat162 scale[kBlocks];
  LoadWideScales<kChains>(p.w.scales + pair * kGroupedBlocks, part, scale);
  const int group = tile / (static_cast<int>(p.w.rows) / kTileMatrixRows / p.groups);
  __syncthreads();
  ClusterArrive();
  uint32_t a[kAhead][8][4];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    BarrierWait(&s.landed[i], 0);
    WidenTile(s.weights[i], scale[i], a[i]);
  }
  FenceSharedForWgmma();
  __syncthreads();
  WaitForPredecessor();
  if (warp() == 0) {
    const uint32_t bytes = static_cast<uint32_t>(num_tokens) * 128;
    if (lane() == 0) BarrierExpectBytes(&s.full, 2 * kBlocks * bytes);
    __syncwarp();
    if (lane() < 2 * kBlocks) {
      const int block = group * kGroupedBlocks + BlockOfPart<kChains>(part, lane() / 2);
      const int64_t x_tile = 2 * block + lane() % 2;
      BulkCopyTo(SharedAddress(s.weights) + static_cast<uint32_t>(lane() * kXTileBytes),
                 reinterpret_cast<const std::byte*>(p.x_bf16.values) +
                     x_tile * p.x_bf16.row_groups * kTileBytes,
                 bytes, &s.full);
    }
  }
  BarrierWait(&s.full, 0);
  const uint64_t b = SmemDescriptor(__shfl_sync(0xffffffffu, SharedAddress(s.weights), 0));
  const auto b_of = [&](int i, int q) {
    return b + (2 * i + q / 4) * (kXTileBytes / 16) + q % 4 * 2;
  };
  float chains[kChains][kTokens / 2] = {};
  MultiplyWidened(s, scale, a, b_of, chains);
  float (&d)[kTokens / 2] = chains[0];
  if constexpr (kChains == 2) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) d[i] += chains[1][i];
  }
  ClusterWait();
  const int row = half * 64 + warp() * 16 + lane() / 4;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int owner = lane() % 4 * 2 + e;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (8 * j + owner >= num_tokens) continue;
      SendToBlock(&s.inbox[j][part][row], d[4 * j + e], &s.inbox_full, owner);
      SendToBlock(&s.inbox[j][part][row + 8], d[4 * j + 2 + e], &s.inbox_full, owner);
    }
  }
  const int token = 8 * warp() + rank;
  BarrierWaitCluster(&s.inbox_full, 0);
  if (warp() >= 2 || token >= num_tokens) return;
  const auto sent = [&](int r) {
    return *reinterpret_cast<const float4*>(&s.inbox[warp()][r][lane() * 4]);
  };
  const float4 sum = Add(Add(sent(0), sent(1)), Add(sent(2), sent(3)));
  const Fp8Quad fp8 = QuantizeQuad(sum);
  const Fp8Tiles& y = p.y_fp8;
  *reinterpret_cast<uint32_t*>(
      y.codes + Fp8TileOffset(token, pair * 128 + lane() * 4, y.row_groups)) = fp8.codes;
  if (lane() == 0) y.scales[pair * y.row_groups * 8 + token] = Ue8m0Value(fp8.scale);
}

// Of the second product, for a block that has kParts parts of the columns.
template <int kN, int kParts>
struct SumsShared : BatchShared<kParts * kBlocks> {
  alignas(1024) std::byte x[kParts * kBlocks][kN * 128];
  alignas(16) float x_scales[kParts * kBlocks][kN];
  alignas(16) float4 inbox[kN / 8][kThreads];  // the first block's sums, as its threads have them
  float sums[kN][kTileMatrixRows + 2];

  // d += these.
  __device__ void AddInbox(float (&d)[kN / 2]) {
    BarrierWaitCluster(&this->inbox_full, 0);
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      const float4 v = inbox[i][threadIdx.x];
      d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
    }
  }
};

// A cluster of two blocks has a row tile. Of up to eight tokens each has some parts of the columns;
// of more both have one, in which the second one's sums go on from the first one's.
template <int kN, int kParts>
__global__ void __launch_bounds__(kThreads, kParts == 1 ? 2 : 1)
    SumsBatchKernel(const __grid_constant__ CudaSumsBatchParams params) {
  constexpr bool kGoesOn = kN > kFewTokens;
  constexpr int kTiles = kParts * kBlocks;
  static_assert(2 * kTiles <= 32 && (kParts == 1 || !kGoesOn));
  extern __shared__ __align__(1024) std::byte memory[];
  auto& s = *reinterpret_cast<SumsShared<kN, kParts>*>(memory);
  const GemmProblem& p = params.product;
  const int num_tokens = params.num_tokens;
  const auto rank = static_cast<int>(ClusterRank());
  const int tile = static_cast<int>(blockIdx.x) / 2, first = rank * kTiles;
  const auto row_blocks = static_cast<int>(p.w.matrix_col_blocks());
  if (warp() == 0) {
    s.Init(sizeof(s.inbox));
    if (lane() < kTiles) {
      s.Fetch(lane(), p.w.tiles + int64_t{tile * row_blocks + first + lane()} * kWeightTileBytes);
    }
  }
  float scale[kTiles];
  LoadScales(p.w.scales + (tile / 2 * row_blocks + first), scale);
  const PeerView& peers = params.exchange.peers;
  const uint64_t number = peers.size == 1 ? 0 : ExchangeNumber(params.exchange);
  __syncthreads();
  ClusterArrive();
  WaitForPredecessor();
  AllowSuccessor();
  if (warp() == 0) {
    const uint32_t bytes = static_cast<uint32_t>(num_tokens) * 128;
    if (lane() == 0) BarrierExpectBytes(&s.full, kTiles * (bytes + sizeof(s.x_scales[0])));
    __syncwarp();
    const int64_t block = first + lane() % kTiles;
    const int64_t groups = p.x_fp8.row_groups;
    if (lane() < kTiles) {
      BulkCopyTo(SharedAddress(s.x[lane()]), p.x_fp8.codes + block * groups * kTileBytes, bytes,
                 &s.full);
    } else if (lane() < 2 * kTiles) {
      BulkCopyTo(SharedAddress(s.x_scales[lane() - kTiles]), p.x_fp8.scales + block * groups * 8,
                 sizeof(s.x_scales[0]), &s.full);
    }
  }
  BarrierWait(&s.full, 0);
  const uint64_t b = SmemDescriptor(__shfl_sync(0xffffffffu, SharedAddress(s.x), 0));
  float product[kBlocks][kN / 2];
  MultiplyTokens<kN>(s, 0, b, product);
  ClusterWait();
  float d[kN / 2] = {};
  if (kGoesOn && rank != 0) s.AddInbox(d);
  AddTokens<kN>(product, 0, scale, s.x_scales, d);
  if constexpr (kParts == 2) {
    MultiplyTokens<kN>(s, kBlocks, b, product);
    float second[kN / 2] = {};
    AddTokens<kN>(product, kBlocks, scale, s.x_scales, second);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] += second[i];
  }
  if (rank == 0) {
    const uint32_t barrier = AddressInBlock(&s.inbox_full, 1);
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      SendInCluster(AddressInBlock(&s.inbox[i][threadIdx.x], 1),
                    float4{d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]}, barrier);
    }
    return;
  }
  if (!kGoesOn) s.AddInbox(d);
  const int row = warp() * 16 + lane() / 4;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float* const sums = s.sums[8 * j + lane() % 4 * 2 + e];
      sums[row] = d[4 * j + e], sums[row + 8] = d[4 * j + 2 + e];
    }
  }
  __syncthreads();
  const int column = tile * kTileMatrixRows + lane() * 2;
  for (int token = warp(); token < num_tokens; token += kWarps) {
    const float2 sum = *reinterpret_cast<const float2*>(&s.sums[token][lane() * 2]);
    *reinterpret_cast<float2*>(static_cast<float*>(p.y) + token * p.y_stride + column) = sum;
    if (peers.size == 1) continue;
    SendPacketToAll(peers, number, SumPacket(token, p.y_stride, column),
                    {__float_as_uint(sum.x), __float_as_uint(sum.y)});
  }
}

}  // namespace

bool HaveBatchProducts(const TiledMatrix& grouped, const TiledMatrix& sums, int64_t num_tokens) {
  const int most = 4 * sums.cols == sums.matrix_cols ? kTokens : kFewTokens;
  return HaveAloneProducts(grouped, sums) && num_tokens > 1 && num_tokens <= most;
}

void Launch(const CudaGroupedBatchParams& params, device::Stream& stream) {
  CHECK(params.product.output == GemmOutput::kFp8Tiles);
  LaunchClusters(params.few_rows ? GroupedBatchKernel<2> : GroupedBatchKernel<1>,
                 static_cast<unsigned>(params.product.w.row_tiles() * kGroupedParts),
                 kGroupedCluster, kThreads, sizeof(GroupedShared), stream, params);
}
void Launch(const CudaSumsBatchParams& params, device::Stream& stream) {
  CHECK(params.product.output == GemmOutput::kF32);
  const auto launch = [&](auto kernel, size_t shared_bytes) {
    LaunchClusters(kernel, static_cast<unsigned>(2 * params.product.w.row_tiles()), 2, kThreads,
                   shared_bytes, stream, params);
  };
  if (params.num_tokens > kFewTokens) {
    launch(SumsBatchKernel<kTokens, 1>, sizeof(SumsShared<kTokens, 1>));
  } else if (params.product.w.col_blocks() == 4 * kBlocks) {
    launch(SumsBatchKernel<kFewTokens, 2>, sizeof(SumsShared<kFewTokens, 2>));
  } else {
    launch(SumsBatchKernel<kFewTokens, 1>, sizeof(SumsShared<kFewTokens, 1>));
  }
}

}  // namespace fathom::kernels
