// PostMixKernel, of prompts and large decodes (smaller ones: post_mix_decode.cuh): a block has a
// range of 256 columns, whose mixers stay in shared memory, and takes tiles of 16 tokens one after
// another; eight warps a tile, each 32 of the columns in all streams, so that what is read at a
// time lies together in memory. What a thread loads is what it gives the tensor cores: of tokens g
// and g + 8 (g = lane / 4) 8 columns that follow each other, as columns 2, 2, 2 and 2 of k (the
// mixers' columns are taken alike, so their order does not matter). PreKernel: a block a token.
#include <algorithm>

#include "base/check.h"
#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/hyper_connection/gates.cuh"
#include "kernels/hyper_connection/milestone.cuh"
#include "kernels/hyper_connection/post_mix_decode.cuh"
#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {
namespace {

constexpr int kS = kNumStreams;
constexpr int kThreads = 512;
constexpr int kChunk = 32;                               // columns of a warp, 8 a thread
constexpr int kChunks = kBoundaryRangeColumns / kChunk;  // of a range: warps of a tile
constexpr int kTeams = kThreads / 32 / kChunks;          // of warps with a tile
constexpr int kTeamThreads = kChunks * 32;
constexpr int kRowPieces = kBoundaryRangeColumns / 8;  // of 8 columns: 16 bytes

struct PostMixShared {
  uint4 mixers[kS][kMixerParts][kNumMixes][kRowPieces];
  // Of a tile, and of the next one.
  TileGates gates[2][kTeams];
  float sums[2][kTeams][kChunks][kPostSums][32];
};

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
  __device__ PostMix(const CudaHyperConnectionParams& params, const PostMixShape& shape,
                     PostMixShared& shared)
      : p_(params),
        shape_(shape),
        s_(shared),
        hidden_(static_cast<int>(params.hidden)),
        range_(static_cast<int>(blockIdx.x) % shape.ranges),
        column0_(range_ * kBoundaryRangeColumns),
        chunks_(min(kChunks, (hidden_ - column0_) / kChunk)),
        tile_(static_cast<int>(blockIdx.x) / shape.ranges * kTeams + team()) {}

  __device__ void Run() {
    StageMixers();
    FetchGates(tile_, s_.gates[0][team()]);
    AwaitCopies();
    WaitForPredecessor();
    AllowSuccessor();
    __syncthreads();
    const int stride = shape_.groups * kTeams;
    int buffer = 0, last = -1;
    for (; tile_ < shape_.tiles; tile_ += stride, buffer ^= 1) {
      const TileGates& gates = s_.gates[buffer][team()];
      uint32_t x[2][kS][4];
      LoadStreams(x);
      if (last >= 0) AwaitTeam();
      Outputs outputs;
      LoadOutput(gates, 0, outputs);
      if (last >= 0) WriteSums(last, buffer ^ 1);
      TileGates& next = s_.gates[buffer ^ 1][team()];
      FetchGates(tile_ + stride, next);
      Prefetch(tile_ + stride);
      AddChunk(gates, x, outputs, s_.sums[buffer][team()][chunk()]);
      AwaitCopies();
      PrefetchPairs(tile_ + stride, next);
      last = tile_;
    }
    if (last < 0) return;
    AwaitTeam();
    WriteSums(last, buffer ^ 1);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int team() { return static_cast<int>(threadIdx.x) / kTeamThreads; }
  __device__ static int member() { return static_cast<int>(threadIdx.x) % kTeamThreads; }
  __device__ static int chunk() { return member() / 32; }
  // Of the thread's token i, 0 or 1.
  __device__ int64_t Token(int i) const {
    return tile_ * int64_t{kPostTokens} + lane() / 4 + i * 8;
  }
  __device__ int64_t Row(int i) const { return min(Token(i), p_.num_tokens - 1); }
  __device__ bool IsReal(int i) const { return Token(i) < p_.num_tokens; }

  // Where piece `piece` of a mix's row is: rows that are read together lie in other banks.
  __device__ static int Place(int mix, int piece) { return piece ^ mix % 2 * 4; }

  // Of the range: each value as the sum of three BF16 values.
  __device__ void StageMixers() {
    const int pieces = chunks_ * (kChunk / 8);
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < kNumMixes * kS * kRowPieces; i += kThreads) {
      const int piece = i % kRowPieces, stream = i / kRowPieces % kS, mix = i / kRowPieces / kS;
      if (piece >= pieces) continue;
      const auto* fn = reinterpret_cast<const float4*>(p_.fn + int64_t{i / kRowPieces} * hidden_ +
                                                       column0_ + piece * 8);
      const float4 low = __ldg(fn), high = __ldg(fn + 1);
      float rest[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int part = 0; part < kMixerParts; ++part) {
        const uint4 bits = Pack(rest);
        s_.mixers[stream][part][mix][Place(mix, piece)] = bits;
        float values[8];
        Unpack(bits, values);
        for (int k = 0; k < 8; ++k) rest[k] -= values[k];
      }
    }
  }

  // Of the tile that comes next. Where a sub-layer ended, its predecessor has not written them.
  __device__ void FetchGates(int tile, TileGates& gates) const {
    if (p_.output.y == nullptr || tile >= shape_.tiles) return;
    const auto row = [this, tile](int token) {
      return min(tile * int64_t{kPostTokens} + token, p_.num_tokens - 1);
    };
    if (member() < kPostTokens * (kS + 1)) {
      const int token = member() / (kS + 1), i = member() % (kS + 1);
      const float* from =
          i < kS ? p_.before.comb + (row(token) * kS + i) * kS : p_.before.post + row(token) * kS;
      CopyAhead(SharedAddress(&gates.comb[0][0] + member()), from);
    }
    const int token = member() / kMaxBoundaryPairs, i = member() % kMaxBoundaryPairs;
    if (token < kPostTokens && i < p_.output.num_chosen) {
      CopyAhead4(SharedAddress(&gates.pairs[0][0] + member()),
                 p_.output.pair_of + row(token) * p_.output.num_chosen + i);
    }
  }

  // What the tile will read of the range, to the second-level cache: a row at a time.
  __device__ void Prefetch(int tile) const {
    if (tile >= shape_.tiles) return;
    const int64_t row = int64_t{tile} * kPostTokens * kS + member(),
                  first = int64_t{tile} * kPostTokens;
    if (member() < kPostTokens * kS) PrefetchRow(p_.streams, min(row, p_.num_tokens * kS - 1));
    const int token = member() - kPostTokens * kS;
    if (token < 0 || token >= kPostTokens || p_.output.y == nullptr) return;
    PrefetchRow(p_.output.y, min(first + token, p_.num_tokens - 1));
  }
  __device__ void PrefetchPairs(int tile, const TileGates& gates) const {
    if (tile >= shape_.tiles || member() >= kPostTokens * kMaxBoundaryPairs) return;
    const int32_t pair = (&gates.pairs[0][0])[member()];  // this thread has fetched it
    if (member() % kMaxBoundaryPairs < p_.output.num_chosen) PrefetchRow(p_.output.y, pair);
  }
  __device__ void PrefetchRow(const __nv_bfloat16* rows, int64_t row) const {
    PrefetchBulk(rows + row * hidden_ + column0_, static_cast<uint32_t>(chunks_ * kChunk * 2));
  }

  // Rows are pieces of 8 columns, of which a thread has one: 32 bits count all of them, so that an
  // address is one instruction.
  __device__ uint32_t Pieces() const { return static_cast<uint32_t>(hidden_ / 8); }
  __device__ int Piece() const { return chunk() * (kChunk / 8) + lane() % 4; }  // of the range
  __device__ int Column() const { return column0_ + Piece() * 8; }
  __device__ uint4* Stream(int i, int j, int column) const {
    return reinterpret_cast<uint4*>(p_.streams) +
           ((static_cast<uint32_t>(Row(i)) * kS + static_cast<uint32_t>(j)) * Pieces() +
            static_cast<uint32_t>(column / 8));
  }

  // What the output of the sub-layer is the sum of, in the thread's columns of token i.
  struct Outputs {
    uint4 own, pairs[kPairs > 0 ? kPairs : 1];
  };
  __device__ bool HasPairs() const { return kPairs > 0 && p_.output.pair_of != nullptr; }
  __device__ void LoadOutput(const TileGates& gates, int i, Outputs& y) const {
    if (p_.output.y == nullptr || chunk() >= chunks_) return;
    const auto* from =
        reinterpret_cast<const uint4*>(p_.output.y) + static_cast<uint32_t>(Column() / 8);
    y.own = from[static_cast<uint32_t>(Row(i)) * Pieces()];
    if (!HasPairs()) return;
    const auto* rows = reinterpret_cast<const uint4*>(gates.pairs[lane() / 4 + i * 8]);
    const uint4 low = rows[0], high = kPairs > 4 ? rows[1] : uint4{};
    const uint32_t row[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      if (n >= p_.output.num_chosen) break;
      y.pairs[n] = from[row[n] * Pieces()];
    }
  }
  // In BF16.
  __device__ uint4 Sum(const Outputs& y) const {
    if (!HasPairs()) return y.own;
    float sum[8] = {}, values[8];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      if (n >= p_.output.num_chosen) break;
      Unpack(y.pairs[n], values);
      for (int k = 0; k < 8; ++k) sum[k] += values[k];
    }
    Unpack(y.own, values);
    for (int k = 0; k < 8; ++k) sum[k] += values[k];
    return Pack(sum);
  }

  // x_k = b(post_k y + sum_j C[j][k] x_j) in 8 columns of token i, in place and in memory.
  __device__ void Post(const TileGates& gates, int i, const uint4& output,
                       uint32_t (&x)[kS][4]) const {
    float y[8];
    Unpack(output, y);
    const float4* comb = gates.comb[lane() / 4 + i * 8];
    const float4 c[kS] = {comb[0], comb[1], comb[2], comb[3]}, post = comb[kS];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float2 in[kS];
      for (int j = 0; j < kS; ++j) in[j] = UnpackBf16(x[j][n]);
      const auto mix = [&](float own, float c0, float c1, float c2, float c3) {
        const float low = c0 * in[0].x + c1 * in[1].x + c2 * in[2].x + c3 * in[3].x;
        const float high = c0 * in[0].y + c1 * in[1].y + c2 * in[2].y + c3 * in[3].y;
        return PackBf16(own * y[2 * n] + low, own * y[2 * n + 1] + high);
      };
      x[0][n] = mix(post.x, c[0].x, c[1].x, c[2].x, c[3].x);
      x[1][n] = mix(post.y, c[0].y, c[1].y, c[2].y, c[3].y);
      x[2][n] = mix(post.z, c[0].z, c[1].z, c[2].z, c[3].z);
      x[3][n] = mix(post.w, c[0].w, c[1].w, c[2].w, c[3].w);
    }
    for (int j = 0; j < kS && IsReal(i); ++j) {
      *Stream(i, j, Column()) = {x[j][0], x[j][1], x[j][2], x[j][3]};
    }
  }

  // Of the thread's two tokens. They are on their way while the tile before is ended.
  __device__ void LoadStreams(uint32_t (&x)[2][kS][4]) const {
    if (chunk() >= chunks_) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < kS; ++j) {
        const uint4 bits = *Stream(i, j, Column());
        x[i][j][0] = bits.x, x[i][j][1] = bits.y, x[i][j][2] = bits.z, x[i][j][3] = bits.w;
      }
    }
  }

  // Until its warps have the sums of their tile, and the gates of the next one.
  __device__ void AwaitTeam() const { NamedBarrier(1 + team(), kTeamThreads); }
  __device__ void WriteSums(int tile, int buffer) const {
    WriteTileSums<kTeamThreads>(p_, shape_, tile, range_, s_.sums[buffer][team()]);
  }

  // Sums of the warp's 32 columns are the tensor core's, those over more are FP32's.
  __device__ void AddChunk(const TileGates& gates, uint32_t (&x)[2][kS][4], Outputs& outputs,
                           float (&sums)[kPostSums][32]) const {
    if (chunk() >= chunks_) {
      for (auto& sum : sums) sum[lane()] = 0;
      return;
    }
    const int piece = Piece();
    if (p_.output.y != nullptr) {
      const uint4 first = Sum(outputs);
      // On its way during the first token's post: the compiler may not move loads over its stores.
      LoadOutput(gates, 1, outputs);
      Post(gates, 0, first, x[0]);
      Post(gates, 1, Sum(outputs), x[1]);
    }
    float products[kMixTiles][4] = {};
    TileSums all;
#pragma unroll
    for (int j = 0; j < kS; ++j) {
      const uint32_t a[2][4] = {{x[0][j][0], x[1][j][0], x[0][j][1], x[1][j][1]},
                                {x[0][j][2], x[1][j][2], x[0][j][3], x[1][j][3]}};
#pragma unroll
      for (int part = 0; part < kMixerParts; ++part) {
#pragma unroll
        for (int n = 0; n < kMixTiles; ++n) {
          const int mix = n * 8 + lane() / 4;
          const uint4 b = s_.mixers[j][part][mix][Place(mix, piece)];
          WarpMultiply(products[n], a[0], b.x, b.y);
          WarpMultiply(products[n], a[1], b.z, b.w);
        }
      }
      for (const auto& step : a) all.AddSquares(step);
    }
    all.Keep(products, sums);
  }

  const CudaHyperConnectionParams& p_;
  const PostMixShape& shape_;
  PostMixShared& s_;
  const int hidden_, range_, column0_, chunks_;
  int tile_;  // of the team
};

template <int kPairs>
__global__ void __launch_bounds__(kThreads, 1)
    PostMixKernel(const __grid_constant__ CudaHyperConnectionParams params,
                  const __grid_constant__ PostMixShape shape) {
  extern __shared__ __align__(16) std::byte memory[];
  PostMix<kPairs>(params, shape, *reinterpret_cast<PostMixShared*>(memory)).Run();
}

struct PreShared {
  float sums[kThreads / 32][kSumStride];
  float warp_squares[kThreads / 32];
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
  Unpack(input, y);
  Unpack(norm, weight);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    h[i] = RoundBf16(inverse_rms * y[i] * weight[i]);
    largest = fmaxf(largest, fabsf(h[i]));
  }
  auto* const tiles = reinterpret_cast<std::byte*>(p.h.values);
  *reinterpret_cast<uint4*>(tiles + Bf16TileOffset(t, column, p.h.row_groups)) = Pack(h);
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
      Unpack(streams[n][k], x);
      for (int i = 0; i < 8; ++i) y[i] += pre[k] * x[i];
    }
    streams[n][0] = Pack(y);
    Unpack(streams[n][0], y);
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
    LaunchKernel(PostMixKernel<kPairs>, blocks, kThreads, sizeof(PostMixShared), stream, p, shape);
  }
}

// Whether its kernels take such an output.
bool Takes(int64_t hidden, int num_chosen) {
  return num_chosen <= kMaxBoundaryPairs && hidden <= kPieces * kThreads * 8;
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
