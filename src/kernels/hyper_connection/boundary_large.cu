// Two launches: streams and what their mixes are the sums of (post_mix_prompt.cuh,
// post_mix_decode.cuh), then PreKernel, a block a token: gates, and the next sub-layer's input.
#include <algorithm>

#include "base/check.h"
#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/hyper_connection/gates.cuh"
#include "kernels/hyper_connection/milestone.cuh"
#include "kernels/hyper_connection/post_mix_decode.cuh"
#include "kernels/hyper_connection/post_mix_prompt.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {
namespace {

constexpr int kS = kNumStreams;
constexpr int kMostPreThreads = 512;

struct PreShared {
  float sums[kMostPreThreads / 32][kSumStride];
  float warp_squares[kMostPreThreads / 32];
};

// What scales a token's raw mixes.
__device__ float InverseRms(const CudaHyperConnectionParams& p, float squares) {
  return InverseSqrt(squares / static_cast<float>(kS * p.hidden) + p.constants.norm_eps);
}

// On lane i of every warp: mix i of token t; sum kNumMixes: of squares. Each warp adds up some of
// the ranges, then all of them what these have.
template <int kPreThreads>
__device__ float TokenSum(const CudaHyperConnectionParams& p, int64_t t, int ranges, PreShared& s) {
  constexpr int kWarps = kPreThreads / 32, kMost = kMaxBoundaryRanges / kWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  float parts[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int r = warp + i * kWarps;
    parts[i] =
        r < ranges && lane <= kNumMixes ? p.scratch[(t * ranges + r) * kSumStride + lane] : 0;
  }
  float sum = 0;
  for (const float part : parts) sum += part;
  s.sums[warp][lane] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += s.sums[w][lane];
  return sum;
}

// Of a token's mixes what the next launch needs; one warp.
__device__ void WriteState(const CudaHyperConnectionParams& p, int64_t t, float mix) {
  const int i = static_cast<int>(threadIdx.x) % 32 - kS;
  if (i >= 0 && i < kS) p.after.post[t * kS + i] = 2.0f * Sigmoid(mix);
  if (i >= kS && i < kNumMixes - kS) p.after.comb_logits[t * kS * kS + i - kS] = mix;
}

// C for the next post of a decode's token, whose mixes are on each warp's lanes; one warp.
__device__ void WriteTokenComb(const CudaHyperConnectionParams& p, int64_t t, float mix) {
  const int lane = static_cast<int>(threadIdx.x), j = lane % kS;
  const auto logit = [&](int k) { return __shfl_sync(0xffffffffu, mix, (2 + j) * kS + k); };
  const float4 comb = Sinkhorn({logit(0), logit(1), logit(2), logit(3)}, p.constants);
  if (lane < kS) reinterpret_cast<float4*>(p.after.comb)[t * kS + j] = comb;
}

// Of many tokens: four threads a token, a row each.
__device__ void WriteComb(const CudaHyperConnectionParams& p, int64_t first, int ranges) {
  const int64_t token = first + threadIdx.x / kS, t = min(token, p.num_tokens - 1);
  const int j = static_cast<int>(threadIdx.x) % kS, mix = (2 + j) * kS;
  float4 sum{};
  float squares = 0;
#pragma unroll 8
  for (int r = 0; r < ranges; ++r) {
    const float* sums = p.scratch + (t * ranges + r) * kSumStride;
    const float4 part = *reinterpret_cast<const float4*>(sums + mix);
    sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    squares += sums[kNumMixes];
  }
  const float scale = InverseRms(p, squares) * p.scale[2];
  const float4 base = *reinterpret_cast<const float4*>(p.base + mix);
  const float4 comb = Sinkhorn({sum.x * scale + base.x, sum.y * scale + base.y,
                                sum.z * scale + base.z, sum.w * scale + base.w},
                               p.constants);
  if (token == t) reinterpret_cast<float4*>(p.after.comb)[t * kS + j] = comb;
}

// Eight columns of the input, BF16 and FP8; 16 lanes have one FP8 block.
__device__ void WriteInput(const CudaHyperConnectionParams& p, int64_t t, int64_t column,
                           const uint4& input, const uint4& norm, float inverse_rms) {
  float y[8], weight[8], h[8], largest = 0;
  UnpackEight(input, y);
  UnpackEight(norm, weight);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    h[i] = RoundBf16(inverse_rms * y[i] * weight[i]);
    largest = fmaxf(largest, fabsf(h[i]));
  }
  auto* const tiles = reinterpret_cast<std::byte*>(p.h.values);
  *reinterpret_cast<uint4*>(tiles + Bf16TileOffset(t, column, p.h.row_groups)) = PackEight(h);
  const uint32_t scale = Fp8Scale(WarpMax<16>(largest));
  const float inverse = Ue8m0Inverse(scale);
  const uint2 codes{Fp8Codes(h[0] * inverse, h[1] * inverse, h[2] * inverse, h[3] * inverse),
                    Fp8Codes(h[4] * inverse, h[5] * inverse, h[6] * inverse, h[7] * inverse)};
  *reinterpret_cast<uint2*>(p.h_fp8.codes + Fp8TileOffset(t, column, p.h_fp8.row_groups)) = codes;
  if (threadIdx.x % 16 == 0) {
    p.h_fp8.scales[column / 128 * p.h_fp8.row_groups * 8 + t] = Ue8m0Value(scale);
  }
}

constexpr int kPieces = 2;  // of 8 columns, for a thread

// A block a token, after some for C, of a decode one a token, too. 64 registers: 1,024 threads a
// multiprocessor.
template <int kPreThreads>
__global__ void __launch_bounds__(kPreThreads, 1024 / kPreThreads)
    PreKernel(const __grid_constant__ CudaHyperConnectionParams p, int ranges, int comb_blocks,
              bool is_decode) {
  __shared__ PreShared s;
  const bool makes_comb = static_cast<int>(blockIdx.x) < comb_blocks;
  if (makes_comb && !is_decode) {
    WaitForPredecessor();
    AllowSuccessor();
    if (blockIdx.x == 0 && threadIdx.x == 0) Leave(p.milestone);
    return WriteComb(p, int64_t{blockIdx.x} * kPreThreads / kS, ranges);
  }
  const int64_t t = static_cast<int>(blockIdx.x) - (makes_comb ? 0 : comb_blocks);
  const int thread = static_cast<int>(threadIdx.x), own_mix = min(thread % 32, kNumMixes - 1);
  const float scale = p.scale[min(own_mix / kS, 2)], base = p.base[own_mix];
  uint4 norm[kPieces], streams[kPieces][kS];
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const int column = (thread + n * kPreThreads) * 8;
    if (column < p.hidden && !makes_comb) {
      norm[n] = *reinterpret_cast<const uint4*>(p.norm_weight + column);
    }
  }
  WaitForPredecessor();
  AllowSuccessor();
  if (blockIdx.x == 0 && thread == 0) Leave(p.milestone);
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const int column = (thread + n * kPreThreads) * 8;
    if (column >= p.hidden || makes_comb) break;
    for (int k = 0; k < kS; ++k) {
      streams[n][k] = *reinterpret_cast<const uint4*>(p.streams + (t * kS + k) * p.hidden + column);
    }
  }
  const float sum = TokenSum<kPreThreads>(p, t, ranges, s);
  const float inverse = InverseRms(p, __shfl_sync(0xffffffffu, sum, kNumMixes));
  const float mix = sum * inverse * scale + base, gate = Sigmoid(mix) + p.constants.hc_eps;
  if (makes_comb) {
    if (thread < 32) WriteTokenComb(p, t, mix);
    return;
  }
  float pre[kS];
  for (int k = 0; k < kS; ++k) pre[k] = __shfl_sync(0xffffffffu, gate, k);
  if (thread < 32) WriteState(p, t, mix);
  float squares = 0;
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    if ((thread + n * kPreThreads) * 8 >= p.hidden) break;
    float y[8] = {};
    for (int k = 0; k < kS; ++k) {
      float x[8];
      UnpackEight(streams[n][k], x);
      for (int i = 0; i < 8; ++i) y[i] += pre[k] * x[i];
    }
    streams[n][0] = PackEight(y);
    UnpackEight(streams[n][0], y);
    for (const float v : y) squares += v * v;
  }
  squares = WarpSum(squares);
  if (thread % 32 == 0) s.warp_squares[thread / 32] = squares;
  __syncthreads();
  float all_squares = 0;
  for (int i = 0; i < kPreThreads / 32; ++i) all_squares += s.warp_squares[i];
  const float mean = all_squares / static_cast<float>(p.hidden);
  const float inverse_rms = InverseSqrt(mean + p.constants.norm_eps);
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const int64_t column = (thread + n * kPreThreads) * 8;
    if (column >= p.hidden) break;
    WriteInput(p, t, column, streams[n][0], norm[n], inverse_rms);
  }
}

constexpr int kMultiprocessors = 132;
constexpr int kDecodePostBlocks = 2 * kMultiprocessors;  // that run at once

PostMixShape MakeShape(int64_t num_tokens, int64_t hidden, bool prefill) {
  PostMixShape s;
  s.tiles = static_cast<int>((num_tokens + kPostTokens - 1) / kPostTokens);
  s.ranges = static_cast<int>(hidden) / kDecodeRangeColumns;
  s.is_decode =
      !prefill && num_tokens <= kMostDecodeTokens && s.ranges * s.tiles <= kDecodePostBlocks;
  if (!s.is_decode) s.ranges = BoundaryRanges(hidden);
  s.groups = s.is_decode ? s.tiles : std::clamp(kMultiprocessors / s.ranges, 1, s.tiles);
  return s;
}

template <int kPairs>
void LaunchPost(const CudaHyperConnectionParams& p, const PostMixShape& shape,
                device::Stream& stream) {
  const auto blocks = static_cast<unsigned>(shape.groups * shape.ranges);
  if (p.gather.exchange.peers.size > 1) {
    CHECK(p.output.y != nullptr && p.gather.sent == OutputExchange::Sent::kNothing);
    CHECK(!p.prefill && LargeBoundaryExchanges(p.num_tokens, p.hidden, p.output.num_chosen));
    LaunchKernel(DecodePostKernel<kPairs, true>, blocks, kDecodePostThreads, 0, stream, p, shape);
  } else if (shape.is_decode) {
    LaunchKernel(DecodePostKernel<kPairs, false>, blocks, kDecodePostThreads, 0, stream, p, shape);
  } else {
    LaunchKernel(PromptPostKernel<kPairs>, blocks, kPromptPostThreads, sizeof(PromptPostShared),
                 stream, p, shape);
  }
}

// Whether its kernels take such an output.
bool Takes(int64_t hidden, int num_chosen) {
  return num_chosen <= kMaxBoundaryPairs && hidden <= kPieces * kMostPreThreads * 8;
}

}  // namespace

bool IsLargeBoundary(const CudaHyperConnectionParams& p) {
  return p.scratch != nullptr && p.rows == nullptr &&
         (p.prefill || p.num_tokens >= LargeBoundaryTokens(p.hidden)) &&
         Takes(p.hidden, p.output.num_chosen);
}

bool LargeBoundaryExchanges(int64_t num_tokens, int64_t hidden, int num_chosen) {
  return num_tokens >= LargeBoundaryTokens(hidden) && Takes(hidden, num_chosen) &&
         num_tokens * hidden / 4 <= kMaxPackets && MakeShape(num_tokens, hidden, false).is_decode;
}

void LaunchLargeBoundary(const CudaHyperConnectionParams& p, device::Stream& stream) {
  CHECK_LT(p.num_tokens, 1 << 16);  // whose pieces 32 bits count
  const PostMixShape shape = MakeShape(p.num_tokens, p.hidden, p.prefill);
  const int pairs = p.output.pair_of == nullptr ? 0 : p.output.num_chosen;
  pairs == 0   ? LaunchPost<0>(p, shape, stream)
  : pairs <= 6 ? LaunchPost<6>(p, shape, stream)
               : LaunchPost<8>(p, shape, stream);
  const auto pre = [&](auto kernel, int threads) {
    const auto tokens = static_cast<int>(p.num_tokens);
    const int comb_blocks = shape.is_decode ? tokens : (tokens * kS + threads - 1) / threads;
    LaunchKernel(kernel, static_cast<unsigned>(comb_blocks + tokens),
                 static_cast<unsigned>(threads), 0, stream, p, shape.ranges, comb_blocks,
                 shape.is_decode);
  };
  p.hidden <= kPieces * 256 * 8 ? pre(PreKernel<256>, 256) : pre(PreKernel<512>, 512);
}

}  // namespace fathom::kernels
