#include <algorithm>

#include "base/check.h"
#include "kernels/collective/packets.cuh"
#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "kernels/launch.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kS = kNumStreams;
constexpr int kMaxCluster = 16;  // above 8 a kernel has to ask for it

__device__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ float4 WidenQuad(uint2 bits) {
  const auto low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
  const auto high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}
__device__ uint2 LoadBits(const __nv_bfloat16* p) { return *reinterpret_cast<const uint2*>(p); }
__device__ float4 LoadQuad(const __nv_bfloat16* p) { return WidenQuad(LoadBits(p)); }
__device__ void StoreQuad(__nv_bfloat16* p, float4 v) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y),
                       high = __floats2bfloat162_rn(v.z, v.w);
  *reinterpret_cast<uint2*>(p) = {*reinterpret_cast<const uint32_t*>(&low),
                                  *reinterpret_cast<const uint32_t*>(&high)};
}
__device__ float4 RoundQuad(float4 v) {
  return {RoundBf16(v.x), RoundBf16(v.y), RoundBf16(v.z), RoundBf16(v.w)};
}
__device__ float4 operator*(float a, float4 v) { return {a * v.x, a * v.y, a * v.z, a * v.w}; }
__device__ float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ float Dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// 1 / x of a positive normal number, to its last bit or one beside it; IEEE division takes a call.
__device__ float Reciprocal(float x) {
  float r;
  asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r * (2.0f - x * r);
}

__device__ float InverseSqrt(float x) {
  float r;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r * (1.5f - 0.5f * x * r * r);
}

// Softmax over k, then Sinkhorn, of the logits L[j][k]; row j on lane j of every four.
__device__ float4 Sinkhorn(float4 c, const HyperConnectionConstants& constants) {
  const float eps = constants.hc_eps;
  const auto scale_row = [&c](float scale) { c = scale * c; };
  const auto over_rows = [](float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  };
  const auto scale_columns = [&] {
    c = {c.x * Reciprocal(over_rows(c.x) + eps), c.y * Reciprocal(over_rows(c.y) + eps),
         c.z * Reciprocal(over_rows(c.z) + eps), c.w * Reciprocal(over_rows(c.w) + eps)};
  };
  const float max = fmaxf(fmaxf(c.x, c.y), fmaxf(c.z, c.w));
  c = {expf(c.x - max), expf(c.y - max), expf(c.z - max), expf(c.w - max)};
  scale_row(Reciprocal((c.x + c.y) + (c.z + c.w)));
  c = {c.x + eps, c.y + eps, c.z + eps, c.w + eps};
  scale_columns();
  for (int i = 1; i < constants.sinkhorn_iters; ++i) {
    scale_row(Reciprocal((c.x + c.y) + (c.z + c.w) + eps));
    scale_columns();
  }
  return c;
}

// kExchange: each rank has some columns of the output.
template <int kTokens, bool kHead, bool kExchange>
class Boundary {
 public:
  static constexpr int kMixes = kHead ? kS : kNumMixes;
  static constexpr int kMixesPerWarp = kHead ? 1 : 3;
  static constexpr int kParts = kWarps / (kMixes / kMixesPerWarp);  // of the columns

  struct Shared {
    alignas(16) float comb[kTokens][kS * kS];
    float post[kTokens][kS];
    float warp_sums[kTokens][kParts][kMixes + 1];
    // Every block's part, written by that block; the last of the sums is that of squares.
    float sums[kMaxCluster][kTokens][kMixes + 1];
    float squares[kMaxCluster][kTokens];
    float mixes[kTokens][kMixes + 1];
    float pre[kTokens][kS];
    float task_squares[64];
    float inverse_rms[kTokens];
    int rows[kTokens][kMaxChosen];  // of the experts' outputs
    uint64_t mixers_full;
  };

  __device__ Boundary(const CudaHyperConnectionParams& params, int cluster, Shared& shared,
                      float* dynamic)
      : p_(params),
        cluster_(cluster),
        rank_(static_cast<int>(blockIdx.x) % cluster),
        first_(int64_t{blockIdx.x} / cluster * kTokens),
        count_(static_cast<int>(min(int64_t{kTokens}, params.num_tokens - first_))),
        slice_(static_cast<int>(params.hidden / cluster)),
        column0_(rank_ * slice_),
        s_(shared),
        x_(dynamic),
        y_(x_ + kTokens * kS * slice_),
        mixers_(y_ + kTokens * slice_) {}

  static size_t DynamicBytes(int64_t slice) {
    return static_cast<size_t>((kTokens * (kS + 1) + kMixes * kS) * slice) * sizeof(float);
  }

  __device__ void Run() {
    if (cluster_ > 1) ClusterArrive();
    if (warp() == 0) FetchMixers();
    if constexpr (kExchange) number_ = ExchangeNumber(p_.gather.exchange);
    norm_ = LoadBits(p_.norm_weight + column0_ + warp() % (slice_ / 128) * 128 + lane() * 4);
    if (p_.output.y != nullptr) {
      PrefetchStreams();
      if (warp() == 1) MakeComb();
    }
    WaitForPredecessor();
    AllowSuccessor();
    __syncthreads();
    Post();
    __syncthreads();
    Mix();
    Gates();
    Input();
  }

 private:
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int warp() const { return thread() / 32; }
  __device__ int lane() const { return thread() % 32; }
  __device__ int64_t Token(int i) const { return kHead ? p_.rows[first_ + i] : first_ + i; }
  __device__ float* X(int token, int stream) const { return x_ + (token * kS + stream) * slice_; }
  __device__ void SyncCluster() const {
    if (cluster_ > 1) {
      ClusterSync();
    } else {
      __syncthreads();
    }
  }
  // To `place` in the shared memory of the cluster's block `rank`.
  __device__ void Send(float value, float* place, int rank) const {
    if (cluster_ > 1) {
      StoreToBlock(place, static_cast<uint32_t>(rank), value);
    } else {
      *place = value;
    }
  }

  // One warp: four lanes a token.
  __device__ void MakeComb() {
    const int token = min(lane() / kS, count_ - 1), j = lane() % kS;
    const int64_t t = Token(token);
    const float post = p_.before.post[t * kS + j];
    const float4 row = *reinterpret_cast<const float4*>(p_.before.comb_logits + (t * kS + j) * kS);
    *reinterpret_cast<float4*>(&s_.comb[token][j * kS]) = Sinkhorn(row, p_.constants);
    s_.post[token][j] = post;
  }

  // What was written before the predecessor began: the streams of this thread's first columns,
  // and where the experts' outputs will be.
  __device__ void PrefetchStreams() {
    const int quads = slice_ / 4, n = p_.output.num_chosen;
    if (thread() < count_ * quads) {
      for (int j = 0; j < kS; ++j)
        streams_[j] = LoadBits(Streams(thread() / quads, j) + thread() % quads * 4);
    }
    if (p_.output.pair_of == nullptr || thread() >= count_ * n) return;
    s_.rows[thread() / n][thread() % n] = p_.output.pair_of[Token(thread() / n) * n + thread() % n];
  }
  __device__ __nv_bfloat16* Streams(int token, int stream) const {
    return p_.streams + (Token(token) * kS + stream) * p_.hidden + column0_;
  }

  __device__ float4 Output(int token, int64_t column) const {
    const SublayerOutput& o = p_.output;
    const float4 own = LoadQuad(o.y + Token(token) * p_.hidden + column);
    if (o.pair_of == nullptr) return own;
    float4 sum{};
#pragma unroll 8
    for (int i = 0; i < o.num_chosen; ++i) {
      sum = sum + LoadQuad(o.y + s_.rows[token][i] * p_.hidden + column);
    }
    return RoundQuad(sum + own);
  }

  // Four columns of the output: this rank's go to all others. Each is one thread's.
  __device__ float4 GatheredOutput(int token, int64_t column) const {
    const PeerView& peers = p_.gather.exchange.peers;
    int owner = 0;
    while (column >= p_.gather.columns.begin[owner + 1]) ++owner;
    const int64_t packet = ((first_ + token) * p_.hidden + column) / 4;
    if (owner != peers.rank) return WidenQuad(ReceivePacket(peers, number_, packet, owner));
    const float4 y = Output(token, column);
    SendPacket(peers, number_, packet, {PackBf16(y.x, y.y), PackBf16(y.z, y.w)});
    return y;
  }

  // x_k = b(post_k y + sum_j C[j][k] x_j), kept in shared memory.
  __device__ void Post() {
    const int quads = slice_ / 4;
    for (int i = thread(); i < count_ * quads; i += kThreads) {
      const int token = i / quads, column = i % quads * 4;
      const bool fetched = i == thread() && p_.output.y != nullptr;
      float4 in[kS];
      for (int j = 0; j < kS; ++j) {
        in[j] = WidenQuad(fetched ? streams_[j] : LoadBits(Streams(token, j) + column));
      }
      if (p_.output.y == nullptr) {
        for (int k = 0; k < kS; ++k) *reinterpret_cast<float4*>(X(token, k) + column) = in[k];
        continue;
      }
      const float4 y =
          kExchange ? GatheredOutput(token, column0_ + column) : Output(token, column0_ + column);
      const float* comb = s_.comb[token];
      for (int k = 0; k < kS; ++k) {
        float4 mixed = comb[k] * in[0];
        for (int j = 1; j < kS; ++j) mixed = mixed + comb[j * kS + k] * in[j];
        const float4 out = RoundQuad(s_.post[token][k] * y + mixed);
        StoreQuad(Streams(token, k) + column, out);
        *reinterpret_cast<float4*>(X(token, k) + column) = out;
      }
    }
  }

  __device__ int first_mix() const { return warp() / kParts * kMixesPerWarp; }

  // The mixers are weights: they are on their way before the predecessor has ended.
  __device__ void FetchMixers() {
    const auto bytes = static_cast<uint32_t>(slice_ * sizeof(float));
    if (lane() == 0) {
      BarrierInit(&s_.mixers_full, 1);
      BarrierInitFence();
      BarrierExpectBytes(&s_.mixers_full, kMixes * kS * bytes);
    }
    __syncwarp();
    for (int i = lane(); i < kMixes * kS; i += 32) {
      BulkCopy(mixers_ + i * slice_, p_.fn + i * p_.hidden + column0_, bytes, &s_.mixers_full);
    }
  }

  // Four columns of a stream: u counts them over the streams.
  __device__ void AddProducts(int u, float (&sums)[kTokens][kMixesPerWarp + 1]) const {
    const int quads = slice_ / 4, at = u / quads * slice_ + u % quads * 4;
    float4 w[kMixesPerWarp];
#pragma unroll
    for (int m = 0; m < kMixesPerWarp; ++m) {
      w[m] = *reinterpret_cast<const float4*>(mixers_ + (first_mix() + m) * kS * slice_ + at);
    }
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= count_) break;
      const float4 x = *reinterpret_cast<const float4*>(X(token, 0) + at);
#pragma unroll
      for (int m = 0; m < kMixesPerWarp; ++m) sums[token][m] += Dot(w[m], x);
      sums[token][kMixesPerWarp] += Dot(x, x);
    }
  }

  // The raw mixes and the sum of squares of every token, over the cluster, into s_.mixes.
  __device__ void Mix() {
    const int part = warp() % kParts, first_mix = this->first_mix(), end = kS * slice_ / 4;
    float sums[kTokens][kMixesPerWarp + 1] = {};
    BarrierWait(&s_.mixers_full, 0);
#pragma unroll 4
    for (int u = part * 32 + lane(); u < end; u += kParts * 32) AddProducts(u, sums);
    for (int token = 0; token < kTokens; ++token) {
      for (int m = 0; m <= kMixesPerWarp; ++m) {
        const float sum = WarpSum(sums[token][m]);
        if (lane() != 0) continue;
        if (m < kMixesPerWarp) s_.warp_sums[token][part][first_mix + m] = sum;
        if (m == kMixesPerWarp && first_mix == 0) s_.warp_sums[token][part][kMixes] = sum;
      }
    }
    __syncthreads();
    if (cluster_ > 1) ClusterWait();  // every block has started
    constexpr int kSums = kTokens * (kMixes + 1);
    for (int i = thread(); i < kSums * cluster_; i += kThreads) {
      const int token = i % kSums / (kMixes + 1), mix = i % (kMixes + 1);
      float sum = 0;
      for (int k = 0; k < kParts; ++k) sum += s_.warp_sums[token][k][mix];
      Send(sum, &s_.sums[rank_][token][mix], i / kSums);
    }
    SyncCluster();
    if (thread() < kSums) {
      const int token = thread() / (kMixes + 1), mix = thread() % (kMixes + 1);
      float sum = s_.sums[0][token][mix];
      for (int r = 1; r < cluster_; ++r) sum += s_.sums[r][token][mix];
      s_.mixes[token][mix] = sum;
    }
    __syncthreads();
  }

  // pre for this launch; post and the logits of C for the next one.
  __device__ void Gates() {
    const int token = thread() / kMixes, i = thread() % kMixes;
    if (token < count_) {
      const float mean = s_.mixes[token][kMixes] / static_cast<float>(kS * p_.hidden);
      const float inverse_rms = InverseSqrt(mean + p_.constants.norm_eps);
      const int part = i < kS ? 0 : i < 2 * kS ? 1 : 2;
      const float mix = s_.mixes[token][i] * inverse_rms * p_.scale[part] + p_.base[i];
      if (i < kS) s_.pre[token][i] = Sigmoid(mix) + p_.constants.hc_eps;
      if (!kHead && rank_ == 0 && i >= kS) {
        const int64_t t = first_ + token;
        if (i < 2 * kS) {
          p_.after.post[t * kS + i - kS] = 2.0f * Sigmoid(mix);
        } else {
          p_.after.comb_logits[t * kS * kS + i - 2 * kS] = mix;
        }
      }
    }
    __syncthreads();
  }

  // The sub-layer's input. One warp takes 128 columns of a token at a time.
  __device__ void Input() {
    const int blocks = slice_ / 128;
    for (int task = warp(); task < count_ * blocks; task += kWarps) {
      const int token = task / blocks, column = task % blocks * 128 + lane() * 4;
      float4 sum = s_.pre[token][0] * *reinterpret_cast<const float4*>(X(token, 0) + column);
      for (int k = 1; k < kS; ++k) {
        sum = sum + s_.pre[token][k] * *reinterpret_cast<const float4*>(X(token, k) + column);
      }
      const float4 y = RoundQuad(sum);
      *reinterpret_cast<float4*>(y_ + token * slice_ + column) = y;
      const float squares = WarpSum(Dot(y, y));
      if (lane() == 0) s_.task_squares[task] = squares;
    }
    __syncthreads();
    if (thread() < count_ * cluster_) {
      const int token = thread() / cluster_;
      float sum = 0;
      for (int i = 0; i < blocks; ++i) sum += s_.task_squares[token * blocks + i];
      Send(sum, &s_.squares[rank_][token], thread() % cluster_);
    }
    SyncCluster();
    if (thread() < count_) {
      float sum = 0;
      for (int r = 0; r < cluster_; ++r) sum += s_.squares[r][thread()];
      const float mean = sum / static_cast<float>(p_.hidden);
      s_.inverse_rms[thread()] = InverseSqrt(mean + p_.constants.norm_eps);
    }
    __syncthreads();
    for (int task = warp(); task < count_ * blocks; task += kWarps) {
      const int column = task % blocks * 128 + lane() * 4;
      const bool fetched = task == warp();
      Normalize(task / blocks, column,
                WidenQuad(fetched ? norm_ : LoadBits(p_.norm_weight + column0_ + column)));
    }
  }

  __device__ void Normalize(int token, int column, float4 weight) {
    const int64_t t = first_ + token, k = column0_ + column;
    const float4 y = *reinterpret_cast<const float4*>(y_ + token * slice_ + column);
    const float4 scaled = s_.inverse_rms[token] * y;
    const float4 h = RoundQuad(
        {scaled.x * weight.x, scaled.y * weight.y, scaled.z * weight.z, scaled.w * weight.w});
    auto* const tiles = reinterpret_cast<std::byte*>(p_.h.values);
    StoreQuad(reinterpret_cast<__nv_bfloat16*>(tiles + Bf16TileOffset(t, k, p_.h.row_groups)), h);
    if constexpr (!kHead) {
      const float largest =
          WarpMax(fmaxf(fmaxf(fabsf(h.x), fabsf(h.y)), fmaxf(fabsf(h.z), fabsf(h.w))));
      const uint32_t scale = Fp8Scale(largest);
      const float inverse = Ue8m0Inverse(scale);
      *reinterpret_cast<uint32_t*>(p_.h_fp8.codes + Fp8TileOffset(t, k, p_.h_fp8.row_groups)) =
          Fp8Codes(h.x * inverse, h.y * inverse) | Fp8Codes(h.z * inverse, h.w * inverse) << 16;
      if (lane() == 0) {
        p_.h_fp8.scales[k / 128 * p_.h_fp8.row_groups * 8 + t] = Ue8m0Value(scale);
      }
    }
  }

  const CudaHyperConnectionParams& p_;
  const int cluster_, rank_;
  const int64_t first_;
  const int count_, slice_, column0_;
  Shared& s_;
  float* x_;       // [kTokens][4][slice], the new streams
  float* y_;       // [kTokens][slice]
  float* mixers_;  // [kMixes][4][slice]
  uint2 streams_[kS];
  uint2 norm_;
  uint64_t number_ = 0;  // of the exchange
};

// Half of the registers and of the shared memory: a block gets ready beside the product before.
template <int kTokens, bool kHead, bool kExchange>
__global__ void __launch_bounds__(kThreads, 2)
    BoundaryKernel(const __grid_constant__ CudaHyperConnectionParams params, int cluster) {
  extern __shared__ float4 dynamic[];
  using Block = Boundary<kTokens, kHead, kExchange>;
  __shared__ typename Block::Shared shared;
  Block(params, cluster, shared, reinterpret_cast<float*>(dynamic)).Run();
}

int ClusterOf(int64_t hidden) {
  int cluster = kMaxCluster;
  while (hidden / 128 % cluster != 0) --cluster;
  return cluster;
}

template <int kTokens, bool kHead, bool kExchange>
size_t DynamicBytes(int64_t hidden) {
  return Boundary<kTokens, kHead, kExchange>::DynamicBytes(hidden / ClusterOf(hidden));
}

template <int kTokens, bool kHead, bool kExchange = false>
void Run(const CudaHyperConnectionParams& params, device::Stream& stream) {
  const auto kernel = BoundaryKernel<kTokens, kHead, kExchange>;
  const int cluster = ClusterOf(params.hidden);
  device::CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                    __FILE__, __LINE__);
  CHECK_LE(kTokens * params.hidden / 128 / cluster, 64);
  const auto clusters = static_cast<unsigned>((params.num_tokens + kTokens - 1) / kTokens);
  LaunchClusters(kernel, clusters * static_cast<unsigned>(cluster), static_cast<unsigned>(cluster),
                 kThreads, DynamicBytes<kTokens, kHead, kExchange>(params.hidden), stream, params,
                 cluster);
}

// Clusters of the kernel with an exchange that run at once: one a token.
template <bool kHead>
int MaxClusters(int64_t hidden) {
  const auto kernel = BoundaryKernel<1, kHead, true>;
  const auto bytes = DynamicBytes<1, kHead, true>(hidden);
  const auto cluster = static_cast<unsigned>(ClusterOf(hidden));
  const auto set = [&](cudaFuncAttribute attribute, int value) {
    device::CheckCuda(cudaFuncSetAttribute(kernel, attribute, value), __FILE__, __LINE__);
  };
  set(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  set(cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = cluster;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  device::CheckCuda(cudaOccupancyMaxActiveClusters(&count, kernel, &config), __FILE__, __LINE__);
  return count;
}

template <bool kHead>
void RunTokens(const CudaHyperConnectionParams& params, device::Stream& stream) {
  const PeerView& peers = params.gather.exchange.peers;
  if (peers.size > 1) {
    CHECK_LE(params.num_tokens * params.hidden / 4, kMaxPackets);
    CHECK_GT(params.gather.columns.least(peers.size), 0);  // else who waits would wait for ever
    CHECK(params.output.y != nullptr);
    return Run<1, kHead, true>(params, stream);
  }
  if (params.num_tokens <= 16 && !params.prefill) return Run<1, kHead>(params, stream);
  const int64_t slice = params.hidden / ClusterOf(params.hidden);
  slice <= 256 ? Run<4, kHead>(params, stream) : Run<2, kHead>(params, stream);
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
  return std::min(MaxClusters<false>(hidden), MaxClusters<true>(hidden));
}

}  // namespace fathom::kernels
