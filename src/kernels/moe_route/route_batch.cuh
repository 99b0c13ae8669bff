// Routing of a decode of more than kDirectTokens tokens, up to kWordTokens, in one launch. Clusters
// have 128 experts each, whose columns of the gate their blocks share (gate_product.cuh); scores
// carry the number of the launch and go to the first cluster, a warp of which chooses the experts
// of a token. It tells all of the cluster's blocks, so each knows the plan and tells some of its
// tiles; nothing is gathered. Device code only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/launch.cuh"
#include "kernels/moe_route/gate_product.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/moe_route/route_choice.cuh"
#include "kernels/moe_route/route_scores.cuh"
#include "kernels/sm90.cuh"
#include "kernels/warp_sums.cuh"

namespace fathom::kernels {

// kGroups: of eight tokens, of a warp; kTeams: of warps, with tokens of their own; kLane: experts
// of a lane. Warp w of the cluster's block b chooses for token w * kMaxCluster + b.
template <int kGroups, int kTeams, int kLane>
class BatchRoute {
 public:
  static constexpr int kExperts = 8;  // whose scores a block has
  using Product = GateProduct<kGroups, kTeams, kExperts, /*kColumns=*/true>;

 private:
  static constexpr int kWarps = kGateThreads / 32;
  static constexpr int kTileTokens = 8;
  static constexpr int kTokens = Product::kTokens;            // at most
  static constexpr int kBlockTokens = kTokens / kMaxCluster;  // that a block chooses for
  static constexpr int kWords = (kTokens + 31) / 32;
  static constexpr int kClears = 1;  // the block that does it
  // A thread an expert, and a warp of them a block; a thread a score.
  static_assert(kMaxExperts == kGateThreads && kWarps == kMaxCluster);
  static_assert(kTokens * kExperts <= kGateThreads);
  static_assert(kLane * 32 <= kMaxExperts && ExpertTileRows(kWordTokens) == kTileTokens);

 public:
  struct Shared {
    Product::Shared product;
    RouteScratch scratch[kBlockTokens];
    // Of an expert, a bit each: one that a table names twice for a token has one row for both
    // pairs, whose weights are alike.
    uint32_t tokens[kWords][kMaxExperts];
    int first_tile[kMaxExperts];
    int tiles[kWarps];                      // of a warp's experts
    float bias[kBlockTokens][kMaxExperts];  // a copy a warp, of which each lane reads its own
    uint64_t tokens_full;
  };
  // The gate's rows, and Shared behind them.
  static size_t SharedBytes(int64_t hidden) {
    return static_cast<size_t>(Product::GateBytes(hidden)) + sizeof(Shared);
  }

  __device__ BatchRoute(const CudaMoeRouteParams& params, std::byte* memory)
      : p_(params),
        s_(*reinterpret_cast<Shared*>(memory + Product::GateBytes(params.hidden))),
        product_(params, memory, s_.product),
        rank_(static_cast<int>(blockIdx.x)),
        tokens_(static_cast<int>(params.num_tokens)),
        token_(warp() * kMaxCluster + rank_),
        number_(NextLaunch(*params.board)) {}

  __device__ void Run() {
    if (thread() == 0) InitBarriers();
#pragma unroll
    for (int i = 0; i < kWords; ++i) s_.tokens[i][thread()] = 0;
    __syncthreads();
    ClusterPublish();
    if (warp() == 0) product_.FetchGate();
    product_.FindTokens();
    const bool plans = rank_ < kMaxCluster,
               chooses = plans && warp() < kBlockTokens && token_ < tokens_;
    const bool is_padding = chooses && p_.token_seq[token_] < 0;
    const int named = chooses && p_.tid2eid != nullptr ? TableExpert(p_, token_) : 0;
    if (chooses) {
      FetchScores(p_, token_);
      KeepBias();
    }
    const bool tells_launch = rank_ == 0 && warp() == kWarps - 1;
    if (tells_launch && lane() == 0) {
      p_.plan.board->launch = number_;
      __threadfence();
    }
    typename Product::Gate gate;
    product_.Begin(gate);
    ClusterWait();  // who is sent to has started
    WaitForPredecessor();
    // The plan's number is there before a block of the successor is.
    if (rank_ != 0 || tells_launch) AllowSuccessor();
    product_.Run(gate);
    SendScores();
    if (!plans) return;
    if (rank_ == kClears) ClearProgress();
    if (chooses) Choose(named, is_padding);
    BarrierWaitCluster(&s_.tokens_full, 0);
    PlaceTiles();
    if (warp() == rank_) TellTiles();
    if (chooses) WritePairs(is_padding);
    if (thread() == 0 && rank_ == 0) p_.board->launches = number_;
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }

  __device__ void InitBarriers() {
    product_.InitBarriers();
    BarrierInit(&s_.tokens_full, 1);
    BarrierInitFence();
    product_.ExpectBytes();
    BarrierExpectBytes(&s_.tokens_full, static_cast<uint32_t>(tokens_ * p_.num_chosen * 4));
  }

  __device__ void SendScores() {
    const int t = thread() / kExperts, e = thread() % kExperts;
    if (t >= tokens_) return;
    SendScore(ScoreAt(p_, t, rank_ * kExperts + e), ExpertScore(product_.Logit(t, e)), number_);
  }

  __device__ void ClearProgress() const {
    const auto count = static_cast<int>(NumProgress(tokens_, p_.num_experts, p_.num_chosen));
#pragma unroll 1
    for (int i = thread(); i < count; i += kGateThreads) p_.plan.progress[i] = 0;
  }

  __device__ void KeepBias() {
    const LaneBias<kLane> bias(p_.bias, p_.num_experts);
#pragma unroll
    for (int i = 0; i < kLane; ++i) s_.bias[warp()][i * 32 + lane()] = bias.of[i];
  }

  // By a warp, for its token; named: a lane's expert, where a table has them.
  __device__ void Choose(int named, bool is_padding) {
    RouteScratch& scratch = s_.scratch[warp()];
    float scores[kLane] = {};
    AwaitScores(p_, token_, number_, scores);
    KeepScores(p_, scores, scratch);
    const int id =
        p_.tid2eid != nullptr
            ? named
            : ChooseExperts(p_, LaneBias<kLane>(s_.bias[warp()], p_.num_experts), scores);
    TellToken(id, is_padding);
    WeighExperts(p_, token_, id, scratch);
    WriteScores(p_, token_, scratch);
  }
  // All blocks, a lane each, that the token has the lanes' experts.
  __device__ void TellToken(int id, bool is_padding) {
    const uint32_t bit = is_padding ? 0 : 1u << token_ % 32;
#pragma unroll 1
    for (int i = 0; i < p_.num_chosen; ++i) {
      const int expert = __shfl_sync(0xffffffffu, id, i);
      if (lane() >= kMaxCluster) continue;
      OrInBlock(&s_.tokens[token_ / 32][expert], bit, &s_.tokens_full,
                static_cast<uint32_t>(lane()));
    }
  }

  __device__ int NumTokens(int expert) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) count += __popc(s_.tokens[i][expert]);
    return count;
  }

  // An expert a thread.
  __device__ void PlaceTiles() {
    const int tiles = (NumTokens(thread()) + kTileTokens - 1) / kTileTokens;
    int all;
    int first = WarpExclusiveSum(tiles, all);
    if (lane() == 0) s_.tiles[warp()] = all;
    __syncthreads();
    int count = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp()) first += s_.tiles[w];
      count += s_.tiles[w];
    }
    if (rank_ == 0 && thread() == 0) {
      SendWord(&p_.plan.board->num_tiles, static_cast<uint32_t>(count), number_);
    }
    s_.first_tile[thread()] = first;
    __syncthreads();
  }

  // By a warp, those of its experts, one a lane.
  __device__ void TellTiles() const {
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = s_.tokens[i][thread()];
    PlanBoard::Tile* tile = p_.plan.board->more_tiles + s_.first_tile[thread()];
    const auto next = [&] {  // token, whose bit goes
      const int word = kWords == 1 || words[0] != 0 ? 0 : kWords - 1;
      const int bit = __ffs(static_cast<int>(words[word])) - 1;
      words[word] &= words[word] - 1;
      return word * 32 + bit;
    };
#pragma unroll 1
    for (int left = NumTokens(thread()); left > 0; left -= kTileTokens) {
      const int count = min(left, kTileTokens);
      NamedTile named;
      named.Begin(thread(), count);
#pragma unroll 1
      for (int i = 0; i < count; ++i) named.Set(i, next());
      SendTile(tile++, named, number_);
    }
  }

  // Of the warp's token. A tile is a group of eight rows, behind SharedPairRows.
  __device__ void WritePairs(bool is_padding) const {
    if (lane() >= p_.num_chosen) return;
    const RouteScratch& scratch = s_.scratch[warp()];
    const int id = scratch.chosen[lane()];
    int row = 0;
    if (!is_padding) {
      int before = 0;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int own = token_ - i * 32;
        const uint32_t mask = own <= 0 ? 0 : own < 32 ? (1u << own) - 1 : 0xffffffffu;
        before += __popc(s_.tokens[i][id] & mask);
      }
      row = static_cast<int>(SharedPairRows(tokens_)) + s_.first_tile[id] * kTileTokens + before;
      p_.plan.pair_weight[row] = scratch.weights[lane()];
    }
    p_.plan.pair_of[token_ * p_.num_chosen + lane()] = row;
  }

  const CudaMoeRouteParams& p_;
  Shared& s_;
  Product product_;
  const int rank_, tokens_;
  const int token_;  // the warp's
  const uint32_t number_;
};

template <int kGroups, int kTeams, int kLane>
__global__ void __launch_bounds__(kGateThreads)
    RouteBatchKernel(const __grid_constant__ CudaMoeRouteParams params) {
  extern __shared__ __align__(128) std::byte memory[];
  BatchRoute<kGroups, kTeams, kLane>(params, memory).Run();
}

}  // namespace fathom::kernels
