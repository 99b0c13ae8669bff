// What the two kernels of boundary_large.h that end a sub-layer and multiply with the mixers share:
// a tile of 16 tokens on the tensor cores, of which a thread has tokens g and g + 8 (g = lane / 4),
// and its sums. Device code only.
#pragma once

#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/mma.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kPostTokens = 16;  // a tile
inline constexpr int kMixerParts = 3;   // BF16 values, whose sum a mixer's value is
inline constexpr int kMixTiles = kNumMixes / 8;
inline constexpr int kPostSums = kMixTiles * 4 + 2;  // of a thread; the last: its tokens' squares
inline constexpr int kSumStride = 32;                // floats of a token's sums of a range

// How the work is shared. Block i has range i % ranges and some of the tiles.
struct PostMixShape {
  int ranges = 0;  // of the columns
  int groups = 0;  // blocks of a range
  int tiles = 0;
  bool is_decode = false;  // a block has one tile, in a range of kDecodeRangeColumns
};

// What a post needs to know of a tile's tokens.
struct TileGates {
  float4 comb[kPostTokens][kNumStreams + 1];  // rows of C; post
  alignas(16) int32_t pairs[kPostTokens][kMaxBoundaryPairs];
};

// Sums of some columns.
class TileSums {
 public:
  // Of a stream; a: the tensor core's operand.
  __device__ void AddSquares(const uint32_t (&a)[4]) {
    WarpMultiply(squares_[0], a, a[0], a[2]);
    WarpMultiply(squares_[1], a, a[1], a[3]);
  }
  __device__ void Keep(const float (&products)[kMixTiles][4], float (&sums)[kPostSums][32]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < kMixTiles; ++n) {
      for (int i = 0; i < 4; ++i) sums[n * 4 + i][lane] = products[n][i];
    }
    // A token times all tokens: its own is on the diagonal, where g = 2 (lane % 4) or one more.
    const bool odd = lane / 4 % 2 != 0;
    sums[kMixTiles * 4][lane] = odd ? squares_[0][1] : squares_[0][0];
    sums[kMixTiles * 4 + 1][lane] = odd ? squares_[1][3] : squares_[1][2];
  }

 private:
  float squares_[2][4] = {};
};

// The warps' sums of a tile, added up in order by kThreads threads, to the scratch.
template <int kThreads, int kWarps>
__device__ void WriteTileSums(const CudaHyperConnectionParams& p, const PostMixShape& shape,
                              int tile, int range, const float (&sums)[kWarps][kPostSums][32]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, quad = lane % 4;
  for (int at = static_cast<int>(threadIdx.x) % kThreads; at < kPostSums * 32; at += kThreads) {
    const int i = at / 32;
    const bool is_square = i >= kMixTiles * 4;
    const int token = lane / 4 + (is_square ? i - kMixTiles * 4 : i % 4 / 2) * 8;
    const int mix = is_square ? kNumMixes : i / 4 * 8 + quad * 2 + i % 2;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][i][lane];
    const int64_t t = tile * int64_t{kPostTokens} + token;
    if (t >= p.num_tokens || (is_square && quad != lane / 8)) continue;
    p.scratch[(t * shape.ranges + range) * kSumStride + mix] = sum;
  }
}

}  // namespace fathom::kernels
