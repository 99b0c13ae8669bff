// Routing of a decode of more than kDirectTokens tokens, up to kBatchTokens, behind the gate's
// product and before the activations are gathered: a cluster, whose blocks choose the experts of
// some of the tokens, tell each other, and so all know the plan. Device code only.
#pragma once

#include <cstdint>

#include "kernels/grouped_gemm/expert_plan.h"
#include "kernels/launch.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/moe_route/route_choice.cuh"
#include "kernels/sm90.cuh"
#include "kernels/warp_sums.cuh"

namespace fathom::kernels {

inline constexpr int kBatchTokens = 64;
inline constexpr int kBatchBlocks = 8, kBatchThreads = kMaxExperts;

// kLane: experts of a lane. A block routes every kBatchBlocks-th token, a warp a token.
template <int kLane>
class BatchRoute {
  static constexpr int kWarps = kBatchThreads / 32;
  static constexpr int kBlockTokens = kBatchTokens / kBatchBlocks;  // at most
  static constexpr int kGroupRows = 8;
  static_assert(kBlockTokens <= kWarps && ExpertTileRows(kBatchTokens) == kGroupRows);

 public:
  struct Shared {
    RouteScratch scratch[kBlockTokens];
    float ids[kBatchTokens][kMaxChosen];  // integers, of all tokens; -1: padding
    // Of an expert, a bit each: one that a table names twice for a token has one row for both
    // pairs, whose weights are alike.
    uint64_t tokens[kMaxExperts];
    int first_row[kMaxExperts];
    int groups[kWarps];  // of a warp's experts
    uint64_t ids_full;
  };

  __device__ BatchRoute(const CudaMoeRouteParams& params, Shared& shared)
      : p_(params),
        s_(shared),
        rank_(static_cast<int>(blockIdx.x)),
        tokens_(static_cast<int>(params.num_tokens)),
        token_(warp() * kBatchBlocks + rank_) {}

  __device__ void Run() {
    if (thread() == 0) {
      BarrierInit(&s_.ids_full, 1);
      BarrierInitFence();
      BarrierExpectBytes(&s_.ids_full, static_cast<uint32_t>(tokens_ * p_.num_chosen * 4));
    }
    s_.tokens[thread()] = 0;
    const bool routes = warp() < kBlockTokens && token_ < tokens_;
    const bool is_padding = routes && p_.token_seq[token_] < 0;
    const LaneBias<kLane> bias(routes ? p_.bias : nullptr, p_.num_experts);
    __syncthreads();
    ClusterArrive();
    ClusterWait();  // the barriers of all blocks are ready
    WaitForPredecessor();
    AllowSuccessor();
    if (routes) Route(bias, is_padding);
    BarrierWaitCluster(&s_.ids_full, 0);
    TakeIds();
    __syncthreads();
    PlaceExperts();
    __syncthreads();
    if (routes) WritePairs();
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }
  __device__ int Id(int token, int i) const { return __float_as_int(s_.ids[token][i]); }

  __device__ void Route(const LaneBias<kLane>& bias, bool is_padding) {
    RouteScratch& scratch = s_.scratch[warp()];
    float scores[kLane] = {};
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const int e = i * 32 + lane();
      if (e < p_.num_experts) scores[i] = p_.scores[int64_t{token_} * p_.num_experts + e];
    }
#pragma unroll
    for (float& score : scores) score = ExpertScore(score);
    KeepScores(p_, scores, scratch);
    const int id =
        p_.tid2eid != nullptr ? TableExpert(p_, token_) : ChooseExperts(p_, bias, scores);
    WeighExperts(p_, token_, id, scratch);
    __syncwarp();
    if (lane() >= kBatchBlocks) return;  // a lane for each block
    for (int i = 0; i < p_.num_chosen; ++i) {
      const int told = is_padding ? -1 : scratch.chosen[i];
      SendToBlock(&s_.ids[token_][i], __int_as_float(told), &s_.ids_full,
                  static_cast<uint32_t>(lane()));
    }
  }

  __device__ void TakeIds() {
    for (int pair = thread(); pair < tokens_ * p_.num_chosen; pair += kBatchThreads) {
      const int token = pair / p_.num_chosen, id = Id(token, pair % p_.num_chosen);
      if (id < 0) continue;
      atomicOr(reinterpret_cast<unsigned long long*>(s_.tokens + id), 1ull << token);
    }
  }

  // An expert a thread: its pairs' rows, whole groups of eight, which are the plan's tiles.
  __device__ void PlaceExperts() {
    const int n = __popcll(s_.tokens[thread()]), groups = (n + kGroupRows - 1) / kGroupRows;
    int all;
    int first = WarpExclusiveSum(groups, all);
    if (lane() == 0) s_.groups[warp()] = all;
    __syncthreads();
    int tiles = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp()) first += s_.groups[w];
      tiles += s_.groups[w];
    }
    const int group = (tokens_ + 63) / 64 * 8 + first;  // behind SharedPairRows
    s_.first_row[thread()] = group * kGroupRows;
    if (rank_ == 0) {
      for (int i = 0; i < groups; ++i) {
        p_.plan.tiles[first + i] = {thread(), group + i, group + i,
                                    min(kGroupRows, n - i * kGroupRows)};
      }
      if (thread() == 0) *p_.plan.num_tiles = tiles;
    }
    if (rank_ == 1) {
      const int count = 1 + NumSharedTiles(p_.num_tokens) + tiles;
      for (int i = thread(); i < count; i += kBatchThreads) p_.plan.progress[i] = 0;
    }
  }

  __device__ void WritePairs() const {
    if (lane() >= p_.num_chosen) return;
    const int id = Id(token_, lane());
    const uint64_t before = (uint64_t{1} << token_) - 1;
    p_.plan.pair_of[token_ * p_.num_chosen + lane()] =
        id < 0 ? 0 : s_.first_row[id] + __popcll(s_.tokens[id] & before);
  }

  const CudaMoeRouteParams& p_;
  Shared& s_;
  const int rank_, tokens_;
  const int token_;  // the warp's
};

template <int kLane>
__global__ void __launch_bounds__(kBatchThreads)
    RouteBatchKernel(const __grid_constant__ CudaMoeRouteParams params) {
  __shared__ typename BatchRoute<kLane>::Shared shared;
  BatchRoute<kLane>(params, shared).Run();
}

}  // namespace fathom::kernels
