#include "base/check.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kS = kNumStreams;
constexpr int kMaxCluster = 16;  // above 8 a kernel has to ask for it
constexpr int kMaxTokens = 4;    // of a cluster

__device__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ float4 LoadQuad(const __nv_bfloat16* p) {
  const uint2 bits = *reinterpret_cast<const uint2*>(p);
  const auto low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
  const auto high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}
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

// Softmax over k, then Sinkhorn, of L[j][k] on lanes 4 j + k of half a warp.
__device__ float Sinkhorn(float logit, const HyperConnectionConstants& constants) {
  const auto over = [](float x, int stride) {
    x += __shfl_xor_sync(0xffffffffu, x, stride);
    return x + __shfl_xor_sync(0xffffffffu, x, 2 * stride);
  };
  float max = fmaxf(logit, __shfl_xor_sync(0xffffffffu, logit, 1));
  max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
  float c = expf(logit - max);
  c = c / over(c, 1) + constants.hc_eps;
  c = c / (over(c, 4) + constants.hc_eps);
  for (int i = 1; i < constants.sinkhorn_iters; ++i) {
    c = c / (over(c, 1) + constants.hc_eps);
    c = c / (over(c, 4) + constants.hc_eps);
  }
  return c;
}

template <int kTokens, bool kHead>
class Boundary {
 public:
  static constexpr int kMixes = kHead ? kS : kNumMixes;
  static constexpr int kMixesPerWarp = kHead ? 1 : 3;
  static constexpr int kParts = kWarps / (kMixes / kMixesPerWarp);  // of the columns
  static constexpr int kPrefetched = 4;                             // all, for 256 columns a block

  struct Shared {
    float comb[kTokens][kS * kS];
    float post[kTokens][kS];
    float warp_sums[kTokens][kParts][kMixes + 1];
    float block_sums[kTokens][kMixes + 1];  // read by the cluster; the last is the sum of squares
    float mixes[kTokens][kMixes + 1];
    float pre[kTokens][kS];
    float task_squares[64];
    float block_squares[kTokens];  // read by the cluster
    float inverse_rms[kTokens];
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
        y_(dynamic + kTokens * kS * slice_) {}

  __device__ void Run() {
    PrefetchMixes();
    if (p_.output.y != nullptr) MakeComb();
    WaitForPredecessor();
    AllowSuccessor();
    __syncthreads();
    Post();
    __syncthreads();
    Mix();
    Gates();
    Input();
    if (cluster_ > 1) ClusterSync();  // sums are read until here
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
  __device__ float OverCluster(const float* p) const {
    if (cluster_ == 1) return *p;
    float sum = LoadFromBlock(p, 0);
    for (int r = 1; r < cluster_; ++r) sum += LoadFromBlock(p, static_cast<uint32_t>(r));
    return sum;
  }

  // One warp a token.
  __device__ void MakeComb() {
    if (warp() >= count_) return;
    const int64_t t = Token(warp());
    const float logit = p_.before.comb_logits[t * kS * kS + lane() % 16];
    const float c = Sinkhorn(logit, p_.constants);
    if (lane() < 16) s_.comb[warp()][lane()] = c;
    if (lane() < kS) s_.post[warp()][lane()] = p_.before.post[t * kS + lane()];
  }

  __device__ float4 Output(int64_t t, int64_t column) const {
    const SublayerOutput& o = p_.output;
    const float4 own = LoadQuad(o.y + t * p_.hidden + column);
    if (o.pair_of == nullptr) return own;
    float4 sum{};
    for (int i = 0; i < o.num_chosen; ++i) {
      const int64_t row = o.pair_of[t * o.num_chosen + i];
      sum = sum + LoadQuad(o.y + row * p_.hidden + column);
    }
    return RoundQuad(sum + own);
  }

  // x_k = b(post_k y + sum_j C[j][k] x_j), kept in shared memory.
  __device__ void Post() {
    const int quads = slice_ / 4;
    for (int i = thread(); i < count_ * quads; i += kThreads) {
      const int token = i / quads, column = i % quads * 4;
      const int64_t t = Token(token);
      __nv_bfloat16* streams = p_.streams + t * kS * p_.hidden + column0_ + column;
      float4 in[kS];
      for (int j = 0; j < kS; ++j) in[j] = LoadQuad(streams + j * p_.hidden);
      if (p_.output.y == nullptr) {
        for (int k = 0; k < kS; ++k) *reinterpret_cast<float4*>(X(token, k) + column) = in[k];
        continue;
      }
      const float4 y = Output(t, column0_ + column);
      const float* comb = s_.comb[token];
      for (int k = 0; k < kS; ++k) {
        float4 mixed = comb[k] * in[0];
        for (int j = 1; j < kS; ++j) mixed = mixed + comb[j * kS + k] * in[j];
        const float4 out = RoundQuad(s_.post[token][k] * y + mixed);
        StoreQuad(streams + k * p_.hidden, out);
        *reinterpret_cast<float4*>(X(token, k) + column) = out;
      }
    }
  }

  __device__ int first_mix() const { return warp() / kParts * kMixesPerWarp; }
  // The place of this thread's i-th four columns: u counts them over the streams.
  __device__ int Quad(int i) const { return warp() % kParts * 32 + lane() + i * kParts * 32; }

  __device__ void LoadMixes(int u, float4 (&w)[kMixesPerWarp]) const {
    const int quads = slice_ / 4;
    const float* fn = p_.fn + u / quads * p_.hidden + column0_ + u % quads * 4;
#pragma unroll
    for (int m = 0; m < kMixesPerWarp; ++m) {
      w[m] = __ldg(reinterpret_cast<const float4*>(fn + (first_mix() + m) * kS * p_.hidden));
    }
  }

  // The mixers are weights: the first of them are in registers before the predecessor has ended.
  __device__ void PrefetchMixes() {
#pragma unroll
    for (int i = 0; i < kPrefetched; ++i) {
      if (Quad(i) < kS * slice_ / 4) LoadMixes(Quad(i), prefetched_[i]);
    }
  }

  __device__ void AddProducts(int u, const float4 (&w)[kMixesPerWarp],
                              float (&sums)[kTokens][kMixesPerWarp + 1]) const {
    const int quads = slice_ / 4;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= count_) break;
      const float4 x = *reinterpret_cast<const float4*>(X(token, u / quads) + u % quads * 4);
#pragma unroll
      for (int m = 0; m < kMixesPerWarp; ++m) sums[token][m] += Dot(w[m], x);
      sums[token][kMixesPerWarp] += Dot(x, x);
    }
  }

  // The raw mixes and the sum of squares of every token, over the cluster, into s_.mixes.
  __device__ void Mix() {
    const int part = warp() % kParts, first_mix = this->first_mix(), end = kS * slice_ / 4;
    float sums[kTokens][kMixesPerWarp + 1] = {};
#pragma unroll
    for (int i = 0; i < kPrefetched; ++i) {
      if (Quad(i) < end) AddProducts(Quad(i), prefetched_[i], sums);
    }
    for (int i = kPrefetched; Quad(i) < end; ++i) {
      float4 w[kMixesPerWarp];
      LoadMixes(Quad(i), w);
      AddProducts(Quad(i), w, sums);
    }
    for (int token = 0; token < kTokens; ++token) {
      for (int m = 0; m <= kMixesPerWarp; ++m) {
        const float sum = WarpSum(sums[token][m]);
        if (lane() != 0) continue;
        if (m < kMixesPerWarp) s_.warp_sums[token][part][first_mix + m] = sum;
        if (m == kMixesPerWarp && first_mix == 0) s_.warp_sums[token][part][kMixes] = sum;
      }
    }
    __syncthreads();
    const int token = thread() / (kMixes + 1), mix = thread() % (kMixes + 1);
    if (token < kTokens) {
      float sum = 0;
      for (int i = 0; i < kParts; ++i) sum += s_.warp_sums[token][i][mix];
      s_.block_sums[token][mix] = sum;
    }
    SyncCluster();
    if (token < kTokens) s_.mixes[token][mix] = OverCluster(&s_.block_sums[token][mix]);
    __syncthreads();
  }

  // pre for this launch; post and the logits of C for the next one.
  __device__ void Gates() {
    const int token = thread() / kMixes, i = thread() % kMixes;
    if (token < count_) {
      const float mean = s_.mixes[token][kMixes] / static_cast<float>(kS * p_.hidden);
      const float inverse_rms = 1.0f / sqrtf(mean + p_.constants.norm_eps);
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
    if (thread() < count_) {
      float sum = 0;
      for (int i = 0; i < blocks; ++i) sum += s_.task_squares[thread() * blocks + i];
      s_.block_squares[thread()] = sum;
    }
    SyncCluster();
    if (thread() < count_) {
      const float mean = OverCluster(&s_.block_squares[thread()]) / static_cast<float>(p_.hidden);
      s_.inverse_rms[thread()] = 1.0f / sqrtf(mean + p_.constants.norm_eps);
    }
    __syncthreads();
    for (int task = warp(); task < count_ * blocks; task += kWarps) {
      Normalize(task / blocks, task % blocks * 128 + lane() * 4);
    }
  }

  __device__ void Normalize(int token, int column) {
    const int64_t t = first_ + token, k = column0_ + column;
    const float4 y = *reinterpret_cast<const float4*>(y_ + token * slice_ + column);
    const float4 weight = LoadQuad(p_.norm_weight + k);
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
  float* x_;  // [kTokens][4][slice], the new streams
  float* y_;  // [kTokens][slice]
  float4 prefetched_[kPrefetched][kMixesPerWarp];
};

template <int kTokens, bool kHead>
__global__ void __launch_bounds__(kThreads)
    BoundaryKernel(const __grid_constant__ CudaHyperConnectionParams params, int cluster) {
  extern __shared__ float4 dynamic[];
  __shared__ typename Boundary<kTokens, kHead>::Shared shared;
  Boundary<kTokens, kHead>(params, cluster, shared, reinterpret_cast<float*>(dynamic)).Run();
}

template <int kTokens, bool kHead>
void Run(const CudaHyperConnectionParams& params, device::Stream& stream) {
  const auto blocks = static_cast<int>(params.hidden / 128);
  int cluster = kMaxCluster;
  while (blocks % cluster != 0) cluster /= 2;
  CHECK_EQ(cudaFuncSetAttribute(BoundaryKernel<kTokens, kHead>,
                                cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
           cudaSuccess);
  CHECK_LE(kTokens * blocks / cluster, 64);
  const size_t floats = static_cast<size_t>(kTokens * (kS + 1) * params.hidden / cluster);
  const auto clusters = static_cast<unsigned>((params.num_tokens + kTokens - 1) / kTokens);
  LaunchClusters(BoundaryKernel<kTokens, kHead>, clusters * static_cast<unsigned>(cluster),
                 static_cast<unsigned>(cluster), kThreads, floats * sizeof(float), stream, params,
                 cluster);
}

}  // namespace

void Launch(const CudaHyperConnectionParams& params, device::Stream& stream) {
  if (params.num_tokens == 0) return;
  CHECK_EQ(params.hidden % 128, 0);
  const bool few = params.num_tokens <= 16;
  if (params.rows != nullptr) {
    return few ? Run<1, true>(params, stream) : Run<kMaxTokens, true>(params, stream);
  }
  few ? Run<1, false>(params, stream) : Run<kMaxTokens, false>(params, stream);
}

}  // namespace fathom::kernels
