// PostMixKernel: a block takes 64 tokens, a thread 8 columns of one of them in all four streams, 64
// columns of all tokens at a time. What it fetches next is on its way while it computes. With few
// tokens blocks share the columns, whole ranges of them. PreKernel: a block a token.
#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/wgmma.cuh"
#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {
namespace {

constexpr int kS = kNumStreams;
constexpr int kTokens = 64;
constexpr int kColumns = 64;
constexpr int kThreads = 512;
constexpr int kSums = kNumMixes + 1;         // and the sum of squares
constexpr int kSumStride = 32;               // floats of a token's sums
constexpr int kParts = 3;                    // BF16 values of a mixer's value
constexpr int kMixerTile = kNumMixes * 128;  // bytes: 24 rows of 64 BF16 columns

__host__ __device__ int NumRanges(int64_t hidden) {
  return static_cast<int>(hidden / kColumns < kBoundaryRanges ? hidden / kColumns
                                                              : kBoundaryRanges);
}

__device__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Softmax over k, then Sinkhorn, of L[j][k] on lanes 4 j + k of each half of a warp.
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

struct PostMixShared {
  alignas(1024) std::byte x[2][kS][kTokens * 128];
  std::byte mixers[2][kS][kParts][kMixerTile];
  alignas(16) float comb[kTokens][kS * kS];
  float post[kTokens][kS];
  float sums[kS][kTokens][kSums];
};

// D[64 tokens, 24 mixes] = or += X M^T, both from shared memory in 128-byte swizzled rows.
__device__ inline void MultiplyMixers(float (&d)[12], uint64_t x, uint64_t mixers, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %14, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, %12, %13, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
      : "l"(x), "l"(mixers), "r"(accumulate));
}

__device__ inline void Unpack(const uint4& bits, float (&v)[8]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = UnpackBf16(words[i]);
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}
__device__ inline uint4 Pack(const float (&v)[8]) {
  return {PackBf16(v[0], v[1]), PackBf16(v[2], v[3]), PackBf16(v[4], v[5]), PackBf16(v[6], v[7])};
}

// kPairs: at least the rows that y of a token is the sum of, besides its own.
template <int kPairs>
class PostMix {
 public:
  __device__ PostMix(const CudaHyperConnectionParams& params, int splits, PostMixShared& shared)
      : p_(params),
        s_(shared),
        ranges_(NumRanges(params.hidden)),
        range_(ranges_ * (static_cast<int>(blockIdx.x) % splits) / splits),
        end_range_(ranges_ * (static_cast<int>(blockIdx.x) % splits + 1) / splits),
        first_(int64_t{blockIdx.x} / splits * kTokens) {}

  __device__ void Run() {
    const int begin = FirstChunk(range_), end = FirstChunk(end_range_);
    FetchMixers(begin);
    if (p_.output.y != nullptr) MakeComb();
    WaitForPredecessor();
    AllowSuccessor();
    FindPairs();
    __syncthreads();
    FetchY(begin);
    FetchStreams(begin);
    for (; range_ < end_range_; ++range_) {
      const int first = FirstChunk(range_), last = FirstChunk(range_ + 1);
      for (int c = first; c < last; ++c) {
        const int buffer = c & 1, next = min(c + 1, end - 1);
        Post(c, next, buffer);
        SplitMixers(buffer);
        FetchMixers(next);
        if (c > first) AddProducts();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        Multiply(buffer);
      }
      AddProducts();
      WriteSums();
    }
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int token() { return thread() / 8; }
  __device__ int64_t row() const { return min(first_ + token(), p_.num_tokens - 1); }
  __device__ bool real() const { return first_ + token() < p_.num_tokens; }
  __device__ int FirstChunk(int range) const {
    return static_cast<int>(p_.hidden) / kColumns * range / ranges_;
  }

  // Half a warp a token.
  __device__ void MakeComb() {
    const int lane = thread() % 32;
    for (int i = thread() / 16; i < kTokens; i += kThreads / 16) {
      const int64_t t = min(first_ + i, p_.num_tokens - 1);
      s_.comb[i][lane % 16] =
          Sinkhorn(p_.before.comb_logits[t * kS * kS + lane % 16], p_.constants);
      if (lane % 16 < kS) s_.post[i][lane % 16] = p_.before.post[t * kS + lane % 16];
    }
  }

  __device__ void FindPairs() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (i < p_.output.num_chosen) pair_[i] = p_.output.pair_of[row() * p_.output.num_chosen + i];
    }
  }

  __device__ void FetchY(int chunk) {
    if (p_.output.y == nullptr) return;
    const __nv_bfloat16* y = p_.output.y + chunk * kColumns + thread() % 8 * 8;
    own_ = *reinterpret_cast<const uint4*>(y + row() * p_.hidden);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (i < p_.output.num_chosen) {
        pairs_[i] = *reinterpret_cast<const uint4*>(y + pair_[i] * p_.hidden);
      }
    }
  }
  __device__ __nv_bfloat16* Streams(int chunk) const {
    return p_.streams + row() * kS * p_.hidden + chunk * kColumns + thread() % 8 * 8;
  }
  __device__ void FetchStreams(int chunk) {
#pragma unroll
    for (int j = 0; j < kS; ++j) {
      streams_[j] = *reinterpret_cast<const uint4*>(Streams(chunk) + j * p_.hidden);
    }
  }

  // Four columns of a mixer a thread: piece i of 24 mixes x 4 streams x 16.
  __device__ void FetchMixers(int chunk) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int piece = thread() + i * kThreads, quad = piece % 16;
      const float* fn = p_.fn + (piece / 16) * p_.hidden + chunk * kColumns + quad * 4;
      mixers_[i] = __ldg(reinterpret_cast<const float4*>(fn));
    }
  }
  __device__ void SplitMixers(int buffer) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int piece = thread() + i * kThreads, quad = piece % 16;
      const int mix = piece / 16 / kS, stream = piece / 16 % kS;
      const int offset = mix * 128 + ((quad / 2) ^ (mix % 8)) * 16 + quad % 2 * 8;
      float4 rest = mixers_[i];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint2 bits{PackBf16(rest.x, rest.y), PackBf16(rest.z, rest.w)};
        *reinterpret_cast<uint2*>(s_.mixers[buffer][stream][part] + offset) = bits;
        const float2 low = UnpackBf16(bits.x), high = UnpackBf16(bits.y);
        rest = {rest.x - low.x, rest.y - low.y, rest.z - high.x, rest.w - high.y};
      }
    }
  }

  // The output of the sub-layer in these columns; fetches those of the next ones.
  __device__ void Output(int next, float (&y)[8]) {
    float own[8];
    Unpack(own_, own);
    if (kPairs == 0 || p_.output.pair_of == nullptr) {
      for (int i = 0; i < 8; ++i) y[i] = own[i];
    } else {
      for (float& v : y) v = 0;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (i >= p_.output.num_chosen) break;
        float pair[8];
        Unpack(pairs_[i], pair);
        for (int k = 0; k < 8; ++k) y[k] += pair[k];
      }
      for (int i = 0; i < 8; ++i) y[i] = RoundBf16(y[i] + own[i]);
    }
    FetchY(next);
  }

  // x_k = b(post_k y + sum_j C[j][k] x_j), to memory and to the tile of stream k.
  __device__ void Post(int chunk, int next, int buffer) {
    float y[8], in[kS][8];
    Output(next, y);
    for (int j = 0; j < kS; ++j) Unpack(streams_[j], in[j]);
    FetchStreams(next);
    const int t = token(), offset = t * 128 + ((thread() % 8) ^ (t % 8)) * 16;
#pragma unroll
    for (int k = 0; k < kS; ++k) {
      float out[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[i] = in[k][i];
        if (p_.output.y == nullptr) continue;
        float mixed = s_.comb[t][k] * in[0][i];
        for (int j = 1; j < kS; ++j) mixed += s_.comb[t][j * kS + k] * in[j][i];
        out[i] = s_.post[t][k] * y[i] + mixed;
      }
      const uint4 bits = Pack(out);
      *reinterpret_cast<uint4*>(s_.x[buffer][k] + offset) = bits;
      if (p_.output.y != nullptr && real()) {
        *reinterpret_cast<uint4*>(Streams(chunk) + k * p_.hidden) = bits;
      }
      Unpack(bits, out);
      for (int i = 0; i < 8; ++i) squares_ += out[i] * out[i];
    }
  }

  // Warpgroup j takes stream j.
  __device__ void Multiply(int buffer) {
    const int stream = thread() / 128;
    const uint64_t x = SmemDescriptor(SharedAddress(s_.x[buffer][stream]));
    WgmmaFence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t mixers = SmemDescriptor(SharedAddress(s_.mixers[buffer][stream][part]));
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        MultiplyMixers(products_, x + 2 * q, mixers + 2 * q, part != 0 || q != 0);
      }
    }
    WgmmaCommit();
  }
  // Sums of 64 columns are the tensor core's, those over more are FP32's.
  __device__ void AddProducts() {
    WgmmaWait<0>();
#pragma unroll
    for (int i = 0; i < 12; ++i) {
      asm volatile("" : "+f"(products_[i])::"memory");
      sums_[i] += products_[i];
    }
  }

  // Of the range; the next one's begin with nothing.
  __device__ void WriteSums() {
    const int lane = thread() % 32, row = thread() % 128 / 32 * 16 + lane / 4;
    float (*sums)[kSums] = s_.sums[thread() / 128];
#pragma unroll
    for (int i = 0; i < 12; ++i) {
      sums[row + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2] = sums_[i];
      sums_[i] = 0;
    }
    const float squares = WarpSum<8>(squares_);
    squares_ = 0;
    if (thread() % 8 == 0) s_.sums[0][token()][kNumMixes] = squares;
    __syncthreads();
    for (int i = thread(); i < kTokens * kSums; i += kThreads) {
      const int t = i / kSums, mix = i % kSums;
      float sum = s_.sums[0][t][mix];
      for (int j = 1; j < kS && mix < kNumMixes; ++j) sum += s_.sums[j][t][mix];
      if (first_ + t >= p_.num_tokens) continue;
      p_.scratch[((first_ + t) * ranges_ + range_) * kSumStride + mix] = sum;
    }
  }

  const CudaHyperConnectionParams& p_;
  PostMixShared& s_;
  const int ranges_;
  int range_;  // that is being added up
  const int end_range_;
  const int64_t first_;
  int32_t pair_[kPairs > 0 ? kPairs : 1];
  uint4 own_, pairs_[kPairs > 0 ? kPairs : 1], streams_[kS];
  float4 mixers_[3];
  float products_[12], sums_[12] = {}, squares_ = 0;
};

template <int kPairs>
__global__ void __launch_bounds__(kThreads, 1)
    PostMixKernel(const __grid_constant__ CudaHyperConnectionParams params, int splits) {
  extern __shared__ __align__(1024) std::byte memory[];
  PostMix<kPairs>(params, splits, *reinterpret_cast<PostMixShared*>(memory)).Run();
}

constexpr int kPreThreads = 512;
constexpr int kMaxPieces = 2;  // of 8 columns, for a thread

struct PreShared {
  float mixes[kSums];
  float pre[kS];
  float warp_squares[kPreThreads / 32];
};

// pre for this launch; post and the logits of C for the next post.
__device__ void Gates(const CudaHyperConnectionParams& p, int64_t t, PreShared& s) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kSums) {
    const int ranges = NumRanges(p.hidden);
    float sum = 0;
    for (int k = 0; k < ranges; ++k) sum += p.scratch[(t * ranges + k) * kSumStride + i];
    s.mixes[i] = sum;
  }
  __syncthreads();
  if (i < kNumMixes) {
    const float mean = s.mixes[kNumMixes] / static_cast<float>(kS * p.hidden);
    const float inverse_rms = 1.0f / sqrtf(mean + p.constants.norm_eps);
    const int part = i < kS ? 0 : i < 2 * kS ? 1 : 2;
    const float mix = s.mixes[i] * inverse_rms * p.scale[part] + p.base[i];
    if (part == 0) s.pre[i] = Sigmoid(mix) + p.constants.hc_eps;
    if (part == 1) p.after.post[t * kS + i - kS] = 2.0f * Sigmoid(mix);
    if (part == 2) p.after.comb_logits[t * kS * kS + i - 2 * kS] = mix;
  }
  __syncthreads();
}

// Eight columns of the input, BF16 and FP8; 16 lanes have one FP8 block.
__device__ void WriteInput(const CudaHyperConnectionParams& p, int64_t t, int64_t column,
                           const float (&y)[8], float inverse_rms) {
  float weight[8], h[8], largest = 0;
  Unpack(*reinterpret_cast<const uint4*>(p.norm_weight + column), weight);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    h[i] = RoundBf16(inverse_rms * y[i] * weight[i]);
    largest = fmaxf(largest, fabsf(h[i]));
  }
  auto* const tiles = reinterpret_cast<std::byte*>(p.h.values);
  *reinterpret_cast<uint4*>(tiles + Bf16TileOffset(t, column, p.h.row_groups)) = Pack(h);
  const uint32_t scale = Fp8Scale(WarpMax<16>(largest));
  const float inverse = Ue8m0Inverse(scale);
  const uint2 codes{
      Fp8Codes(h[0] * inverse, h[1] * inverse) | Fp8Codes(h[2] * inverse, h[3] * inverse) << 16,
      Fp8Codes(h[4] * inverse, h[5] * inverse) | Fp8Codes(h[6] * inverse, h[7] * inverse) << 16};
  *reinterpret_cast<uint2*>(p.h_fp8.codes + Fp8TileOffset(t, column, p.h_fp8.row_groups)) = codes;
  if (threadIdx.x % 16 == 0) {
    p.h_fp8.scales[column / 128 * p.h_fp8.row_groups * 8 + t] = Ue8m0Value(scale);
  }
}

__global__ void __launch_bounds__(kPreThreads, 2)
    PreKernel(const __grid_constant__ CudaHyperConnectionParams p) {
  __shared__ PreShared s;
  const int64_t t = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  WaitForPredecessor();
  AllowSuccessor();
  uint4 streams[kMaxPieces][kS];
#pragma unroll
  for (int n = 0; n < kMaxPieces; ++n) {
    const int64_t column = (thread + n * kPreThreads) * 8;
    if (column >= p.hidden) break;
    for (int k = 0; k < kS; ++k) {
      streams[n][k] = *reinterpret_cast<const uint4*>(p.streams + (t * kS + k) * p.hidden + column);
    }
  }
  Gates(p, t, s);
  float y[kMaxPieces][8], squares = 0;
#pragma unroll
  for (int n = 0; n < kMaxPieces; ++n) {
    if ((thread + n * kPreThreads) * 8 >= p.hidden) break;
    for (float& v : y[n]) v = 0;
    for (int k = 0; k < kS; ++k) {
      float x[8];
      Unpack(streams[n][k], x);
      for (int i = 0; i < 8; ++i) y[n][i] += s.pre[k] * x[i];
    }
    for (float& v : y[n]) {
      v = RoundBf16(v);
      squares += v * v;
    }
  }
  squares = WarpSum(squares);
  if (thread % 32 == 0) s.warp_squares[thread / 32] = squares;
  __syncthreads();
  float sum = 0;
  for (const float warp : s.warp_squares) sum += warp;
  const float inverse_rms = 1.0f / sqrtf(sum / static_cast<float>(p.hidden) + p.constants.norm_eps);
#pragma unroll
  for (int n = 0; n < kMaxPieces; ++n) {
    const int64_t column = (thread + n * kPreThreads) * 8;
    if (column >= p.hidden) break;
    WriteInput(p, t, column, y[n], inverse_rms);
  }
}

// Blocks that share the columns of the same tokens, where there are too few tokens for all
// multiprocessors.
int Splits(const CudaHyperConnectionParams& p) {
  const int64_t blocks = (p.num_tokens + kTokens - 1) / kTokens;
  return static_cast<int>(std::clamp<int64_t>(132 / blocks, 1, NumRanges(p.hidden)));
}

}  // namespace

bool IsLargeBoundary(const CudaHyperConnectionParams& p) {
  return p.scratch != nullptr && p.rows == nullptr &&
         (p.prefill || p.num_tokens >= kLargeBoundaryTokens) &&
         p.output.num_chosen <= kMaxBoundaryPairs && p.hidden <= kMaxPieces * kPreThreads * 8;
}

void LaunchLargeBoundary(const CudaHyperConnectionParams& p, device::Stream& stream) {
  const int splits = Splits(p);
  const auto blocks = static_cast<unsigned>((p.num_tokens + kTokens - 1) / kTokens * splits);
  const auto launch = [&](auto kernel) {
    LaunchKernel(kernel, blocks, kThreads, sizeof(PostMixShared), stream, p, splits);
  };
  const int pairs = p.output.pair_of == nullptr ? 0 : p.output.num_chosen;
  launch(pairs == 0 ? PostMixKernel<0> : pairs <= 6 ? PostMixKernel<6> : PostMixKernel<8>);
  LaunchKernel(PreKernel, static_cast<unsigned>(p.num_tokens), kPreThreads, 0, stream, p);
}

}  // namespace fathom::kernels
