// Four columns of a sub-layer's output, as a boundary's warps read them before they mix them into
// the streams: on one GPU, or of ranks, whose parts of it they send or await. Device code only.
#pragma once

#include "kernels/collective/packets.cuh"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"

namespace fathom::kernels {

__device__ inline float4 WidenQuad(uint2 bits) {
  const auto low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
  const auto high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}
__device__ inline uint2 LoadBits(const __nv_bfloat16* p) {
  return *reinterpret_cast<const uint2*>(p);
}
__device__ inline void StoreQuad(__nv_bfloat16* p, float4 v) {
  *reinterpret_cast<uint2*>(p) = {PackBf16(v.x, v.y), PackBf16(v.z, v.w)};
}
__device__ inline float4 RoundQuad(float4 v) {
  return {RoundBf16(v.x), RoundBf16(v.y), RoundBf16(v.z), RoundBf16(v.w)};
}
__device__ inline float4 operator*(float a, float4 v) {
  return {a * v.x, a * v.y, a * v.z, a * v.w};
}
__device__ inline float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ inline float Dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

// What each of several ranks has of the output.
enum class Ranks { kAll, kColumns, kSumsOf2, kSumsOf4, kRows };

template <Ranks kRanks>
class OutputQuads {
  static constexpr bool kAdds = kRanks == Ranks::kSumsOf2 || kRanks == Ranks::kSumsOf4;
  static constexpr int kParts = kRanks == Ranks::kSumsOf4 ? 4 : 2;  // of sums
  static constexpr int kLoadedPairs = 8;                            // on their way at once
  static constexpr int kAwaitedPairs = 6;  // likewise, of packets, which are twice as large

 public:
  // Whether all ranks' predecessors send what is awaited here.
  static constexpr bool kIsSent = kAdds || kRanks == Ranks::kRows;

  // A row of the exchange, whose token is the output's. rows: of the experts' outputs; kRows: the
  // packets where these begin. number: of the exchange.
  __device__ OutputQuads(const CudaHyperConnectionParams& params, int64_t row, int64_t token,
                         const int* rows, uint64_t number)
      : output_(params.output),
        gather_(params.gather),
        hidden_(static_cast<int>(params.hidden)),
        row_(row),
        token_(token),
        rows_(rows),
        number_(number) {}

  // `column` and the three after it.
  __device__ float4 operator()(int64_t column) const {
    return kAdds                       ? AddedOutput(column)
           : kRanks == Ranks::kRows    ? SentOutput(column)
           : kRanks == Ranks::kColumns ? GatheredOutput(column)
                                       : Output(column);
  }

 private:
  // Of one GPU, or of a rank's own columns: of experts, of which each has a row, their sum.
  __device__ float4 Output(int64_t column) const {
    const SublayerOutput& o = output_;
    const uint2 own = LoadBits(o.y + token_ * hidden_ + column);
    if (o.pair_of == nullptr) return WidenQuad(own);
    float4 sum{};
    for (int first = 0; first < o.num_chosen; first += kLoadedPairs) {
      uint2 pairs[kLoadedPairs] = {};
#pragma unroll
      for (int i = 0; i < kLoadedPairs; ++i) {
        if (first + i >= o.num_chosen) break;
        pairs[i] = LoadBits(o.y + int64_t{rows_[first + i]} * hidden_ + column);
      }
#pragma unroll
      for (const uint2 pair : pairs) sum = sum + WidenQuad(pair);
    }
    return RoundQuad(sum + WidenQuad(own));
  }

  // This rank's go to all others. Each is one thread's.
  __device__ float4 GatheredOutput(int64_t column) const {
    const PeerView& peers = gather_.exchange.peers;
    const int owner = gather_.columns.OwnerOf(column);
    const int64_t packet = (row_ * hidden_ + column) / 4;
    if (owner != peers.rank) return WidenQuad(ReceivePacket(peers, number_, packet, owner));
    const float4 y = Output(column);
    SendPacket(peers, number_, packet, {PackBf16(y.x, y.y), PackBf16(y.z, y.w)});
    return y;
  }

  // look(): of which rank something is missing still; -1: nothing.
  template <typename Look>
  __device__ void Await(Look look) const {
    constexpr int kLooks = 256;
    Patience patience(gather_.exchange.peers, 0);
    int looks = 0;
    for (int missing; (missing = look()) >= 0;) {
      // The predecessor may wait for another rank itself, which is then the one to be named.
      if (++looks == kLooks) WaitForPredecessor();
      if (looks > kLooks && !patience.Wait(missing)) return;
    }
  }

  // Of which all ranks' products send parts of the sums.
  __device__ float4 AddedOutput(int64_t column) const {
    const PeerView& peers = gather_.exchange.peers;
    const int64_t packet = SumPacket(row_, hidden_, column);
    const uint2 tags = Tags(number_);
    float4 parts[kParts];
    Await([&] {
      uint4 first[kParts], second[kParts];
#pragma unroll
      for (int r = 0; r < kParts; ++r) {
        const uint4* const at = PacketAt(peers, peers.rank, r, number_, packet);
        first[r] = LoadTogether(at);
        second[r] = LoadTogether(at + 32);
      }
      int missing = -1;
#pragma unroll
      for (int r = 0; r < kParts; ++r) {
        if (!HasTags(first[r], tags) || !HasTags(second[r], tags)) missing = r;
        parts[r] = {__uint_as_float(first[r].x), __uint_as_float(first[r].z),
                    __uint_as_float(second[r].x), __uint_as_float(second[r].z)};
      }
      return missing;
    });
    const float4 sum = parts[0] + parts[1];
    return RoundQuad(kParts == 2 ? sum : sum + (parts[kParts - 2] + parts[kParts - 1]));
  }

  // The only token's, of which one rank sends the experts' rows.
  __device__ float4 SentOutput(int64_t column) const {
    const PeerView& peers = gather_.exchange.peers;
    const int owner = gather_.columns.OwnerOf(column), num_chosen = output_.num_chosen;
    const uint4* const from = PacketAt(peers, peers.rank, owner, number_, column / 4);
    const uint2 tags = Tags(number_);
    uint2 own{};
    float4 sum{};
    for (int first = 0; first < num_chosen; first += kAwaitedPairs) {
      uint2 pairs[kAwaitedPairs];
      Await([&] {
        uint4 packets[kAwaitedPairs + 1];
        packets[kAwaitedPairs] = LoadTogether(from);
#pragma unroll
        for (int i = 0; i < kAwaitedPairs; ++i) {
          if (first + i < num_chosen) packets[i] = LoadTogether(from + rows_[first + i]);
        }
        bool all = HasTags(packets[kAwaitedPairs], tags);
        own = {packets[kAwaitedPairs].x, packets[kAwaitedPairs].z};
#pragma unroll
        for (int i = 0; i < kAwaitedPairs; ++i) {
          if (first + i >= num_chosen) break;
          all = all && HasTags(packets[i], tags);
          pairs[i] = {packets[i].x, packets[i].z};
        }
        return all ? -1 : owner;
      });
#pragma unroll
      for (int i = 0; i < kAwaitedPairs; ++i) {
        if (first + i < num_chosen) sum = sum + WidenQuad(pairs[i]);
      }
    }
    return RoundQuad(sum + WidenQuad(own));
  }

  const SublayerOutput& output_;
  const OutputExchange& gather_;
  const int hidden_;
  const int64_t row_, token_;
  const int* const rows_;
  const uint64_t number_;
};

}  // namespace fathom::kernels
