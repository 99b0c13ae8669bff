#include <algorithm>

#include "base/check.h"
#include "kernels/collective/packets.cuh"
#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/hyper_connection/gates.cuh"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "kernels/launch.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"
#include "kernels/warp_sums.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kS = kNumStreams;
constexpr int kMaxCluster = 16;  // above 8 a kernel has to ask for it
constexpr int kMaxColumnBlocks = 64;
constexpr int kLoadedPairs = 8;  // on their way at once

__device__ float4 WidenQuad(uint2 bits) {
  const auto low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
  const auto high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}
__device__ uint2 LoadBits(const __nv_bfloat16* p) { return *reinterpret_cast<const uint2*>(p); }
__device__ void StoreQuad(__nv_bfloat16* p, float4 v) {
  *reinterpret_cast<uint2*>(p) = {PackBf16(v.x, v.y), PackBf16(v.z, v.w)};
}
__device__ float4 RoundQuad(float4 v) {
  return {RoundBf16(v.x), RoundBf16(v.y), RoundBf16(v.z), RoundBf16(v.w)};
}
__device__ float4 operator*(float a, float4 v) { return {a * v.x, a * v.y, a * v.z, a * v.w}; }
__device__ float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ float Dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// kExchange: each rank has some columns of the output.
template <bool kHead, bool kExchange>
class Boundary {
 public:
  static constexpr int kMixes = kHead ? kS : kNumMixes;
  static constexpr int kMixesPerWarp = kHead ? 1 : 3;
  static constexpr int kParts = kWarps / (kMixes / kMixesPerWarp);  // of the columns
  static constexpr int kLanes = 32 / (kMixesPerWarp + 1);           // that have a sum

  struct Shared {
    alignas(16) float comb[kS * kS];
    alignas(16) float post[kS];
    // Of each part of the columns of each block; the last is that of squares. No block: 0.
    float sums[kMaxCluster * kParts][32];
    float squares[kMaxColumnBlocks];  // of the input, before its norm
    int rows[kMaxChosen];             // of the experts' outputs
    uint64_t mixers_full, sums_full, squares_full;
  };

  // memory: DynamicBytes of the block's shared memory.
  __device__ Boundary(const CudaHyperConnectionParams& params, int cluster, int slice,
                      float4* memory)
      : p_(params),
        cluster_(cluster),
        rank_(static_cast<int>(ClusterRank())),
        slice_(slice),
        hidden_(static_cast<int>(params.hidden)),
        column0_(rank_ * slice),
        blocks_(min(slice, hidden_ - column0_) / 128),
        row_(blockIdx.x / static_cast<unsigned>(cluster)),
        s_(*reinterpret_cast<Shared*>(memory)),
        x_(reinterpret_cast<float*>(memory) + sizeof(Shared) / sizeof(float)),
        mixers_(x_ + kS * slice) {}

  static size_t DynamicBytes(int64_t slice) {
    return sizeof(Shared) + static_cast<size_t>((1 + kMixes) * kS * slice) * sizeof(float);
  }

  __device__ void Run() {
    if (thread() == 0) InitBarriers();
    for (int i = cluster_ * kParts + warp(); i < kMaxCluster * kParts; i += kWarps) {
      s_.sums[i][lane()] = 0;
    }
    if (thread() >= hidden_ / 128 && thread() < kMaxColumnBlocks) s_.squares[thread()] = 0;
    ClusterArrive();
    token_ = kHead ? p_.rows[row_] : row_;
    if (warp() == 0) FetchMixers();
    if constexpr (kExchange) number_ = ExchangeNumber(p_.gather.exchange);
    if (warp() < blocks_) norm_ = LoadBits(p_.norm_weight + column0_ + thread() * 4);
    if (lane() < kMixes) {
      scale_ = p_.scale[lane() < kS ? 0 : lane() < 2 * kS ? 1 : 2];
      base_ = p_.base[lane()];
    }
    if (p_.output.y != nullptr) {
      if (thread() * 4 < blocks_ * 128) LoadStreams();
      if (p_.output.pair_of != nullptr && thread() < p_.output.num_chosen) {
        s_.rows[thread()] = p_.output.pair_of[token_ * p_.output.num_chosen + thread()];
      }
      if (warp() == kWarps - 1) MakeComb();
    }
    ClusterWait();  // the barriers of all blocks are ready
    __syncthreads();
    WaitForPredecessor();
    AllowSuccessor();
    if (thread() * 4 < blocks_ * 128) Post();
    __syncthreads();
    Mix();
    if (warp() <= blocks_) Finish();
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }
  __device__ float4& X(int stream, int column) const {
    return *reinterpret_cast<float4*>(x_ + stream * slice_ + column);
  }
  __device__ __nv_bfloat16* Streams(int stream) const {
    return p_.streams + (token_ * kS + stream) * hidden_ + column0_ + thread() * 4;
  }

  __device__ void InitBarriers() {
    BarrierInit(&s_.mixers_full, 1);
    BarrierInit(&s_.sums_full, 1);
    BarrierInit(&s_.squares_full, 1);
    BarrierInitFence();
    BarrierExpectBytes(&s_.sums_full, static_cast<uint32_t>(cluster_ * kParts * (kMixes + 1) * 4));
    BarrierExpectBytes(&s_.squares_full, static_cast<uint32_t>(hidden_ / 128 * 4));
  }

  // The mixers are weights: they are on their way before the predecessor has ended.
  __device__ void FetchMixers() {
    const auto bytes = static_cast<uint32_t>(blocks_ * 128 * sizeof(float));
    if (lane() == 0) BarrierExpectBytes(&s_.mixers_full, kMixes * kS * bytes);
    __syncwarp();
    for (int i = lane(); i < kMixes * kS; i += 32) {
      BulkCopy(mixers_ + i * slice_, p_.fn + i * hidden_ + column0_, bytes, &s_.mixers_full);
    }
  }

  // One warp; lane j has row j of C.
  __device__ void MakeComb() {
    const int j = lane() % kS;
    const float post = p_.before.post[token_ * kS + j];
    const float4 row =
        *reinterpret_cast<const float4*>(p_.before.comb_logits + (token_ * kS + j) * kS);
    *reinterpret_cast<float4*>(&s_.comb[j * kS]) = Sinkhorn(row, p_.constants);
    s_.post[j] = post;
  }

  // Four columns a thread. Where a sub-layer ended, they were written before the predecessor began.
  __device__ void LoadStreams() {
    for (int j = 0; j < kS; ++j) streams_[j] = LoadBits(Streams(j));
  }

  __device__ float4 Output(int64_t column) const {
    const SublayerOutput& o = p_.output;
    const uint2 own = LoadBits(o.y + token_ * hidden_ + column);
    if (o.pair_of == nullptr) return WidenQuad(own);
    float4 sum{};
    for (int first = 0; first < o.num_chosen; first += kLoadedPairs) {
      uint2 pairs[kLoadedPairs] = {};
#pragma unroll
      for (int i = 0; i < kLoadedPairs; ++i) {
        if (first + i >= o.num_chosen) break;
        pairs[i] = LoadBits(o.y + int64_t{s_.rows[first + i]} * hidden_ + column);
      }
#pragma unroll
      for (const uint2 pair : pairs) sum = sum + WidenQuad(pair);
    }
    return RoundQuad(sum + WidenQuad(own));
  }

  // Four columns of the output: this rank's go to all others. Each is one thread's.
  __device__ float4 GatheredOutput(int64_t column) const {
    const PeerView& peers = p_.gather.exchange.peers;
    int owner = 0;
    while (column >= p_.gather.columns.begin[owner + 1]) ++owner;
    const int64_t packet = (row_ * hidden_ + column) / 4;
    if (owner != peers.rank) return WidenQuad(ReceivePacket(peers, number_, packet, owner));
    const float4 y = Output(column);
    SendPacket(peers, number_, packet, {PackBf16(y.x, y.y), PackBf16(y.z, y.w)});
    return y;
  }

  // x_k = b(post_k y + sum_j C[j][k] x_j), four columns a thread, kept in shared memory.
  __device__ void Post() {
    const int column = thread() * 4;
    if (p_.output.y == nullptr) {
      LoadStreams();
      for (int k = 0; k < kS; ++k) X(k, column) = WidenQuad(streams_[k]);
      return;
    }
    const float4 y = kExchange ? GatheredOutput(column0_ + column) : Output(column0_ + column);
    float4 in[kS];
    for (int j = 0; j < kS; ++j) in[j] = WidenQuad(streams_[j]);
    for (int k = 0; k < kS; ++k) {
      float4 mixed = s_.comb[k] * in[0];
      for (int j = 1; j < kS; ++j) mixed = mixed + s_.comb[j * kS + k] * in[j];
      const float4 out = RoundQuad(s_.post[k] * y + mixed);
      StoreQuad(Streams(k), out);
      X(k, column) = out;
    }
  }

  // This block's part of the raw mixes and of the sum of squares, to all blocks of the cluster.
  __device__ void Mix() {
    const int part = warp() % kParts, first_mix = warp() / kParts * kMixesPerWarp;
    float sums[kMixesPerWarp + 1] = {};
    BarrierWait(&s_.mixers_full, 0);
#pragma unroll 1
    for (int b = part; b < blocks_; b += kParts) {
      const int column = b * 128 + lane() * 4;
      float4 x[kS];
      for (int k = 0; k < kS; ++k) {
        x[k] = X(k, column);
        sums[kMixesPerWarp] += Dot(x[k], x[k]);
      }
#pragma unroll
      for (int m = 0; m < kMixesPerWarp; ++m) {
        const float* w = mixers_ + (first_mix + m) * kS * slice_ + column;
        for (int k = 0; k < kS; ++k) {
          sums[m] += Dot(*reinterpret_cast<const float4*>(w + k * slice_), x[k]);
        }
      }
    }
    const float sum = TransposedSum(sums);
    const int i = lane() / kLanes, mix = i < kMixesPerWarp ? first_mix + i : kMixes;
    if (i == kMixesPerWarp && first_mix != 0) return;
    for (int to = lane() % kLanes; to < cluster_; to += kLanes) {
      SendToBlock(&s_.sums[rank_ * kParts + part][mix], sum, &s_.sums_full,
                  static_cast<uint32_t>(to));
    }
  }

  // A warp a block of 128 columns, and one for the gates that the next launch reads.
  __device__ void Finish() {
    BarrierWaitCluster(&s_.sums_full, 0);
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < kMaxCluster * kParts; ++i) sum += s_.sums[i][lane()];
    const float mean = __shfl_sync(0xffffffffu, sum, kMixes) * inverse_hidden_ / kS;
    const float mix = sum * InverseSqrt(mean + p_.constants.norm_eps) * scale_ + base_;
    const float gate = Sigmoid(mix);
    if (warp() == blocks_) {
      if (!kHead && rank_ == 0) WriteState(mix, gate);
    } else {
      Input(gate + p_.constants.hc_eps);
    }
  }

  __device__ void WriteState(float mix, float gate) const {
    const int i = lane();
    if (i >= kS && i < 2 * kS) p_.after.post[token_ * kS + i - kS] = 2.0f * gate;
    if (i >= 2 * kS && i < kMixes) p_.after.comb_logits[token_ * kS * kS + i - 2 * kS] = mix;
  }

  // The sub-layer's input. gate: pre of stream k on lane k.
  __device__ void Input(float gate) {
    const int column = thread() * 4;
    float4 y = __shfl_sync(0xffffffffu, gate, 0) * X(0, column);
    for (int k = 1; k < kS; ++k) y = y + __shfl_sync(0xffffffffu, gate, k) * X(k, column);
    y = RoundQuad(y);
    const float own = WarpSum(Dot(y, y));
    if (lane() < cluster_) {
      SendToBlock(&s_.squares[column0_ / 128 + warp()], own, &s_.squares_full,
                  static_cast<uint32_t>(lane()));
    }
    BarrierWaitCluster(&s_.squares_full, 0);
    const float mean = WarpSum(s_.squares[lane()] + s_.squares[lane() + 32]) * inverse_hidden_;
    Normalize(column0_ + column, InverseSqrt(mean + p_.constants.norm_eps) * y);
  }

  __device__ void Normalize(int64_t k, float4 scaled) const {
    const float4 weight = WidenQuad(norm_);
    const float4 h = RoundQuad(
        {scaled.x * weight.x, scaled.y * weight.y, scaled.z * weight.z, scaled.w * weight.w});
    auto* const tiles = reinterpret_cast<std::byte*>(p_.h.values);
    auto* const to =
        reinterpret_cast<__nv_bfloat16*>(tiles + Bf16TileOffset(row_, k, p_.h.row_groups));
    StoreQuad(to, h);
    if constexpr (!kHead) {
      const float largest =
          WarpMax(fmaxf(fmaxf(fabsf(h.x), fabsf(h.y)), fmaxf(fabsf(h.z), fabsf(h.w))));
      const uint32_t scale = Fp8Scale(largest);
      const float inverse = Ue8m0Inverse(scale);
      auto* const codes =
          reinterpret_cast<uint32_t*>(p_.h_fp8.codes + Fp8TileOffset(row_, k, p_.h_fp8.row_groups));
      const uint32_t quad = Fp8Codes(h.x * inverse, h.y * inverse, h.z * inverse, h.w * inverse);
      *codes = quad;
      if (lane() == 0) {
        p_.h_fp8.scales[k / 128 * p_.h_fp8.row_groups * 8 + row_] = Ue8m0Value(scale);
      }
    }
  }

  const CudaHyperConnectionParams& p_;
  const int cluster_, rank_, slice_, hidden_, column0_, blocks_;
  const int64_t row_;
  Shared& s_;
  float* x_;       // [4][slice], the new streams
  float* mixers_;  // [kMixes][4][slice]
  int64_t token_ = 0;
  uint2 streams_[kS] = {}, norm_ = {};
  float scale_ = 0, base_ = 0;
  const float inverse_hidden_ = 1.0f / static_cast<float>(hidden_);
  uint64_t number_ = 0;  // of the exchange
};

// Half of the registers and of the shared memory: a block gets ready beside the product before.
template <bool kHead, bool kExchange>
__global__ void __launch_bounds__(kThreads, 2)
    BoundaryKernel(const __grid_constant__ CudaHyperConnectionParams params, int cluster,
                   int slice) {
  extern __shared__ float4 memory[];
  Boundary<kHead, kExchange>(params, cluster, slice, memory).Run();
}

struct Slices {
  explicit Slices(int64_t hidden) {
    const auto blocks = static_cast<int>(hidden / 128);
    const int each = (blocks + kMaxCluster - 1) / kMaxCluster;
    CHECK_LE(blocks, kMaxColumnBlocks);
    size = each * 128;
    cluster = (blocks + each - 1) / each;
  }
  int size;     // columns of a block
  int cluster;  // blocks
};

template <bool kHead, bool kExchange>
void Run(const CudaHyperConnectionParams& params, device::Stream& stream) {
  const auto kernel = BoundaryKernel<kHead, kExchange>;
  const Slices slices(params.hidden);
  device::CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                    __FILE__, __LINE__);
  const auto cluster = static_cast<unsigned>(slices.cluster);
  LaunchClusters(kernel, static_cast<unsigned>(params.num_tokens) * cluster, cluster, kThreads,
                 Boundary<kHead, kExchange>::DynamicBytes(slices.size), stream, params,
                 slices.cluster, slices.size);
}

// Clusters of the kernel with an exchange that run at once: one a token.
template <bool kHead>
int MaxExchangeClusters(int64_t hidden) {
  const auto kernel = BoundaryKernel<kHead, true>;
  const Slices slices(hidden);
  const auto set = [&](cudaFuncAttribute attribute, int value) {
    device::CheckCuda(cudaFuncSetAttribute(kernel, attribute, value), __FILE__, __LINE__);
  };
  set(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return MaxClusters(kernel, static_cast<unsigned>(slices.cluster), kThreads,
                     Boundary<kHead, true>::DynamicBytes(slices.size));
}

template <bool kHead>
void RunTokens(const CudaHyperConnectionParams& params, device::Stream& stream) {
  const PeerView& peers = params.gather.exchange.peers;
  if (peers.size == 1) return Run<kHead, false>(params, stream);
  CHECK_LE(params.num_tokens * params.hidden / 4, kMaxPackets);
  CHECK_GT(params.gather.columns.least(peers.size), 0);  // else who waits would wait for ever
  CHECK(params.output.y != nullptr);
  Run<kHead, true>(params, stream);
}

}  // namespace

void Launch(const CudaHyperConnectionParams& params, device::Stream& stream) {
  if (params.num_tokens == 0) return;
  CHECK_EQ(params.hidden % 128, 0);
  const bool exchanges = params.gather.exchange.peers.size > 1;
  if (!exchanges && IsLargeBoundary(params)) return LaunchLargeBoundary(params, stream);
  params.rows != nullptr ? RunTokens<true>(params, stream) : RunTokens<false>(params, stream);
}

int64_t MaxExchangeTokens(int64_t hidden) {
  const int64_t clusters =
      std::min(MaxExchangeClusters<false>(hidden), MaxExchangeClusters<true>(hidden));
  return std::min(clusters, kLargeBoundaryTokens - 1);
}

}  // namespace fathom::kernels
