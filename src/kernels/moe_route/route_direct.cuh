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
#include <iterator>

#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/moe_route/route_choice.cuh"
#include "kernels/ordered.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

__device__ inline RouteBoard::Score* ScoreAt(const CudaMoeRouteParams& p, int token, int expert) {
  return &p.board->scores[token][expert];
}
__device__ inline void SendScore(RouteBoard::Score* to, float score, uint32_t number) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(__float_as_uint(score)),
               "r"(number)
               : "memory");
}
// Whether it has arrived.
__device__ inline bool ReceiveScore(const RouteBoard::Score* from, uint32_t number, float& score) {
  uint2 words;
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "l"(from)
               : "memory");
  score = __uint_as_float(words.x);
  return words.y == number;
}

inline constexpr int kDirectThreads = 512;
static_assert(kDirectThreads >= kMaxExperts);

enum class RouteBlocks { kApart, kCluster, kColumns };

// kGroups: of eight tokens; kLane: experts of a lane. Of the plan most instructions run once, so
// that few of them count more than anything else.
template <int kGroups, int kLane, RouteBlocks kBlocks>
class DirectRoute {
  static constexpr bool kCluster = kBlocks == RouteBlocks::kCluster;
  static constexpr bool kColumns = kBlocks == RouteBlocks::kColumns;

  static constexpr int kWords = kMaxExperts / 32;
  static constexpr int kWarps = kDirectThreads / 32;
  static constexpr int kLoadedBlocks = 4;          // of 64 columns, of a warp, on their way at once
  static constexpr int kGateTileBytes = 64 * 128;  // of 64 columns of the gate
  static constexpr int kEightRowsBytes = 8 * 128;  // which lie together

 public:
  static constexpr int kExperts = kCluster ? 16 : 8;  // whose scores a block has
  static constexpr int kClusterExperts = kColumns ? kMaxCluster * kExperts : kExperts;
  static constexpr int kRows = kColumns ? 16 : kExperts;  // of the gate, that a warp multiplies
  // Warps that multiply the same rows, some columns each.
  static constexpr int kRowWarps = kColumns ? kWarps * kRows / kClusterExperts : kWarps;
  static constexpr int kParts = kColumns ? kMaxCluster * kRowWarps : kWarps;  // of a sum
  static constexpr int kGateBlockBytes = kClusterExperts / 8 * kEightRowsBytes;

  struct Shared {
    float sums[kParts][kGroups * 8][kExperts];
    RouteScratch scratch[kDirectTokens];
    uint32_t used[kGroups][kWords];  // by a group of eight tokens: a bit an expert
    int tile[kMaxChosen];  // of one token's experts, in their order, where each block tells its own
    float bias[kMaxExperts];
    uint64_t gate_full, scores_full, sums_full;
  };
  // Blocks of 64 columns that a block has.
  __host__ __device__ static int ColumnBlocks(int64_t hidden) {
    return static_cast<int>(hidden) / (kColumns ? 64 * kMaxCluster : 64);
  }
  // The gate's rows, kGateBlockBytes for each of these, and Shared behind them.
  __host__ __device__ static int GateBytes(int64_t hidden) {
    return ColumnBlocks(hidden) * kGateBlockBytes;
  }
  static size_t SharedBytes(int64_t hidden) {
    return static_cast<size_t>(GateBytes(hidden)) + sizeof(Shared);
  }

  __device__ DirectRoute(const CudaMoeRouteParams& params, std::byte* memory)
      : p_(params),
        gate_(memory),
        s_(*reinterpret_cast<Shared*>(memory + GateBytes(params.hidden))),
        first_(static_cast<int>(blockIdx.x) * kExperts),
        blocks_(ColumnBlocks(params.hidden)),
        block0_(kColumns ? static_cast<int>(ClusterRank()) * blocks_ : 0),
        stride_(static_cast<int>(params.h.row_groups) * kTileBytes),
        tokens_(static_cast<int>(params.num_tokens)),
        plans_(blockIdx.x == 0),
        tells_own_(kCluster && params.num_tokens == 1 && params.tid2eid == nullptr),
        number_(NextLaunch(*params.board)) {}

  __device__ void Run() {
    if (thread() == 0) InitBarriers();
    __syncthreads();
    if constexpr (kCluster || kColumns) ClusterArrive();
    if (warp() == 0) FetchGate();
    FindTokens();
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
    Gate gate;
    if constexpr (kGateAhead) TakeGate(FirstBlock(), gate);
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
      AwaitScores(scores);
      if (!has_table) id = ChooseExperts(p_, LaneBias<kLane>(s_.bias, p_.num_experts), scores);
    }
    if (!has_table && !tells_own_) TellTiles(id, is_used);
    if (chooses()) {
      const int place = WeighExperts(p_, warp(), id, s_.scratch[warp()]);
      if (tells_own_ && lane() < p_.num_chosen) s_.tile[place] = lane();
    }
    __syncthreads();
    if (token < tokens_) WritePair(token, choice, has_pair);
    if (chooses() && p_.scores != nullptr) WriteScores();
    if (thread() == 0) p_.board->launches = number_;
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }
  // A warp routes a token as soon as it has its scores.
  __device__ bool chooses() const { return warp() < tokens_; }
  // A row's columns are eight chunks of eight, of which a thread has two: where the first one is,
  // and how far from it the other.
  __device__ static int Chunk(int row) { return row * 128 + (lane() % 4 ^ row) * 16; }
  __device__ static int OtherChunk(int row) { return (row & 4) == 0 ? 64 : -64; }

  __device__ void InitBarriers() {
    BarrierInit(&s_.gate_full, 1);
    BarrierInit(&s_.scores_full, 1);
    BarrierInit(&s_.sums_full, 1);
    BarrierInitFence();
    BarrierExpectBytes(&s_.gate_full, static_cast<uint32_t>(blocks_ * kGateBlockBytes));
    BarrierExpectBytes(&s_.scores_full, static_cast<uint32_t>(tokens_ * p_.num_experts * 4));
    BarrierExpectBytes(&s_.sums_full, static_cast<uint32_t>(kParts * tokens_ * kExperts * 4));
  }

  // Eight rows of a tile of 64 lie together.
  __device__ void FetchGate() {
    if constexpr (kColumns) {
      const int all = static_cast<int>(p_.hidden) / 64, tiles = kClusterExperts / 64 * blocks_;
      const int row_tile = first_ / kClusterExperts * (kClusterExperts / 64);
      for (int i = lane(); i < tiles; i += 32) {
        const int tile = (row_tile + i / blocks_) * all + block0_ + i % blocks_;
        BulkCopyOnce(gate_ + i * kGateTileBytes, p_.gate.tiles + int64_t{tile} * kGateTileBytes,
                     kGateTileBytes, &s_.gate_full);
      }
      return;
    }
    const std::byte* from =
        p_.gate.tiles + int64_t{first_ / 64 * blocks_} * kGateTileBytes + first_ % 64 * 128;
    for (int i = lane(); i < blocks_; i += 32) {
      BulkCopyOnce(gate_ + i * kGateBlockBytes, from + i * int64_t{kGateTileBytes}, kGateBlockBytes,
                   &s_.gate_full);
    }
  }

  // Where a thread's token of each group begins; past the last token: that one.
  __device__ void FindTokens() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int token = min(g * 8 + lane() / 4, tokens_ - 1);
      token_[g] = token / 8 * kTileBytes + Chunk(token % 8);
      other_[g] = OtherChunk(token % 8);
      asm volatile("" : "+r"(token_[g]), "+r"(other_[g]));  // before the wait, not when needed
    }
  }

  __device__ void BeginPlan(bool first_exists) {
    if (thread() < kGroups * kWords) (&s_.used[0][0])[thread()] = 0;
    if (!kCluster && chooses()) FetchBoard();
    if (thread() == kDirectThreads - 32) {
      p_.plan.board->launch = number_;
      p_.plan.board->input = number_;  // it is, when the experts start
      if (tells_own_) TellCount(first_exists ? p_.num_chosen : 0);
      __threadfence();
    }
    __syncthreads();
  }
  // The board's lines of the warp's token, which weights have driven out of the L2 cache by now.
  __device__ void FetchBoard() const {
    constexpr int kScoresOfLine = 128 / sizeof(RouteBoard::Score);
    for (int e = lane() * kScoresOfLine; e < p_.num_experts; e += 32 * kScoresOfLine) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(ScoreAt(p_, warp(), e)));
    }
  }

  // A thread's two pieces of eight experts' rows each, of each block on its way. With two groups of
  // tokens there is no room for them in registers before they are needed.
  static constexpr bool kGateAhead = kGroups == 1;
  using Gate = uint4[kGateAhead ? kLoadedBlocks : 1][2][kRows / 8];

  // A warp's rows, and the first of its blocks of 64 columns; from one to the next kRowWarps.
  __device__ static int OwnRows() { return warp() / kRowWarps * kRows; }
  __device__ static int FirstBlock() { return warp() % kRowWarps; }
  // The rows in such a block.
  __device__ const std::byte* GateRows(int block) const {
    if (!kColumns) return gate_ + block * kGateBlockBytes;
    return gate_ + (OwnRows() / 64 * blocks_ + block) * kGateTileBytes + OwnRows() % 64 * 128;
  }

  // `first` and what follows it.
  __device__ void TakeGate(int first, Gate& gate) {
    BarrierWait(&s_.gate_full, 0);
#pragma unroll
    for (int i = 0; i < static_cast<int>(std::size(gate)); ++i) {
      const std::byte* const block =
          GateRows(min(first + i * kRowWarps, blocks_ - 1)) + Chunk(lane() / 4);
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

  // Each warp multiplies some blocks of 64 columns, of which a thread has the same columns of h and
  // of the gate, so their order does not matter.
  __device__ void SendScores(Gate& gate) {
    float sums[kGroups][kLoadedBlocks][4] = {};
#pragma unroll 1
    for (int block = FirstBlock(); block < blocks_; block += kLoadedBlocks * kRowWarps) {
      if (kGateAhead && block != FirstBlock()) TakeGate(block, gate);
      Multiply(block, gate, sums);
    }
    KeepSums(sums);
    if constexpr (!kColumns) __syncthreads();
    const int e = thread() % kExperts;
    int t = thread() / kExperts, to = 0;
    if (tells_own_) {  // to every block
      to = t, t = 0;
      if (to >= static_cast<int>(gridDim.x)) return;
    }
    if (t >= tokens_ || first_ + e >= p_.num_experts) return;
    if constexpr (kColumns) BarrierWaitCluster(&s_.sums_full, 0);
    float logit = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) logit += s_.sums[i][t][e];
    const float score = ExpertScore(logit);
    if constexpr (kCluster) {
      SendToBlock(&s_.scratch[t].s[first_ + e], score, &s_.scores_full, static_cast<uint32_t>(to));
    } else {
      SendScore(ScoreAt(p_, t, first_ + e), score, number_);
    }
  }

  __device__ void Multiply(int first, Gate& gate, float (&sums)[kGroups][kLoadedBlocks][4]) {
    const auto* const h = reinterpret_cast<const std::byte*>(p_.h.values);
    uint4 x[kLoadedBlocks][kGroups][2];
#pragma unroll
    for (int i = 0; i < kLoadedBlocks; ++i) {
      const int block = (block0_ + min(first + i * kRowWarps, blocks_ - 1)) * stride_;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const std::byte* const from = h + (block + token_[g]);
        x[i][g][0] = *reinterpret_cast<const uint4*>(from);
        x[i][g][1] = *reinterpret_cast<const uint4*>(from + other_[g]);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoadedBlocks; ++i) {
      const int block = first + i * kRowWarps;
      if (block >= blocks_) break;
      if constexpr (!kGateAhead) TakeGate(block, gate);
      const auto& own = gate[kGateAhead ? i : 0];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 low = own[half][0], high = kRows == 8 ? uint4{} : own[half][kRows / 8 - 1];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const uint4& b = x[i][g][half];
          WarpMultiply(sums[g][i], {low.x, high.x, low.y, high.y}, b.x, b.y);
          WarpMultiply(sums[g][i], {low.z, high.z, low.w, high.w}, b.z, b.w);
        }
      }
    }
  }

  // For the scores of their experts.
  __device__ void KeepSums(const float (&sums)[kGroups][kLoadedBlocks][4]) {
    const int part = kColumns ? static_cast<int>(ClusterRank()) * kRowWarps + FirstBlock() : warp();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const int t = g * 8 + lane() % 4 * 2 + i % 2, e = lane() / 4 + i / 2 * 8;
        if (t >= tokens_) continue;
        const float sum = (sums[g][0][i] + sums[g][1][i]) + (sums[g][2][i] + sums[g][3][i]);
        if constexpr (kColumns) {
          SendToBlock(&s_.sums[part][t][e % kExperts], sum, &s_.sums_full,
                      static_cast<uint32_t>((OwnRows() + e) / kExperts));
        } else {
          s_.sums[part][t][e] = sum;
        }
      }
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
      SendWord(&p_.plan.board->tiles[place], static_cast<uint32_t>(own), number_);
    }
  }

  __device__ void ClearPlan() const {
    const int most_tiles = MaxDirectTiles(tokens_, p_.num_experts, p_.num_chosen);
#pragma unroll 1
    for (int row = thread(); row < most_tiles * 8; row += kDirectThreads) {
      p_.plan.pair_weight[kGroups * 8 + row] = -1;
    }
#pragma unroll 1
    for (int n = thread(); n < 2 + most_tiles; n += kDirectThreads) p_.plan.progress[n] = 0;
  }

  // Of the warp's token: a lane has those of experts l, l + 32, ….
  __device__ void AwaitScores(float (&scores)[kLane]) {
    if constexpr (kCluster) {
      BarrierWaitCluster(&s_.scores_full, 0);
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const int e = i * 32 + lane();
        if (e < p_.num_experts) scores[i] = s_.scratch[warp()].s[e];
      }
    } else {
      while (!ReceiveScores(scores)) {
      }
      KeepScores(p_, scores, s_.scratch[warp()]);
    }
  }
  __device__ bool ReceiveScores(float (&scores)[kLane]) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const int e = i * 32 + lane();
      if (e < p_.num_experts) all &= ReceiveScore(ScoreAt(p_, warp(), e), number_, scores[i]);
    }
    return all;
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
    if (is_used) atomicOr(&s_.used[warp() / 8][id / 32], 1u << id % 32);
    __syncthreads();
    if (is_used) {
      const auto word = static_cast<uint32_t>(warp() / 8 << 16 | id);
      SendWord(&p_.plan.board->tiles[TilesBefore(id, warp() / 8)], word, number_);
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
  // Of the warp's token, which nothing here waits for.
  __device__ void WriteScores() const {
    for (int e = lane(); e < p_.num_experts; e += 32) {
      p_.scores[int64_t{warp()} * p_.num_experts + e] = s_.scratch[warp()].s[e];
    }
  }

  const CudaMoeRouteParams& p_;
  std::byte* const gate_;
  Shared& s_;
  const int first_;
  const int blocks_, block0_;  // of 64 columns; the first one
  const int stride_, tokens_;
  const bool plans_;
  const bool tells_own_;  // each block the tiles of its experts: of one token
  const uint32_t number_;
  int token_[kGroups], other_[kGroups];
};

template <int kGroups, int kLane, RouteBlocks kBlocks>
__global__ void __launch_bounds__(kDirectThreads)
    RouteDirectKernel(const __grid_constant__ CudaMoeRouteParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  DirectRoute<kGroups, kLane, kBlocks>(p, memory).Run();
}

}  // namespace fathom::kernels
