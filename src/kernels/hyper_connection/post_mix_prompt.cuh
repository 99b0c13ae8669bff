// The first of boundary_large.h's launches for prompts and large decodes (smaller ones:
// post_mix_decode.cuh): a block has a range of 256 columns, whose mixers stay in shared memory, and
// takes tiles of 16 tokens one after another; eight warps a tile, each 32 of the columns in all
// streams, so that what is read at a time lies together in memory. What a thread loads is what it
// gives the tensor cores: of tokens g and g + 8 (g = lane / 4) 8 columns that follow each other, as
// columns 2, 2, 2 and 2 of k (the mixers' columns are taken alike, so their order does not matter).
// Device code only.
#pragma once

#include "kernels/hyper_connection/post_mix.cuh"
#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kPromptPostThreads = 512;
inline constexpr int kPromptChunk = 32;  // columns of a warp, 8 a thread
// Warps of a tile, which have a range; teams of so many, each with a tile of its own.
inline constexpr int kPromptChunks = kBoundaryRangeColumns / kPromptChunk;
inline constexpr int kPromptTeamThreads = kPromptChunks * 32;
inline constexpr int kPromptTeams = kPromptPostThreads / kPromptTeamThreads;
inline constexpr int kPromptRowPieces = kBoundaryRangeColumns / 8;  // of 8 columns: 16 bytes

struct PromptPostShared {
  uint4 mixers[kNumStreams][kMixerParts][kNumMixes][kPromptRowPieces];
  // Of a tile, and of the next one.
  TileGates gates[2][kPromptTeams];
  float sums[2][kPromptTeams][kPromptChunks][kPostSums][32];
};

// kPairs: at least the rows that y of a token is the sum of, besides its own.
template <int kPairs>
class PromptPost {
  static constexpr int kS = kNumStreams;

 public:
  __device__ PromptPost(const CudaHyperConnectionParams& params, const PostMixShape& shape,
                        PromptPostShared& shared)
      : p_(params),
        shape_(shape),
        s_(shared),
        hidden_(static_cast<int>(params.hidden)),
        range_(static_cast<int>(blockIdx.x) % shape.ranges),
        column0_(range_ * kBoundaryRangeColumns),
        chunks_(min(kPromptChunks, (hidden_ - column0_) / kPromptChunk)),
        tile_(static_cast<int>(blockIdx.x) / shape.ranges * kPromptTeams + team()) {}

  __device__ void Run() {
    StageMixers();
    FetchGates(tile_, s_.gates[0][team()]);
    AwaitCopies();
    WaitForPredecessor();
    AllowSuccessor();
    __syncthreads();
    const int stride = shape_.groups * kPromptTeams;
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
  __device__ static int team() { return static_cast<int>(threadIdx.x) / kPromptTeamThreads; }
  __device__ static int member() { return static_cast<int>(threadIdx.x) % kPromptTeamThreads; }
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
    const int pieces = chunks_ * (kPromptChunk / 8);
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < kNumMixes * kS * kPromptRowPieces;
         i += kPromptPostThreads) {
      const int piece = i % kPromptRowPieces, stream = i / kPromptRowPieces % kS,
                mix = i / kPromptRowPieces / kS;
      if (piece >= pieces) continue;
      const auto* fn = reinterpret_cast<const float4*>(
          p_.fn + int64_t{i / kPromptRowPieces} * hidden_ + column0_ + piece * 8);
      const float4 low = __ldg(fn), high = __ldg(fn + 1);
      float rest[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int part = 0; part < kMixerParts; ++part) {
        const uint4 bits = PackEight(rest);
        s_.mixers[stream][part][mix][Place(mix, piece)] = bits;
        float values[8];
        UnpackEight(bits, values);
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
    PrefetchBulk(rows + row * hidden_ + column0_,
                 static_cast<uint32_t>(chunks_ * kPromptChunk * 2));
  }

  // Rows are pieces of 8 columns, of which a thread has one: 32 bits count all of them, so that an
  // address is one instruction.
  __device__ uint32_t Pieces() const { return static_cast<uint32_t>(hidden_ / 8); }
  __device__ int Piece() const {
    return chunk() * (kPromptChunk / 8) + lane() % 4;
  }  // of the range
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
      UnpackEight(y.pairs[n], values);
      for (int k = 0; k < 8; ++k) sum[k] += values[k];
    }
    UnpackEight(y.own, values);
    for (int k = 0; k < 8; ++k) sum[k] += values[k];
    return PackEight(sum);
  }

  // x_k = b(post_k y + sum_j C[j][k] x_j) in 8 columns of token i, in place and in memory.
  __device__ void Post(const TileGates& gates, int i, const uint4& output,
                       uint32_t (&x)[kS][4]) const {
    float y[8];
    UnpackEight(output, y);
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
  __device__ void AwaitTeam() const { NamedBarrier(1 + team(), kPromptTeamThreads); }
  __device__ void WriteSums(int tile, int buffer) const {
    WriteTileSums<kPromptTeamThreads>(p_, shape_, tile, range_, s_.sums[buffer][team()]);
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
  PromptPostShared& s_;
  const int hidden_, range_, column0_, chunks_;
  int tile_;  // of the team
};

template <int kPairs>
__global__ void __launch_bounds__(kPromptPostThreads, 1)
    PromptPostKernel(const __grid_constant__ CudaHyperConnectionParams params,
                     const __grid_constant__ PostMixShape shape) {
  extern __shared__ __align__(16) std::byte memory[];
  PromptPost<kPairs>(params, shape, *reinterpret_cast<PromptPostShared*>(memory)).Run();
}

}  // namespace fathom::kernels
