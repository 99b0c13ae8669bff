// How a warp chooses a token's experts of their scores and weighs them (moe_route.h). A lane has
// those of experts l, l + 32, …; kLane: how many. Device code only, for all steps of routing.
#pragma once

#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/ordered.cuh"

namespace fathom::kernels {

// The number of a launch for up to kDirectTokens tokens. Never 0, which words hold that nobody has
// written; odd and even in turn.
__device__ inline uint32_t NextLaunch(const RouteBoard& board) {
  const uint32_t next = *static_cast<volatile const uint32_t*>(&board.launches) + 1;
  return next != 0 ? next : 2;
}

__device__ inline float Softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Of values [kFirst, kFirst + kCount): few of the steps wait for each other.
template <int kFirst, int kCount, int kAll, typename Join>
__device__ __forceinline__ uint32_t Fold(const uint32_t (&values)[kAll], Join join) {
  if constexpr (kCount == 1)
    return values[kFirst];
  else
    return join(Fold<kFirst, kCount / 2>(values, join),
                Fold<kFirst + kCount / 2, kCount - kCount / 2>(values, join));
}

// The k best of a warp's scores, lane n the n-th best one's id; ties: the lower id. Lane l has
// those of experts l, l + 32, …; 0: none.
template <int kLane>
__device__ int ChooseBest(uint32_t (&scores)[kLane], int k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int chosen = 0;
#pragma unroll 1
  for (int n = 0; n < k; ++n) {
    const uint32_t highest = __reduce_max_sync(
        0xffffffffu, Fold<0, kLane>(scores, [](uint32_t a, uint32_t b) { return max(a, b); }));
    uint32_t ids[kLane];
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      ids[i] = scores[i] == highest ? static_cast<uint32_t>(i * 32 + lane) : 0xffffffffu;
    }
    const uint32_t id = __reduce_min_sync(
        0xffffffffu, Fold<0, kLane>(ids, [](uint32_t a, uint32_t b) { return min(a, b); }));
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      if (id == static_cast<uint32_t>(i * 32 + lane)) scores[i] = 0;
    }
    if (lane == n) chosen = static_cast<int>(id);
  }
  return chosen;
}

struct RouteScratch {
  float s[kMaxExperts];
  // In the order of the experts: what is written to expert_ids and weights.
  int chosen[kMaxChosen];
  float weights[kMaxChosen];
};

// A lane's biases of experts l, l + 32, …; none: 0.
template <int kLane>
struct LaneBias {
  __device__ LaneBias(const float* bias, int num_experts) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const int e = i * 32 + lane;
      of[i] = bias != nullptr && e < num_experts ? bias[e] : 0.0f;
    }
  }
  float of[kLane];
};

__device__ inline float ExpertScore(float logit) { return sqrtf(Softplus(logit)); }

// By a warp; score[i]: of expert i * 32 + lane.
template <int kLane>
__device__ void KeepScores(const CudaMoeRouteParams& p, const float (&score)[kLane],
                           RouteScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    if (i * 32 + lane < p.num_experts) scratch.s[i * 32 + lane] = score[i];
  }
  __syncwarp();
}

// Likewise: those of token t to where they are wanted, if they are.
__device__ inline void WriteScores(const CudaMoeRouteParams& p, int64_t t,
                                   const RouteScratch& scratch) {
  if (p.scores == nullptr) return;
  for (int e = static_cast<int>(threadIdx.x) % 32; e < p.num_experts; e += 32) {
    p.scores[t * p.num_experts + e] = scratch.s[e];
  }
}

// By a warp: a token's experts, lane n the n-th best one.
template <int kLane>
__device__ int ChooseExperts(const CudaMoeRouteParams& p, const LaneBias<kLane>& bias,
                             const float (&score)[kLane]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t biased[kLane] = {};
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    if (i * 32 + lane < p.num_experts) biased[i] = OrderedKey(score[i] + bias.of[i]);
  }
  return ChooseBest(biased, p.num_chosen);
}
// Likewise those of token t that a table has.
__device__ inline int TableExpert(const CudaMoeRouteParams& p, int64_t t) {
  const int lane = static_cast<int>(threadIdx.x) % 32, k = p.num_chosen;
  return lane < k ? p.tid2eid[int64_t{p.token_ids[t]} * k + lane] : 0;
}

// Then writes expert_ids and weights of token t; id: of the lane's expert. Returns its place among
// them.
__device__ inline int WeighExperts(const CudaMoeRouteParams& p, int64_t t, int id,
                                   RouteScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, k = p.num_chosen;
  const float own = scratch.s[id];
  float sum = 0;
  int place = 0;
#pragma unroll 1
  for (int i = 0; i < k; ++i) {
    sum += __shfl_sync(0xffffffffu, own, i);
    const int other = __shfl_sync(0xffffffffu, id, i);
    place += other < id || (other == id && i < lane) ? 1 : 0;
  }
  if (lane >= k) return 0;
  const float weight = own / sum * p.scaling;
  scratch.chosen[place] = p.expert_ids[t * k + place] = id;
  scratch.weights[place] = p.weights[t * k + place] = weight;
  return place;
}

}  // namespace fathom::kernels
