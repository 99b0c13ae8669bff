// The first of boundary_large.h's launches for a decode: a block has a tile of 16 tokens in 128
// columns, 16 a warp, whose mixers it has fetched before the wait. Of tokens g and g + 8 a thread
// has 4 columns that follow each other, which it gives the tensor cores as columns 2 and 2 of k
// (the mixers' columns are taken alike, so their order does not matter). Of several ranks the one
// that has the block's columns of the output sends them to the others as packets. Device code only.
#pragma once

#include "kernels/collective/packets.cuh"
#include "kernels/hyper_connection/post_mix.cuh"
#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/quantize/quantize.cuh"

namespace fathom::kernels {

inline constexpr int kDecodePostThreads = 256, kDecodeWarps = kDecodePostThreads / 32;
inline constexpr int kDecodeChunk = kDecodeRangeColumns / kDecodeWarps;

struct DecodePostShared {
  uint2 last[kNumStreams][kMixTiles][kDecodePostThreads];  // a thread's mixers' last part
  TileGates gates;
  float sums[kDecodeWarps][kPostSums][32];
};

// kPairs: at least the rows that y of a token is the sum of, besides its own. kGathers: each rank
// has some columns of y.
template <int kPairs, bool kGathers>
class DecodePost {
 public:
  __device__ DecodePost(const CudaHyperConnectionParams& params, const PostMixShape& shape,
                        DecodePostShared& shared)
      : p_(params),
        shape_(shape),
        s_(shared),
        hidden_(static_cast<int>(params.hidden)),
        range_(static_cast<int>(blockIdx.x) % shape.ranges),
        column_(range_ * kDecodeRangeColumns + warp() * kDecodeChunk + lane() % 4 * 4),
        tile_(static_cast<int>(blockIdx.x) / shape.ranges) {}

  __device__ void Run() {
    AllowSuccessor();
    Gates gates;
    if (p_.output.y != nullptr) FetchGates(gates);
    LoadMixers();
    if constexpr (kGathers) number_ = ExchangeNumber(p_.gather.exchange);
    if (p_.output.y == nullptr) {  // its predecessor made the streams
      WaitForPredecessor();
      LoadStreams();
    } else {
      LoadStreams();
      KeepGates(gates);
      __syncthreads();
      WaitForPredecessor();
      Post();
    }
    Multiply();
    __syncthreads();
    WriteTileSums<kDecodePostThreads>(p_, shape_, tile_, range_, s_.sums);
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }
  __device__ int64_t Row(int token) const {
    return min(tile_ * int64_t{kPostTokens} + token, p_.num_tokens - 1);
  }
  // Of the thread's token i, 0 or 1.
  __device__ int64_t OwnRow(int i) const { return Row(lane() / 4 + i * 8); }
  __device__ bool IsReal(int i) const {
    return tile_ * int64_t{kPostTokens} + lane() / 4 + i * 8 < p_.num_tokens;
  }

  // Each value as the sum of three BF16 values, of which the last is in shared memory.
  __device__ void LoadMixers() {
    float4 values[kNumStreams][kMixTiles];
#pragma unroll
    for (int j = 0; j < kNumStreams; ++j) {
#pragma unroll
      for (int n = 0; n < kMixTiles; ++n) {
        const int row = (n * 8 + lane() / 4) * kNumStreams + j;
        values[j][n] = __ldg(reinterpret_cast<const float4*>(p_.fn + row * hidden_ + column_));
      }
    }
#pragma unroll
    for (int j = 0; j < kNumStreams; ++j) {
#pragma unroll
      for (int n = 0; n < kMixTiles; ++n) {
        float4 rest = values[j][n];
#pragma unroll
        for (int part = 0; part < kMixerParts; ++part) {
          const uint2 bits{PackBf16(rest.x, rest.y), PackBf16(rest.z, rest.w)};
          if (part < kMixerParts - 1) {
            mixers_[j][n][part] = bits;
          } else {
            s_.last[j][n][thread()] = bits;
          }
          const float2 low = UnpackBf16(bits.x), high = UnpackBf16(bits.y);
          rest = {rest.x - low.x, rest.y - low.y, rest.z - high.x, rest.w - high.y};
        }
      }
    }
  }
  __device__ __nv_bfloat16* Streams(int i, int j) const {
    return p_.streams + (OwnRow(i) * kNumStreams + j) * hidden_ + column_;
  }
  __device__ void LoadStreams() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < kNumStreams; ++j) {
        x_[i][j] = *reinterpret_cast<const uint2*>(Streams(i, j));
      }
    }
  }

  // What the boundary before left, and which rows are to be added up: a thread's part.
  struct Gates {
    float4 gate;
    int32_t pair;
  };
  static constexpr int kTokenGates = kNumStreams + 1;  // rows of C; post
  static_assert(kPostTokens * kTokenGates <= kDecodePostThreads);
  static_assert(kPostTokens * kMaxBoundaryPairs <= kDecodePostThreads);
  __device__ void FetchGates(Gates& own) const {
    const int64_t row = Row(thread() / kTokenGates % kPostTokens);
    const int i = thread() % kTokenGates;
    own.gate = *reinterpret_cast<const float4*>(
        i < kNumStreams ? p_.before.comb + (row * kNumStreams + i) * kNumStreams
                        : p_.before.post + row * kNumStreams);
    const int token = thread() / kMaxBoundaryPairs % kPostTokens,
              pair = thread() % kMaxBoundaryPairs;
    if (pair < p_.output.num_chosen) {
      own.pair = p_.output.pair_of[Row(token) * p_.output.num_chosen + pair];
    }
  }
  __device__ void KeepGates(const Gates& own) {
    if (thread() < kPostTokens * kTokenGates) (&s_.gates.comb[0][0])[thread()] = own.gate;
    if (thread() < kPostTokens * kMaxBoundaryPairs) (&s_.gates.pairs[0][0])[thread()] = own.pair;
  }

  // The output of the sub-layer in the thread's columns of token i.
  struct Outputs {
    uint2 own, pairs[kPairs > 0 ? kPairs : 1];
  };
  __device__ void LoadOutput(int i, Outputs& y) const {
    const __nv_bfloat16* from = p_.output.y + column_;
    y.own = *reinterpret_cast<const uint2*>(from + OwnRow(i) * hidden_);
    const int32_t* rows = s_.gates.pairs[lane() / 4 + i * 8];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      if (n >= p_.output.num_chosen) break;
      y.pairs[n] = *reinterpret_cast<const uint2*>(from + int64_t{rows[n]} * hidden_);
    }
  }
  __device__ static float4 Widen(uint2 bits) {
    const float2 low = UnpackBf16(bits.x), high = UnpackBf16(bits.y);
    return {low.x, low.y, high.x, high.y};
  }
  __device__ float4 Sum(const Outputs& y) const {
    const float4 own = Widen(y.own);
    if (kPairs == 0) return own;
    float4 sum{};
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      if (n >= p_.output.num_chosen) break;
      const float4 pair = Widen(y.pairs[n]);
      sum = {sum.x + pair.x, sum.y + pair.y, sum.z + pair.z, sum.w + pair.w};
    }
    return {RoundBf16(sum.x + own.x), RoundBf16(sum.y + own.y), RoundBf16(sum.z + own.z),
            RoundBf16(sum.w + own.w)};
  }
  // Of both tokens.
  __device__ void OwnOutput(float4 (&y)[2]) const {
    Outputs outputs[2];
    for (int i = 0; i < 2; ++i) LoadOutput(i, outputs[i]);
    for (int i = 0; i < 2; ++i) y[i] = Sum(outputs[i]);
  }
  __device__ int64_t Packet(int i) const { return (OwnRow(i) * hidden_ + column_) / 4; }
  __device__ void SendOutput(const float4 (&y)[2]) const {
    for (int i = 0; i < 2; ++i) {
      if (!IsReal(i)) continue;
      SendPacket(p_.gather.exchange.peers, number_, Packet(i),
                 {PackBf16(y[i].x, y[i].y), PackBf16(y[i].z, y[i].w)});
    }
  }
  __device__ void ReceiveOutput(int owner, float4 (&y)[2]) const {
    const PeerView& peers = p_.gather.exchange.peers;
    const uint4* from[2];
    for (int i = 0; i < 2; ++i) from[i] = PacketAt(peers, peers.rank, owner, number_, Packet(i));
    const uint2 tags = Tags(number_);
    Patience patience(peers, owner);
    uint4 packets[2];
    do {
      for (int i = 0; i < 2; ++i) packets[i] = LoadTogether(from[i]);
    } while (!(HasTags(packets[0], tags) && HasTags(packets[1], tags)) && patience.Wait());
    for (int i = 0; i < 2; ++i) y[i] = Widen({packets[i].x, packets[i].z});
  }
  // The block's columns are one rank's.
  __device__ void Output(float4 (&y)[2]) const {
    if constexpr (kGathers) {
      const int owner = p_.gather.columns.OwnerOf(range_ * kDecodeRangeColumns);
      if (owner != p_.gather.exchange.peers.rank) return ReceiveOutput(owner, y);
    }
    OwnOutput(y);
    if constexpr (kGathers) SendOutput(y);
  }
  // x_k = b(post_k y + sum_j C[j][k] x_j).
  __device__ void Post() {
    float4 outputs[2];
    Output(outputs);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 y = outputs[i];
      const float4* const gates = s_.gates.comb[lane() / 4 + i * 8];
      const float4 c[kNumStreams] = {gates[0], gates[1], gates[2], gates[3]},
                   post = gates[kNumStreams];
      float4 in[kNumStreams];
      for (int j = 0; j < kNumStreams; ++j) in[j] = Widen(x_[i][j]);
      const auto mix = [&](float own, float c0, float c1, float c2, float c3) {
        const auto of = [&](float out, float x0, float x1, float x2, float x3) {
          return own * out + (c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3);
        };
        return uint2{PackBf16(of(y.x, in[0].x, in[1].x, in[2].x, in[3].x),
                              of(y.y, in[0].y, in[1].y, in[2].y, in[3].y)),
                     PackBf16(of(y.z, in[0].z, in[1].z, in[2].z, in[3].z),
                              of(y.w, in[0].w, in[1].w, in[2].w, in[3].w))};
      };
      x_[i][0] = mix(post.x, c[0].x, c[1].x, c[2].x, c[3].x);
      x_[i][1] = mix(post.y, c[0].y, c[1].y, c[2].y, c[3].y);
      x_[i][2] = mix(post.z, c[0].z, c[1].z, c[2].z, c[3].z);
      x_[i][3] = mix(post.w, c[0].w, c[1].w, c[2].w, c[3].w);
      if (!IsReal(i)) continue;
      for (int j = 0; j < kNumStreams; ++j) *reinterpret_cast<uint2*>(Streams(i, j)) = x_[i][j];
    }
  }

  __device__ void Multiply() {
    float products[kMixTiles][4] = {};
    TileSums all;
#pragma unroll
    for (int j = 0; j < kNumStreams; ++j) {
      const uint32_t a[4] = {x_[0][j].x, x_[1][j].x, x_[0][j].y, x_[1][j].y};
#pragma unroll
      for (int n = 0; n < kMixTiles; ++n) {
        const uint2 last = s_.last[j][n][thread()];
        for (const uint2 part : mixers_[j][n]) WarpMultiply(products[n], a, part.x, part.y);
        WarpMultiply(products[n], a, last.x, last.y);
      }
      all.AddSquares(a);
    }
    all.Keep(products, s_.sums[warp()]);
  }

  const CudaHyperConnectionParams& p_;
  const PostMixShape& shape_;
  DecodePostShared& s_;
  const int hidden_, range_, column_, tile_;
  uint2 mixers_[kNumStreams][kMixTiles][kMixerParts - 1];
  uint2 x_[2][kNumStreams];
  uint64_t number_ = 0;  // of the exchange
};

template <int kPairs, bool kGathers>
__global__ void __launch_bounds__(kDecodePostThreads, 2)
    DecodePostKernel(const __grid_constant__ CudaHyperConnectionParams params,
                     const __grid_constant__ PostMixShape shape) {
  __shared__ DecodePostShared shared;
  DecodePost<kPairs, kGathers>(params, shape, shared).Run();
}

}  // namespace fathom::kernels
