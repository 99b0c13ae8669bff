// The gate's product by the blocks that route the tokens of a decode: a block has rows of the gate
// in shared memory before the activations are there, multiplies them with what it reads of all
// tokens, and in the end has the sums of a few experts, a part for each warp that had some of the
// columns. With kColumns a cluster has the rows of 16 times as many experts, whose columns its
// blocks share, so that none reads all of the activations: sums go to the blocks whose experts they
// are. Device code only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kGateThreads = 512;

// kGroups: of eight tokens, of a warp; kTeams: of warps, each with tokens of its own; kExperts:
// whose sums a block has in the end.
template <int kGroups, int kTeams, int kExperts, bool kColumns>
class GateProduct {
  static constexpr int kWarps = kGateThreads / 32;
  static constexpr int kClusterExperts = kColumns ? kMaxCluster * kExperts : kExperts;
  static constexpr int kRows = kColumns ? 16 : kExperts;  // that a warp multiplies
  // Warps that have the same rows, and of these the ones that share the columns.
  static constexpr int kRowWarps = kColumns ? kWarps * kRows / kClusterExperts : kWarps;
  static constexpr int kColumnWarps = kRowWarps / kTeams;
  static constexpr int kParts = kColumns ? kMaxCluster * kColumnWarps : kWarps;  // of a sum
  static_assert(kTeams == 1 || kColumnWarps == 1);

  static constexpr int kLoadedBlocks = 8 / kGroups < 4 ? 8 / kGroups : 4;  // of 64 columns, at once
  // Of a token and an expert, of products that do not wait for each other.
  static constexpr int kSums = kGroups == 1 ? 4 : 2;
  static constexpr int kTileBytes64 = 64 * 128;    // of 64 columns of the gate
  static constexpr int kEightRowsBytes = 8 * 128;  // which lie together
  static constexpr int kBlockBytes = kClusterExperts / 8 * kEightRowsBytes;

 public:
  static constexpr int kOwnExperts = kClusterExperts;  // of a block that shares nothing, or cluster
  static constexpr int kTokens = kTeams * kGroups * 8;

  struct Shared {
    float sums[kParts][kTokens][kExperts];
    uint64_t gate_full, sums_full;
  };

  // Blocks of 64 columns that a block has.
  __host__ __device__ static int ColumnBlocks(int64_t hidden) {
    return static_cast<int>(hidden) / (kColumns ? 64 * kMaxCluster : 64);
  }
  // Of the rows.
  __host__ __device__ static int GateBytes(int64_t hidden) {
    return ColumnBlocks(hidden) * kBlockBytes;
  }

  __device__ GateProduct(const CudaMoeRouteParams& params, std::byte* gate, Shared& shared)
      : p_(params),
        gate_(gate),
        s_(shared),
        first_(static_cast<int>(blockIdx.x) * kExperts),
        blocks_(ColumnBlocks(params.hidden)),
        block0_(kColumns ? static_cast<int>(ClusterRank()) * blocks_ : 0),
        stride_(static_cast<int>(params.h.row_groups) * kTileBytes),
        tokens_(static_cast<int>(params.num_tokens)) {}

  // By one thread, before any other that uses this; the caller makes barriers visible.
  __device__ void InitBarriers() {
    BarrierInit(&s_.gate_full, 1);
    BarrierInit(&s_.sums_full, 1);
  }
  __device__ void ExpectBytes() {
    BarrierExpectBytes(&s_.gate_full, static_cast<uint32_t>(blocks_ * kBlockBytes));
    BarrierExpectBytes(&s_.sums_full, static_cast<uint32_t>(kParts * tokens_ * kExperts * 4));
  }

  // By one warp. Eight rows of a tile of 64 lie together.
  __device__ void FetchGate() {
    if constexpr (kColumns) {
      const int all = static_cast<int>(p_.hidden) / 64, tiles = kClusterExperts / 64 * blocks_;
      const int row_tile = first_ / kClusterExperts * (kClusterExperts / 64);
      for (int i = lane(); i < tiles; i += 32) {
        const int tile = (row_tile + i / blocks_) * all + block0_ + i % blocks_;
        BulkCopyOnce(gate_ + i * kTileBytes64, p_.gate.tiles + int64_t{tile} * kTileBytes64,
                     kTileBytes64, &s_.gate_full);
      }
      return;
    }
    const std::byte* from =
        p_.gate.tiles + int64_t{first_ / 64 * blocks_} * kTileBytes64 + first_ % 64 * 128;
    for (int i = lane(); i < blocks_; i += 32) {
      BulkCopyOnce(gate_ + i * kBlockBytes, from + i * int64_t{kTileBytes64}, kBlockBytes,
                   &s_.gate_full);
    }
  }

  // Where a thread's token of each group begins; past the last token: that one.
  __device__ void FindTokens() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int token = min((team() * kGroups + g) * 8 + lane() / 4, tokens_ - 1);
      token_[g] = token / 8 * kTileBytes + Chunk(token % 8);
      other_[g] = OtherChunk(token % 8);
      asm volatile("" : "+r"(token_[g]), "+r"(other_[g]));  // before the wait, not when needed
    }
  }

  // A thread's two pieces of eight experts' rows each, of each block on its way. With more groups
  // of tokens there is no room for them in registers before they are needed.
  static constexpr bool kGateAhead = kGroups == 1;
  using Gate = uint4[kGateAhead ? kLoadedBlocks : 1][2][kRows / 8];

  // What Run takes, as soon as it is there.
  __device__ void Begin(Gate& gate) {
    if constexpr (kGateAhead) TakeGate(FirstBlock(), gate);
  }

  // Each warp multiplies some blocks of 64 columns, of which a thread has the same columns of h and
  // of the gate, so their order does not matter.
  __device__ void Run(Gate& gate) {
    float sums[kGroups][kSums][4] = {};
#pragma unroll 1
    for (int block = FirstBlock(); block < blocks_; block += kLoadedBlocks * kColumnWarps) {
      if (kGateAhead && block != FirstBlock()) TakeGate(block, gate);
      Multiply(block, gate, sums);
    }
    KeepSums(sums);
    if constexpr (!kColumns) __syncthreads();
  }

  // Of token t and the block's expert e, when all parts are there.
  __device__ float Logit(int t, int e) {
    if constexpr (kColumns) BarrierWaitCluster(&s_.sums_full, 0);
    float logit = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) logit += s_.sums[i][t][e];
    return logit;
  }

 private:
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int team() { return kTeams == 1 ? 0 : warp() % kRowWarps; }
  // A row's columns are eight chunks of eight, of which a thread has two: where the first one is,
  // and how far from it the other.
  __device__ static int Chunk(int row) { return row * 128 + (lane() % 4 ^ row) * 16; }
  __device__ static int OtherChunk(int row) { return (row & 4) == 0 ? 64 : -64; }

  // A warp's rows, and the first of its blocks of 64 columns; from one to the next kColumnWarps.
  __device__ static int OwnRows() { return warp() / kRowWarps * kRows; }
  __device__ static int FirstBlock() { return kTeams == 1 ? warp() % kRowWarps : 0; }
  // The rows in such a block.
  __device__ const std::byte* GateRows(int block) const {
    if (!kColumns) return gate_ + block * kBlockBytes;
    return gate_ + (OwnRows() / 64 * blocks_ + block) * kTileBytes64 + OwnRows() % 64 * 128;
  }

  // `first` and what follows it.
  __device__ void TakeGate(int first, Gate& gate) {
    BarrierWait(&s_.gate_full, 0);
#pragma unroll
    for (int i = 0; i < static_cast<int>(std::size(gate)); ++i) {
      const std::byte* const block =
          GateRows(min(first + i * kColumnWarps, blocks_ - 1)) + Chunk(lane() / 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int eight = 0; eight < kRows / 8; ++eight) {
          gate[i][half][eight] = *reinterpret_cast<const uint4*>(
              block + half * OtherChunk(lane() / 4) + eight * kEightRowsBytes);
        }
      }
    }
  }

  __device__ void Multiply(int first, Gate& gate, float (&sums)[kGroups][kSums][4]) {
    const auto* const h = reinterpret_cast<const std::byte*>(p_.h.values);
    uint4 x[kLoadedBlocks][kGroups][2];
#pragma unroll
    for (int i = 0; i < kLoadedBlocks; ++i) {
      const int block = (block0_ + min(first + i * kColumnWarps, blocks_ - 1)) * stride_;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const std::byte* const from = h + (block + token_[g]);
        x[i][g][0] = *reinterpret_cast<const uint4*>(from);
        x[i][g][1] = *reinterpret_cast<const uint4*>(from + other_[g]);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoadedBlocks; ++i) {
      const int block = first + i * kColumnWarps;
      if (block >= blocks_) break;
      if constexpr (!kGateAhead) TakeGate(block, gate);
      const auto& own = gate[kGateAhead ? i : 0];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 low = own[half][0], high = kRows == 8 ? uint4{} : own[half][kRows / 8 - 1];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const uint4& b = x[i][g][half];
          auto& sum = sums[g][i % kSums];
          WarpMultiply(sum, {low.x, high.x, low.y, high.y}, b.x, b.y);
          WarpMultiply(sum, {low.z, high.z, low.w, high.w}, b.z, b.w);
        }
      }
    }
  }

  __device__ void KeepSums(const float (&sums)[kGroups][kSums][4]) {
    const int part =
        kColumns ? static_cast<int>(ClusterRank()) * kColumnWarps + FirstBlock() : warp();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const int t = (team() * kGroups + g) * 8 + lane() % 4 * 2 + i % 2;
        const int e = lane() / 4 + i / 2 * 8;
        if (t >= tokens_) continue;
        float sum = sums[g][0][i] + sums[g][1][i];
        if constexpr (kSums == 4) sum += sums[g][2][i] + sums[g][3][i];
        if constexpr (kColumns) {
          SendToBlock(&s_.sums[part][t][e % kExperts], sum, &s_.sums_full,
                      static_cast<uint32_t>((OwnRows() + e) / kExperts));
        } else {
          s_.sums[part][t][e] = sum;
        }
      }
    }
  }

  const CudaMoeRouteParams& p_;
  std::byte* const gate_;
  Shared& s_;
  const int first_;            // expert
  const int blocks_, block0_;  // of 64 columns; the first one
  const int stride_, tokens_;
  int token_[kGroups], other_[kGroups];
};

}  // namespace fathom::kernels
