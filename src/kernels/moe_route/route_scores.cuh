// Scores that blocks of no one cluster tell each other: each carries the number of the launch
// beside it, so that whoever reads a pair of both knows that it has arrived: no counter, no fence.
// Device code only.
#pragma once

#include <cstdint>

#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

__device__ inline RouteBoard::Score* ScoreAt(const CudaMoeRouteParams& p, int token, int expert) {
  return &p.board->scores[token][expert];
}
__device__ inline void SendScore(RouteBoard::Score* to, float score, uint32_t number) {
  StoreTogether(to, __float_as_uint(score), number);
}

// By a warp, before it waits: a token's lines, which weights have driven out of the L2 cache by
// now.
__device__ inline void FetchScores(const CudaMoeRouteParams& p, int token) {
  constexpr int kOfLine = 128 / sizeof(RouteBoard::Score);
  for (int e = static_cast<int>(threadIdx.x) % 32 * kOfLine; e < p.num_experts; e += 32 * kOfLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(ScoreAt(p, token, e)));
  }
}
// Those of a token: a lane has the scores of experts l, l + 32, ….
template <int kLane>
__device__ void AwaitScores(const CudaMoeRouteParams& p, int token, uint32_t number,
                            float (&scores)[kLane]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  bool all;
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const int e = i * 32 + lane;
      if (e >= p.num_experts) continue;
      const uint2 word = LoadTogether(reinterpret_cast<const uint2*>(ScoreAt(p, token, e)));
      scores[i] = __uint_as_float(word.x);
      all &= word.y == number;
    }
  } while (!all);
}

}  // namespace fathom::kernels
