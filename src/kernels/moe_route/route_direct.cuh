// Routing of up to kDirectTokens tokens in one launch. Each block has the scores of a few experts
// and sends them to the first one, which makes the plan. Where a cluster's shared memory holds the
// gate, the blocks are one and scores go from block to block: of one token to all of them, each of
// which finds out which of its experts are chosen. Else scores carry the number of the launch
// beside them, so that whoever reads a pair of both knows that it has arrived: no counter, no
// fence. Of many experts each cluster has 128, whose columns its blocks share, so that none reads
// all of the tokens; the products' sums go to the blocks that have the scores. Device code only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/launch.cuh"
#include "kernels/moe_route/gate_product.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/moe_route/route_choice.cuh"
#include "kernels/moe_route/route_scores.cuh"
#include "kernels/ordered.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

static_assert(kGateThreads >= kMaxExperts);

enum class RouteBlocks { kApart, kCluster, kColumns };

// kGroups: of eight tokens; kLane: experts of a lane. Of the plan most instructions run once, so
// that few of them count more than anything else.
template <int kGroups, int kLane, RouteBlocks kBlocks>
class DirectRoute {
  static constexpr bool kCluster = kBlocks == RouteBlocks::kCluster;
  static constexpr bool kColumns = kBlocks == RouteBlocks::kColumns;

  static constexpr int kWords = kMaxExperts / 32;
  static constexpr int kWarps = kGateThreads / 32;

 public:
  static constexpr int kExperts = kCluster ? 16 : 8;  // whose scores a block has
  using Product = GateProduct<kGroups, 1, kExperts, kColumns>;

  struct Shared {
    Product::Shared product;
    RouteScratch scratch[kDirectTokens];
    uint32_t used[kGroups][kWords];            // by a group of eight tokens: a bit an expert
    uint32_t users[kGroups][kMaxExperts / 4];  // likewise eight bits: which of the tokens
    int tile[kMaxChosen];  // of one token's experts, in their order, where each block tells its own
    float bias[kMaxExperts];
    uint64_t scores_full;
  };
  // The gate's rows, and Shared behind them.
  static size_t SharedBytes(int64_t hidden) {
    return static_cast<size_t>(Product::GateBytes(hidden)) + sizeof(Shared);
  }

  __device__ DirectRoute(const CudaMoeRouteParams& params, std::byte* memory)
      : p_(params),
        s_(*reinterpret_cast<Shared*>(memory + Product::GateBytes(params.hidden))),
        product_(params, memory, s_.product),
        first_(static_cast<int>(blockIdx.x) * kExperts),
        tokens_(static_cast<int>(params.num_tokens)),
        plans_(blockIdx.x == 0),
        tells_own_(kCluster && params.num_tokens == 1 && params.tid2eid == nullptr),
        number_(NextLaunch(*params.board)) {}

  __device__ void Run() {
    if (thread() == 0) InitBarriers();
    __syncthreads();
    if constexpr (kCluster || kColumns) ClusterArrive();
    if (warp() == 0) product_.FetchGate();
    product_.FindTokens();
    if (p_.bias != nullptr && thread() < p_.num_experts) s_.bias[thread()] = p_.bias[thread()];
    int token = thread() / p_.num_chosen, choice = thread() % p_.num_chosen;
    asm volatile("" : "+r"(token), "+r"(choice));  // before the wait, not when it is needed
    const bool first_exists = p_.token_seq[0] >= 0;
    const bool has_pair = token < tokens_ && p_.token_seq[token] >= 0;
    const bool is_used = chooses() && lane() < p_.num_chosen && p_.token_seq[warp()] >= 0;
    const bool has_table = p_.tid2eid != nullptr;
    int id = 0;
    if (plans_) {
      BeginPlan(first_exists);
      if (has_table) {  // nothing of the plan depends on the scores
        if (chooses()) id = TableExpert(p_, warp());
        TellTiles(id, is_used);
      }
    }
    typename Product::Gate gate;
    product_.Begin(gate);
    if constexpr (kCluster || kColumns) ClusterWait();  // who is sent to has started
    WaitForPredecessor();
    // The plan's number is there before a block of the successor is.
    if (!plans_ || warp() == kWarps - 1) AllowSuccessor();
    SendScores(gate);
    if (tells_own_) TellOwnTile(first_exists);
    if (!plans_) return;
    ClearPlan();
    if (chooses()) {
      float scores[kLane] = {};
      TakeScores(scores);
      if (!has_table) id = ChooseExperts(p_, LaneBias<kLane>(s_.bias, p_.num_experts), scores);
    }
    if (!has_table && !tells_own_) TellTiles(id, is_used);
    if (chooses()) {
      const int place = WeighExperts(p_, warp(), id, s_.scratch[warp()]);
      if (tells_own_ && lane() < p_.num_chosen) s_.tile[place] = lane();
    }
    __syncthreads();
    if (token < tokens_) WritePair(token, choice, has_pair);
    if (chooses()) WriteScores(p_, warp(), s_.scratch[warp()]);  // nothing here waits for them
    if (thread() == 0) p_.board->launches = number_;
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }
  // A warp routes a token as soon as it has its scores.
  __device__ bool chooses() const { return warp() < tokens_; }

  __device__ void InitBarriers() {
    product_.InitBarriers();
    BarrierInit(&s_.scores_full, 1);
    BarrierInitFence();
    product_.ExpectBytes();
    BarrierExpectBytes(&s_.scores_full, static_cast<uint32_t>(tokens_ * p_.num_experts * 4));
  }

  __device__ void BeginPlan(bool first_exists) {
    static_assert(sizeof(s_.users) <= kGateThreads * sizeof(uint32_t));
    if (thread() < kGroups * kWords) (&s_.used[0][0])[thread()] = 0;
    if (thread() < kGroups * kMaxExperts / 4) (&s_.users[0][0])[thread()] = 0;
    if (!kCluster && chooses()) FetchScores(p_, warp());
    if (thread() == kGateThreads - 32) {
      p_.plan.board->launch = number_;
      p_.plan.board->input = number_;  // it is, when the experts start
      if (tells_own_) TellCount(first_exists ? p_.num_chosen : 0);
      __threadfence();
    }
    __syncthreads();
  }

  __device__ void SendScores(typename Product::Gate& gate) {
    product_.Run(gate);
    const int e = thread() % kExperts;
    int t = thread() / kExperts, to = 0;
    if (tells_own_) {  // to every block
      to = t, t = 0;
      if (to >= static_cast<int>(gridDim.x)) return;
    }
    if (t >= tokens_ || first_ + e >= p_.num_experts) return;
    const float score = ExpertScore(product_.Logit(t, e));
    if constexpr (kCluster) {
      SendToBlock(&s_.scratch[t].s[first_ + e], score, &s_.scores_full, static_cast<uint32_t>(to));
    } else {
      SendScore(ScoreAt(p_, t, first_ + e), score, number_);
    }
  }

  // One token: each warp finds the place of one of the block's experts among all.
  __device__ void TellOwnTile(bool first_exists) {
    static_assert(!kCluster || kExperts == kWarps);
    const int own = first_ + warp();
    BarrierWaitCluster(&s_.scores_full, 0);
    if (own >= p_.num_experts) return;
    const auto key = [this](int e) { return OrderedKey(s_.scratch[0].s[e] + s_.bias[e]); };
    const uint32_t own_key = key(own);
    int better = 0;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const int e = i * 32 + lane();
      if (e >= p_.num_experts) break;
      const uint32_t other = key(e);
      better += other > own_key || (other == own_key && e < own) ? 1 : 0;
    }
    const int place = __reduce_add_sync(0xffffffffu, better);
    if (first_exists && lane() == 0 && place < p_.num_chosen) {
      SendWord(&p_.plan.board->tiles[place], DirectTile{own, 0, 1}.word(), number_);
    }
  }

  __device__ void ClearPlan() const {
    const int most_tiles = MaxDirectTiles(tokens_, p_.num_experts, p_.num_chosen);
#pragma unroll 1
    for (int row = thread(); row < most_tiles * 8; row += kGateThreads) {
      p_.plan.pair_weight[kGroups * 8 + row] = -1;
    }
#pragma unroll 1
    for (int n = thread(); n < 2 + most_tiles; n += kGateThreads) p_.plan.progress[n] = 0;
  }

  // Of the warp's token: a lane has those of experts l, l + 32, ….
  __device__ void TakeScores(float (&scores)[kLane]) {
    if constexpr (kCluster) {
      BarrierWaitCluster(&s_.scores_full, 0);
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const int e = i * 32 + lane();
        if (e < p_.num_experts) scores[i] = s_.scratch[warp()].s[e];
      }
    } else {
      AwaitScores(p_, warp(), number_, scores);
      KeepScores(p_, scores, s_.scratch[warp()]);
    }
  }

  // A group of tokens at an expert that one of them chose is a tile: those of experts below
  // `expert`, and the expert's own of groups before `group`.
  __device__ int TilesBefore(int expert, int group) const {
    const uint32_t below = (1u << expert % 32) - 1;
    int count = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const uint32_t mask = i < expert / 32 ? 0xffffffffu : i == expert / 32 ? below : 0;
        count += __popc(s_.used[g][i] & mask);
      }
      if (g < group) count += static_cast<int>(s_.used[g][expert / 32] >> expert % 32 & 1);
    }
    return count;
  }
  // By all threads. id: of a lane's expert, if it has one that is used.
  __device__ void TellTiles(int id, bool is_used) {
    const int group = warp() / 8, bit = id % 4 * 8;
    if (is_used) {
      atomicOr(&s_.used[group][id / 32], 1u << id % 32);
      atomicOr(&s_.users[group][id / 4], 1u << (bit + warp() % 8));
    }
    __syncthreads();
    if (is_used) {
      const DirectTile tile{id, group, s_.users[group][id / 4] >> bit & 0xff};
      SendWord(&p_.plan.board->tiles[TilesBefore(id, group)], tile.word(), number_);
    }
    if (warp() != kWarps - 1) return;
    const uint32_t* const words = &s_.used[0][0];
    const int in_word = lane() < kGroups * kWords ? __popc(words[lane()]) : 0;
    const int count = __reduce_add_sync(0xffffffffu, in_word);
    if (lane() == 0) TellCount(count);
  }
  __device__ void TellCount(int tiles) const {
    SendWord(&p_.plan.board->num_tiles, static_cast<uint32_t>(tiles), number_);
  }
  // The rows of tiles: those are the experts that are used, in order, each one's groups together;
  // or one token's, best first.
  __device__ void WritePair(int token, int choice, bool has_pair) const {
    const RouteScratch& own = s_.scratch[token];
    int row = 0;
    if (has_pair) {
      const int tile = tells_own_ ? s_.tile[choice] : TilesBefore(own.chosen[choice], token / 8);
      row = (kGroups + tile) * 8 + token % 8;
      p_.plan.pair_weight[row] = own.weights[choice];
    }
    p_.plan.pair_of[thread()] = row;
  }

  const CudaMoeRouteParams& p_;
  Shared& s_;
  Product product_;
  const int first_, tokens_;
  const bool plans_;
  const bool tells_own_;  // each block the tiles of its experts: of one token
  const uint32_t number_;
};

template <int kGroups, int kLane, RouteBlocks kBlocks>
__global__ void __launch_bounds__(kGateThreads)
    RouteDirectKernel(const __grid_constant__ CudaMoeRouteParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  DirectRoute<kGroups, kLane, kBlocks>(p, memory).Run();
}

}  // namespace fathom::kernels
