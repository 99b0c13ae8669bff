#include <algorithm>

#include "base/check.h"
#include "kernels/collective/packets.cuh"
#include "kernels/gemm/output_alone_cuda.h"
#include "kernels/gemm/resident_weights.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = kResidentThreads, kBlocks = kResidentBlocks;
constexpr int kWarps = kThreads / 32;
constexpr int kMatrixParts = 8;  // of the columns of the second product's whole matrix
constexpr int kMultiprocessors = 132;

__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ int warp() { return static_cast<int>(threadIdx.x / 32); }

struct GroupedShared : WeightPlaces<kBlocks> {
  alignas(128) std::byte x[kBlocks * 256 + kBehindToken];
};

// A block has a row tile and a part of the columns. Of its column blocks kAhead are widened before
// there are activations.
template <int kAhead>
__global__ void __launch_bounds__(kThreads, kAhead == 4 ? 3 : 2)
    GroupedAloneKernel(const __grid_constant__ CudaGroupedAloneParams params) {
  constexpr int kOnTheirWay = 3;  // so that what attention reads does not queue behind more
  extern __shared__ __align__(1024) std::byte memory[];
  auto& s = *reinterpret_cast<GroupedShared*>(memory);
  const GemmProblem& p = params.product;
  const auto thread = static_cast<int>(threadIdx.x);
  const int tile = static_cast<int>(blockIdx.x) / kGroupedParts;
  const int part = static_cast<int>(blockIdx.x) % kGroupedParts, first = BlockOfPart<1>(part, 0);
  const auto* const weights = p.w.tiles + int64_t{tile * kGroupedBlocks + first} * kWeightTileBytes;
  const auto fetch = [&](int i) { s.Fetch(i, weights + i * (2 * kWeightTileBytes)); };
  AllowSuccessor();
  if (warp() == 0) {
    s.InitLanded();
    BarrierInitFence();
    __syncwarp();
    if (lane() < kOnTheirWay) fetch(lane());
  }
  __nv_bfloat162 scale[kBlocks];
  LoadWideScales<1>(p.w.scales + tile / 2 * kGroupedBlocks, part, scale);
  // A thread's 16 bytes of the activations: of a column block, which are two tiles.
  const int group = tile / (static_cast<int>(p.w.rows) / kTileMatrixRows / p.groups);
  const int block = group * kGroupedBlocks + first + thread / 16 * 2;
  const int64_t x_tile = (2 * block + thread % 16 / 8) * p.x_bf16.row_groups;
  const auto* const x =
      reinterpret_cast<const std::byte*>(p.x_bf16.values) + x_tile * kTileBytes + thread % 8 * 16;
  __syncthreads();
  uint32_t a[kAhead][8][4];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    if (i >= kAhead && i + kOnTheirWay >= kBlocks) break;
    if (i < kAhead || warp() == 0) BarrierWait(&s.landed[i], 0);
    if (i + kOnTheirWay < kBlocks && thread == 0) fetch(i + kOnTheirWay);
    __syncwarp();
    if (i < kAhead) WidenTile(s.weights[i], scale[i], a[i]);
  }
  WaitForPredecessor();
  StoreShared(SharedAddress(s.x) + thread * 16, __ldcg(reinterpret_cast<const uint4*>(x)));
  FenceSharedForWgmma();
  __syncthreads();
  const uint64_t b = TokenDescriptor(s.x);
  float d[1][4] = {};
  MultiplyWidened(s, scale, a, [&](int i, int q) { return b + i * 16 + q * 2; }, d);
  if (lane() % 4 != 0) return;
  float* const y =
      params.parts + part * p.w.rows + tile * kTileMatrixRows + warp() * 16 + lane() / 4;
  y[0] = d[0][0];
  y[8] = d[0][2];
}

// Of the second product, for a block that has kParts parts of the columns. Two parts come through
// fewer places, which leave room for a block of the boundary beside.
template <int kParts>
inline constexpr int kPlacesOf = std::min(kParts * kBlocks, 14);
template <int kParts>
struct SumsShared : WeightPlaces<kPlacesOf<kParts>> {
  alignas(128) std::byte x[kParts * kBlocks * 128 + kBehindToken];
  float x_scales[kParts * kBlocks];
  alignas(16) float inbox[2][kTileMatrixRows];
  uint64_t empty[kPlacesOf<kParts>];
  uint64_t inbox_full;
};

// A cluster of two blocks has a row tile, each half of the rank's columns; the first one adds up
// their sums.
template <int kParts>
class SumsAlone {
 public:
  using Shared = SumsShared<kParts>;

  __device__ SumsAlone(const CudaSumsAloneParams& params, Shared& shared)
      : params_(params),
        p_(params.product),
        s_(shared),
        rank_(static_cast<int>(ClusterRank())),
        tile_(static_cast<int>(blockIdx.x) / 2),
        row_blocks_(static_cast<int>(p_.w.matrix_col_blocks())) {}

  // The last warp.
  __device__ void FetchWeights() {
    const std::byte* const from =
        p_.w.tiles + int64_t{tile_ * row_blocks_ + rank_ * kTiles} * kWeightTileBytes;
    s_.InitLanded();
    if (lane() == 0) {
      for (auto& barrier : s_.empty) BarrierInit(&barrier, kWarps * kWarpArrivals);
      BarrierInit(&s_.inbox_full, 1);
    }
    BarrierInitFence();
    __syncwarp();
    if (lane() == 0) BarrierExpectBytes(&s_.inbox_full, sizeof(s_.inbox));
    if (lane() < kOnTheirWay) s_.Fetch(lane(), from + lane() * kWeightTileBytes);
    Meet();
    for (int i = kOnTheirWay; i < kTiles; ++i) {
      Await(s_.landed, i - kOnTheirWay);
      if (i >= kPlaces) Await(s_.empty, i - kPlaces);
      if (lane() == 0) s_.Fetch(i % kPlaces, from + i * kWeightTileBytes);
    }
    ClusterWait();
  }

  // The others.
  __device__ void Multiply() {
    float scale[kTiles];
    LoadScales(p_.w.scales + tile_ / 2 * row_blocks_ + rank_ * kTiles, scale);
    const PeerView& peers = params_.exchange.peers;
    const uint64_t number = peers.size == 1 ? 0 : ExchangeNumber(params_.exchange);
    Meet();
    WaitForPredecessor();
    MakeActivations();
    FenceSharedForWgmma();
    NamedBarrier(1, kThreads);
    const uint64_t b = TokenDescriptor(s_.x);
    float2 sum = MultiplyPart(0, b, scale);
    if (kParts == 2) sum = Add(sum, MultiplyPart(1, b, scale));
    ClusterWait();  // the other block has started
    if (lane() % 4 == 0) {
      const float* const to = &s_.inbox[rank_][warp() * 16 + lane() / 4];
      SendToBlock(to, sum.x, &s_.inbox_full, 0);
      SendToBlock(to + 8, sum.y, &s_.inbox_full, 0);
    }
    if (rank_ == 0 && warp() == 0) Write(peers, number);
  }

 private:
  static constexpr int kTiles = kParts * kBlocks, kPlaces = kPlacesOf<kParts>;
  static constexpr int kOnTheirWay = 8;

  // The i-th column block's turn of its place.
  __device__ static void Await(uint64_t* barriers, int i) {
    BarrierWait(&barriers[i % kPlaces], static_cast<uint32_t>(i / kPlaces) & 1);
  }
  __device__ static void Meet() {
    __syncthreads();
    ClusterArrive();
  }

  // The first product's output as FP8 codes, some column blocks a warp.
  __device__ void MakeActivations() const {
    constexpr int kEach = kTiles / kWarps;
    const int64_t columns = p_.w.cols;
    float4 parts[kEach][kGroupedParts];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = (rank_ * kTiles + warp() * kEach + i) * 128 + lane() * 4;
#pragma unroll
      for (int k = 0; k < kGroupedParts; ++k) {
        parts[i][k] = __ldcg(reinterpret_cast<const float4*>(params_.parts + k * columns + column));
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Fp8Quad fp8 =
          QuantizeQuad(Add(Add(parts[i][0], parts[i][1]), Add(parts[i][2], parts[i][3])));
      const int block = warp() * kEach + i;
      reinterpret_cast<uint32_t*>(s_.x)[block * 32 + lane()] = fp8.codes;
      if (lane() == 0) s_.x_scales[block] = Ue8m0Value(fp8.scale);
    }
  }

  // A part's sums of two rows.
  __device__ float2 MultiplyPart(int part, uint64_t b, const float (&scale)[kTiles]) const {
    float product[kBlocks][4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = part * kBlocks + i;
      Await(s_.landed, block);
      const uint64_t a = SmemDescriptor(SharedAddress(s_.weights[block % kPlaces]));
      WgmmaFence();
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        Wgmma<WgmmaType::kE4m3, 8>::FromSmem(product[i], a + 2 * q, b + block * 8 + q * 2, q != 0);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    float2 sum{};
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = part * kBlocks + i;
      if (block + kPlaces < kTiles) WarpArrive(&s_.empty[block]);
      ReadyRegisters(product[i]);
      const float v = scale[block] * s_.x_scales[block];
      sum.x += product[i][0] * v;
      sum.y += product[i][2] * v;
    }
    return sum;
  }

  __device__ void Write(const PeerView& peers, uint64_t number) const {
    BarrierWaitCluster(&s_.inbox_full, 0);
    const auto sent = [&](int r) {
      return *reinterpret_cast<const float2*>(&s_.inbox[r][lane() * 2]);
    };
    const float2 sum = Add(sent(0), sent(1));
    const int row = tile_ * kTileMatrixRows + lane() * 2;
    *reinterpret_cast<float2*>(static_cast<float*>(p_.y) + row) = sum;
    if (peers.size == 1) return;
    SendPacketToAll(peers, number, SumPacket(0, p_.y_stride, row),
                    {__float_as_uint(sum.x), __float_as_uint(sum.y)});
  }

  const CudaSumsAloneParams& params_;
  const GemmProblem& p_;
  Shared& s_;
  const int rank_, tile_, row_blocks_;
};

template <int kParts>
__global__ void __launch_bounds__(kThreads + 32, 3)
    SumsAloneKernel(const __grid_constant__ CudaSumsAloneParams params) {
  extern __shared__ __align__(1024) std::byte memory[];
  AllowSuccessor();
  SumsAlone<kParts> sums(params, *reinterpret_cast<SumsShared<kParts>*>(memory));
  warp() == kWarps ? sums.FetchWeights() : sums.Multiply();
}

// A block for each multiprocessor: all of them read weights.
template <int kParts>
void LaunchSums(const CudaSumsAloneParams& params, device::Stream& stream) {
  LaunchClusters(SumsAloneKernel<kParts>, static_cast<unsigned>(2 * params.product.w.row_tiles()),
                 2, kThreads + 32, std::max(sizeof(SumsShared<kParts>), kAloneSharedBytes), stream,
                 params);
}

}  // namespace

bool HaveAloneProducts(const TiledMatrix& grouped, const TiledMatrix& sums) {
  return grouped.kind == TileKind::kFp8AsBf16 && grouped.col_blocks() == kGroupedBlocks &&
         grouped.rows % 128 == 0 && sums.kind == TileKind::kFp8 &&
         sums.rows % kTileMatrixRows == 0 && sums.cols == grouped.rows &&
         sums.matrix_col_blocks() == kMatrixParts * kBlocks &&
         (2 * sums.cols == sums.matrix_cols || 4 * sums.cols == sums.matrix_cols);
}

void Launch(const CudaGroupedAloneParams& params, device::Stream& stream) {
  const auto blocks = static_cast<unsigned>(params.product.w.row_tiles() * kGroupedParts);
  LaunchKernel(blocks > kMultiprocessors ? GroupedAloneKernel<4> : GroupedAloneKernel<6>, blocks,
               kThreads, sizeof(GroupedShared), stream, params);
}

void Launch(const CudaSumsAloneParams& params, device::Stream& stream) {
  CHECK(params.product.output == GemmOutput::kF32);
  params.product.w.col_blocks() == 4 * kBlocks ? LaunchSums<2>(params, stream)
                                               : LaunchSums<1>(params, stream);
}

}  // namespace fathom::kernels
