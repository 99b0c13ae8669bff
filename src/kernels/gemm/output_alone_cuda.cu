#include "base/check.h"
#include "kernels/collective/packets.cuh"
#include "kernels/gemm/output_alone_cuda.h"
#include "kernels/gemm/stream_products.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = 128;  // a warpgroup
constexpr int kWarps = kThreads / 32;
constexpr int kBlocks = 8;  // column blocks of a block, a part of the columns in both products
constexpr int kWeightTileBytes = TileMatrixBytes(TileKind::kFp8);  // as of kFp8AsBf16
constexpr int kGroupedBlocks = kGroupedParts * kBlocks;            // of a row
constexpr int kMatrixParts = 8;  // of the columns of the second product's whole matrix
// Of the blocks of weights that are widened, those that can be before there are activations: as
// many as there are registers for with three blocks a multiprocessor.
constexpr int kAhead = 4;

__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ int warp() { return static_cast<int>(threadIdx.x / 32); }

// Eight column blocks of one row tile, and one token's activations of them.
template <int kXBytes>
struct Shared {
  alignas(1024) std::byte weights[kBlocks][kWeightTileBytes];
  alignas(128) std::byte x[kBlocks * kXBytes + kBehindToken];
  uint64_t landed[kBlocks];

  // Column blocks `step` bytes apart. Other threads may wait for them when the block has met.
  __device__ void Fetch(const std::byte* from, int64_t step) {
    if (threadIdx.x != 0) return;
    for (uint64_t& barrier : landed) BarrierInit(&barrier, 1);
    BarrierInitFence();
    const uint64_t policy = EvictFirst();
    for (int i = 0; i < kBlocks; ++i, from += step) {
      BarrierExpectBytes(&landed[i], kWeightTileBytes);
      BulkCopyTo(SharedAddress(weights[i]), from, kWeightTileBytes, &landed[i], policy);
    }
  }

  // Of x, written by all threads. Chunks of 16 bytes next to each other in K are so in memory, too.
  __device__ uint64_t Activations() const {
    FenceSharedForWgmma();
    __syncthreads();
    return TokenDescriptor(x);
  }
};

// Part p has every other column block of half p / 2, as one of two pairs of warpgroups has them
// (weight_stream.cuh).
__global__ void __launch_bounds__(kThreads, 3)
    GroupedAloneKernel(const __grid_constant__ CudaGroupedAloneParams params) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& s = *reinterpret_cast<Shared<256>*>(memory);
  const GemmProblem& p = params.product;
  const auto thread = static_cast<int>(threadIdx.x);
  const int tile = static_cast<int>(blockIdx.x) / kGroupedParts;
  const int part = static_cast<int>(blockIdx.x) % kGroupedParts;
  const int first = part / 2 * (2 * kBlocks) + part % 2;
  s.Fetch(p.w.tiles + int64_t{tile * kGroupedBlocks + first} * kWeightTileBytes,
          2 * kWeightTileBytes);
  const uint8_t* const scales = p.w.scales + tile / 2 * kGroupedBlocks + first;
  __nv_bfloat162 scale[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) scale[i] = WideScale(Ue8m0Value(scales[2 * i]));
  // A thread's 16 bytes of the activations: of a column block, which are two tiles.
  const int group = tile / (static_cast<int>(p.w.rows) / kTileMatrixRows / p.groups);
  const int block = group * kGroupedBlocks + first + thread / 16 * 2;
  const int64_t x_tile = (2 * block + thread % 16 / 8) * p.x_bf16.row_groups;
  const auto* const x =
      reinterpret_cast<const std::byte*>(p.x_bf16.values) + x_tile * kTileBytes + thread % 8 * 16;
  __syncthreads();
  AllowSuccessor();
  uint32_t a[kAhead][8][4];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    BarrierWait(&s.landed[i], 0);
    WidenTile(s.weights[i], scale[i], a[i]);
  }
  WaitForPredecessor();
  StoreShared(SharedAddress(s.x) + thread * 16, __ldcg(reinterpret_cast<const uint4*>(x)));
  const uint64_t b = s.Activations();
  float d[4] = {};
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    if (i >= kAhead) {
      WgmmaWait<kAhead - 1>();
      BarrierWait(&s.landed[i], 0);
      WidenTile(s.weights[i], scale[i], a[i % kAhead]);
    }
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      Wgmma<WgmmaType::kBf16, 8>::FromRegisters(d, a[i % kAhead][q], b + i * 16 + q * 2, 1);
    }
    WgmmaCommit();
  }
  WgmmaWait<0>();
  ReadyRegisters(d);
  if (lane() % 4 != 0) return;
  float* const y =
      params.parts + part * p.w.rows + tile * kTileMatrixRows + warp() * 16 + lane() / 4;
  y[0] = d[0];
  y[8] = d[2];
}

struct SumsShared : Shared<128> {
  float x_scales[kBlocks];
  alignas(16) float inbox[kMatrixParts / 2][kTileMatrixRows];
  uint64_t inbox_full;
};

__device__ float2 Add(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ float4 Add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// The first product's output as FP8 codes, two column blocks a warp.
__device__ void MakeActivations(const CudaSumsAloneParams& params, int part, SumsShared& s) {
  constexpr int kEach = kBlocks / kWarps;
  const int64_t columns = params.product.w.cols;
  float4 parts[kEach][kGroupedParts];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int column = (part * kBlocks + warp() * kEach + i) * 128 + lane() * 4;
#pragma unroll
    for (int k = 0; k < kGroupedParts; ++k) {
      parts[i][k] = __ldcg(reinterpret_cast<const float4*>(params.parts + k * columns + column));
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float4 sum = Add(Add(parts[i][0], parts[i][1]), Add(parts[i][2], parts[i][3]));
    const float4 v{RoundBf16(sum.x), RoundBf16(sum.y), RoundBf16(sum.z), RoundBf16(sum.w)};
    const float largest =
        WarpMax(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    const uint32_t scale = Fp8Scale(largest);
    const float inverse = Ue8m0Inverse(scale);
    const int block = warp() * kEach + i;
    reinterpret_cast<uint32_t*>(s.x)[block * 32 + lane()] =
        Fp8Codes(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
    if (lane() == 0) s.x_scales[block] = Ue8m0Value(scale);
  }
}

// A cluster has a row tile, a block for each of the rank's parts of the columns; the first one adds
// up their sums.
__global__ void __launch_bounds__(kThreads, 3)
    SumsAloneKernel(const __grid_constant__ CudaSumsAloneParams params) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& s = *reinterpret_cast<SumsShared*>(memory);
  const GemmProblem& p = params.product;
  const int num_parts = static_cast<int>(p.w.col_blocks()) / kBlocks;
  const auto part = static_cast<int>(ClusterRank());
  const int tile = static_cast<int>(blockIdx.x) / num_parts, first = part * kBlocks;
  const int64_t row_blocks = p.w.matrix_col_blocks();
  if (threadIdx.x == 32) {
    BarrierInit(&s.inbox_full, 1);
    BarrierInitFence();
    BarrierExpectBytes(&s.inbox_full, static_cast<uint32_t>(num_parts) * kTileMatrixRows * 4);
  }
  s.Fetch(p.w.tiles + (tile * row_blocks + first) * kWeightTileBytes, kWeightTileBytes);
  float scale[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    scale[i] = Ue8m0Value(p.w.scales[tile / 2 * row_blocks + first + i]);
  }
  const PeerView& peers = params.exchange.peers;
  const uint64_t number = peers.size == 1 ? 0 : ExchangeNumber(params.exchange);
  __syncthreads();
  ClusterArrive();
  WaitForPredecessor();
  AllowSuccessor();
  MakeActivations(params, part, s);
  const uint64_t b = s.Activations();
  for (uint64_t& landed : s.landed) BarrierWait(&landed, 0);
  float product[kBlocks][4];
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const uint64_t a = SmemDescriptor(SharedAddress(s.weights[i]));
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<WgmmaType::kE4m3, 8>::FromSmem(product[i], a + 2 * q, b + i * 8 + q * 2, q != 0);
    }
  }
  WgmmaCommit();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) scale[i] *= s.x_scales[i];
  WgmmaWait<0>();
  float2 d{};
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    ReadyRegisters(product[i]);
    d.x += product[i][0] * scale[i];
    d.y += product[i][2] * scale[i];
  }
  ClusterWait();  // every block has started
  if (lane() % 4 == 0) {
    const float* const to = &s.inbox[part][warp() * 16 + lane() / 4];
    SendToBlock(to, d.x, &s.inbox_full, 0);
    SendToBlock(to + 8, d.y, &s.inbox_full, 0);
  }
  if (part != 0 || warp() != 0) return;
  BarrierWaitCluster(&s.inbox_full, 0);
  const auto sent = [&](int r) {
    return *reinterpret_cast<const float2*>(&s.inbox[r][lane() * 2]);
  };
  float2 sum = Add(sent(0), sent(1));
  if (num_parts == 4) sum = Add(sum, Add(sent(2), sent(3)));
  const int row = tile * kTileMatrixRows + lane() * 2;
  *reinterpret_cast<float2*>(static_cast<float*>(p.y) + row) = sum;
  if (peers.size == 1) return;
  SendPacket(peers, number, SumPacket(0, p.y_stride, row),
             {__float_as_uint(sum.x), __float_as_uint(sum.y)});
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
  LaunchKernel(GroupedAloneKernel,
               static_cast<unsigned>(params.product.w.row_tiles() * kGroupedParts), kThreads,
               sizeof(Shared<256>), stream, params);
}

void Launch(const CudaSumsAloneParams& params, device::Stream& stream) {
  const TiledMatrix& w = params.product.w;
  CHECK(params.product.output == GemmOutput::kF32);
  const auto parts = static_cast<unsigned>(w.col_blocks() / kBlocks);
  LaunchClusters(SumsAloneKernel, static_cast<unsigned>(w.row_tiles()) * parts, parts, kThreads,
                 sizeof(SumsShared), stream, params);
}

}  // namespace fathom::kernels
