// One warp routes a token. Few tokens: one block makes the plan of the scores that the others send
// it. More: the last block to route its tokens makes it.
#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/ordered.cuh"
#include "kernels/sm90.cuh"
#include "kernels/warp_sums.cuh"

namespace fathom::kernels {
namespace {

constexpr int kRouteThreads = 512;
constexpr int kRouteWarps = kRouteThreads / 32;

__device__ float Softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

constexpr int kExpertsOfLane = kMaxExperts / 32;

// Of values [kFirst, kFirst + kCount), a power of two: few of the steps wait for each other.
template <int kFirst, int kCount, int kAll, typename Join>
__device__ __forceinline__ uint32_t Fold(const uint32_t (&values)[kAll], Join join) {
  if constexpr (kCount == 1)
    return values[kFirst];
  else
    return join(Fold<kFirst, kCount / 2>(values, join),
                Fold<kFirst + kCount / 2, kCount / 2>(values, join));
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

__device__ float Score(float logit) { return sqrtf(Softplus(logit)); }

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
__device__ int TableExpert(const CudaMoeRouteParams& p, int64_t t) {
  const int lane = static_cast<int>(threadIdx.x) % 32, k = p.num_chosen;
  return lane < k ? p.tid2eid[int64_t{p.token_ids[t]} * k + lane] : 0;
}

// Then writes expert_ids and weights of token t; id: of the lane's expert. Returns its place among
// them.
__device__ int WeighExperts(const CudaMoeRouteParams& p, int64_t t, int id, RouteScratch& scratch) {
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

__device__ RouteBoard::Score* ScoreAt(const CudaMoeRouteParams& p, int token, int expert) {
  return &p.board->scores[token][expert];
}
// Never 0, which words hold that nobody has written; odd and even in turn.
__device__ uint32_t LaunchNumber(const CudaMoeRouteParams& p) {
  const uint32_t next = *static_cast<volatile const uint32_t*>(&p.board->launches) + 1;
  return next != 0 ? next : 2;
}
__device__ void SendScore(RouteBoard::Score* to, float score, uint32_t number) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(__float_as_uint(score)),
               "r"(number)
               : "memory");
}
// Whether it has arrived.
__device__ bool ReceiveScore(const RouteBoard::Score* from, uint32_t number, float& score) {
  uint2 words;
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "l"(from)
               : "memory");
  score = __uint_as_float(words.x);
  return words.y == number;
}

// Up to kDirectTokens tokens. Each block has the scores of a few experts and sends them to the
// first one, which makes the plan. Where a cluster's shared memory holds the gate, the blocks are
// one and scores go from block to block: of one token to all of them, each of which finds out
// which of its experts are chosen. Else scores carry the number of the launch beside them, so that
// whoever reads a pair of both knows that it has arrived: no counter, no fence.
constexpr int kWords = kMaxExperts / 32;
constexpr int kDirectThreads = 512;
static_assert(kDirectThreads >= kMaxExperts);
constexpr int kDirectWarps = kDirectThreads / 32;
constexpr int kMaxCluster = 16;           // above 8 a kernel has to ask for it
constexpr int kLoadedBlocks = 4;          // of 64 columns, of a warp, on their way at once
constexpr int kGateTileBytes = 64 * 128;  // of 64 columns of the gate
constexpr int kEightRowsBytes = 8 * 128;  // which lie together

// kGroups: of eight tokens; kLane: experts of a lane. Of the plan most instructions run once, so
// that few of them count more than anything else.
template <int kGroups, int kLane, bool kCluster>
class DirectRoute {
 public:
  static constexpr int kExperts = kCluster ? 16 : 8;  // of a block
  static constexpr int kGateBlockBytes = kExperts / 8 * kEightRowsBytes;

  struct Shared {
    float sums[kDirectWarps][kGroups * 8][kExperts];
    RouteScratch scratch[kDirectTokens];
    uint32_t used[kGroups][kWords];  // by a group of eight tokens: a bit an expert
    int tile[kMaxChosen];  // of one token's experts, in their order, where each block tells its own
    float bias[kMaxExperts];
    uint64_t gate_full, scores_full;
  };
  // The gate's rows, kGateBlockBytes for each 64 columns, and Shared behind them.
  static size_t SharedBytes(int64_t hidden) {
    return static_cast<size_t>(hidden / 64 * kGateBlockBytes) + sizeof(Shared);
  }

  __device__ DirectRoute(const CudaMoeRouteParams& params, std::byte* memory)
      : p_(params),
        gate_(memory),
        s_(*reinterpret_cast<Shared*>(memory + params.hidden / 64 * kGateBlockBytes)),
        first_(static_cast<int>(blockIdx.x) * kExperts),
        blocks_(static_cast<int>(params.hidden) / 64),
        stride_(static_cast<int>(params.h.row_groups) * kTileBytes),
        tokens_(static_cast<int>(params.num_tokens)),
        plans_(blockIdx.x == 0),
        tells_own_(kCluster && params.num_tokens == 1 && params.tid2eid == nullptr),
        number_(LaunchNumber(params)) {}

  __device__ void Run() {
    if (thread() == 0) InitBarriers();
    __syncthreads();
    if constexpr (kCluster) ClusterArrive();
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
    if constexpr (kGateAhead) TakeGate(warp(), gate);
    if constexpr (kCluster) ClusterWait();  // the first block has started
    WaitForPredecessor();
    // The plan's number is there before a block of the successor is.
    if (!plans_ || warp() == kDirectWarps - 1) AllowSuccessor();
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
    BarrierInitFence();
    BarrierExpectBytes(&s_.gate_full, static_cast<uint32_t>(blocks_ * kGateBlockBytes));
    BarrierExpectBytes(&s_.scores_full, static_cast<uint32_t>(tokens_ * p_.num_experts * 4));
  }

  // Eight rows of a tile of 64 lie together.
  __device__ void FetchGate() {
    const std::byte* from =
        p_.gate.tiles + int64_t{first_ / 64 * blocks_} * kGateTileBytes + first_ % 64 * 128;
    for (int i = lane(); i < blocks_; i += 32) {
      BulkCopy(gate_ + i * kGateBlockBytes, from + i * int64_t{kGateTileBytes}, kGateBlockBytes,
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
  using Gate = uint4[kGateAhead ? kLoadedBlocks : 1][2][kExperts / 8];

  // `first` and, kDirectWarps apart, what follows it.
  __device__ void TakeGate(int first, Gate& gate) {
    BarrierWait(&s_.gate_full, 0);
#pragma unroll
    for (int i = 0; i < static_cast<int>(std::size(gate)); ++i) {
      const std::byte* const block =
          gate_ + min(first + i * kDirectWarps, blocks_ - 1) * kGateBlockBytes + Chunk(lane() / 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int eight = 0; eight < kExperts / 8; ++eight) {
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
    for (int block = warp(); block < blocks_; block += kLoadedBlocks * kDirectWarps) {
      if (kGateAhead && block != warp()) TakeGate(block, gate);
      Multiply(block, gate, sums);
    }
    KeepSums(sums);
    __syncthreads();
    const int e = thread() % kExperts;
    int t = thread() / kExperts, to = 0;
    if (tells_own_) {  // to every block
      to = t, t = 0;
      if (to >= static_cast<int>(gridDim.x)) return;
    }
    if (t >= tokens_ || first_ + e >= p_.num_experts) return;
    float logit = 0;
#pragma unroll
    for (int w = 0; w < kDirectWarps; ++w) logit += s_.sums[w][t][e];
    const float score = Score(logit);
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
      const int block = min(first + i * kDirectWarps, blocks_ - 1) * stride_;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const std::byte* const from = h + (block + token_[g]);
        x[i][g][0] = *reinterpret_cast<const uint4*>(from);
        x[i][g][1] = *reinterpret_cast<const uint4*>(from + other_[g]);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoadedBlocks; ++i) {
      const int block = first + i * kDirectWarps;
      if (block >= blocks_) break;
      if constexpr (!kGateAhead) TakeGate(block, gate);
      const auto& own = gate[kGateAhead ? i : 0];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 low = own[half][0],
                    high = kExperts == 8 ? uint4{} : own[half][kExperts / 8 - 1];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const uint4& b = x[i][g][half];
          WarpMultiply(sums[g][i], {low.x, high.x, low.y, high.y}, b.x, b.y);
          WarpMultiply(sums[g][i], {low.z, high.z, low.w, high.w}, b.z, b.w);
        }
      }
    }
  }

  __device__ void KeepSums(const float (&sums)[kGroups][kLoadedBlocks][4]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kExperts / 4; ++i) {
        const int t = g * 8 + lane() % 4 * 2 + i % 2;
        if (t >= tokens_) continue;
        s_.sums[warp()][t][lane() / 4 + i / 2 * 8] =
            (sums[g][0][i] + sums[g][1][i]) + (sums[g][2][i] + sums[g][3][i]);
      }
    }
  }

  // One token: each warp finds the place of one of the block's experts among all.
  __device__ void TellOwnTile(bool first_exists) {
    static_assert(!kCluster || kExperts == kDirectWarps);
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
    if (warp() != kDirectWarps - 1) return;
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
  const int first_, blocks_, stride_, tokens_;
  const bool plans_;
  const bool tells_own_;  // each block the tiles of its experts: of one token
  const uint32_t number_;
  int token_[kGroups], other_[kGroups];
};

template <int kGroups, int kLane, bool kCluster>
__global__ void __launch_bounds__(kDirectThreads)
    RouteDirectKernel(const __grid_constant__ CudaMoeRouteParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  DirectRoute<kGroups, kLane, kCluster>(p, memory).Run();
}

// How more tokens are shared: block i has those from i * tokens on.
struct RouteShape {
  int tokens = 0;         // of a block
  int warp_tokens = 0;    // of a warp, at most
  int blocks = 0;         // up to kMaxRouteBlocks
  int shared_groups = 0;  // of rows, of the shared expert
  int tile_rows = 0;
};

struct RouteShared {
  RouteScratch scratch[kRouteWarps];
  // Of a warp, how many an expert has; then those of the warps before it.
  uint16_t pairs[kRouteWarps][kMaxExperts];
  int segments[kRouteThreads];
  int count[kMaxExperts];  // pairs
  bool last;
};

// Pairs are in the order of their tokens: a pair's place among its expert's pairs is the sum of how
// many there are in earlier blocks, in earlier warps, and of earlier tokens.
class Router {
 public:
  __device__ Router(const CudaMoeRouteParams& params, const RouteShape& shape, RouteShared& shared)
      : p_(params),
        shape_(shape),
        s_(shared),
        begin_(int64_t{blockIdx.x} * shape.tokens + warp() * shape.warp_tokens),
        end_(min(min(begin_ + shape.warp_tokens, (int64_t{blockIdx.x} + 1) * shape.tokens),
                 params.num_tokens)) {}

  __device__ void Run() {
    const LaneBias<kExpertsOfLane> bias(p_.bias, p_.num_experts);
    for (int e = lane(); e < p_.num_experts; e += 32) s_.pairs[warp()][e] = 0;
    WaitForPredecessor();
    AllowSuccessor();
    for (int64_t t = begin_; t < end_; ++t) {
      if (p_.is_chosen) {
        TakeChoice(t);
      } else {
        RouteOne(t, bias);
      }
      CountPairs(t);
    }
    __syncthreads();
    AddWarps();
    __syncthreads();
    AddBefore();
    if (IsLast()) Plan();
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }
  __device__ int* Counts(int block) const { return p_.board->counts[block]; }

  __device__ void RouteOne(int64_t t, const LaneBias<kExpertsOfLane>& bias) {
    float scores[kExpertsOfLane] = {};
#pragma unroll
    for (int i = 0; i < kExpertsOfLane; ++i) {
      const int e = i * 32 + lane();
      if (e < p_.num_experts) scores[i] = p_.scores[t * p_.num_experts + e];
    }
#pragma unroll
    for (int i = 0; i < kExpertsOfLane; ++i) {
      if (i * 32 >= p_.num_experts) break;
      scores[i] = Score(scores[i]);
    }
    KeepScores(p_, scores, s_.scratch[warp()]);
    const int id = p_.tid2eid != nullptr ? TableExpert(p_, t) : ChooseExperts(p_, bias, scores);
    WeighExperts(p_, t, id, s_.scratch[warp()]);
  }
  __device__ void TakeChoice(int64_t t) {
    if (lane() >= p_.num_chosen) return;
    s_.scratch[warp()].chosen[lane()] = p_.expert_ids[t * p_.num_chosen + lane()];
  }

  // Of the token that was just routed; pair_of is the pair's place among the warp's.
  __device__ void CountPairs(int64_t t) {
    __syncwarp();
    const bool is_pair = lane() < p_.num_chosen && p_.token_seq[t] >= 0;
    const int expert = is_pair ? s_.scratch[warp()].chosen[lane()] : -1;
    const uint32_t same = __match_any_sync(0xffffffffu, expert);
    const int earlier = __popc(same & ((1u << lane()) - 1));
    const int before = is_pair ? s_.pairs[warp()][expert] : 0;
    __syncwarp();
    if (is_pair && earlier == 0) {
      s_.pairs[warp()][expert] = static_cast<uint16_t>(before + __popc(same));
    }
    if (lane() < p_.num_chosen) p_.plan.pair_of[t * p_.num_chosen + lane()] = before + earlier;
    __syncwarp();
  }

  __device__ void AddWarps() {
    for (int e = thread(); e < p_.num_experts; e += kRouteThreads) {
      int sum = 0;
      for (int w = 0; w < kRouteWarps; ++w) {
        const int count = s_.pairs[w][e];
        s_.pairs[w][e] = static_cast<uint16_t>(sum);
        sum += count;
      }
      Counts(static_cast<int>(blockIdx.x))[e] = sum;
    }
  }

  // pair_of becomes the pair's place among the block's.
  __device__ void AddBefore() {
    for (int64_t t = begin_; t < end_; ++t) {
      if (lane() >= p_.num_chosen || p_.token_seq[t] < 0) continue;
      const int64_t pair = t * p_.num_chosen + lane();
      p_.plan.pair_of[pair] += s_.pairs[warp()][p_.expert_ids[pair]];
    }
  }

  __device__ bool IsLast() {
    __syncthreads();
    if (thread() == 0) {
      __threadfence();
      s_.last = atomicAdd(&p_.board->blocks, 1u) + 1 == gridDim.x;
      if (s_.last) p_.board->blocks = 0;
      __threadfence();
    }
    __syncthreads();
    return s_.last;
  }

  static constexpr int kLoaded = 16;  // counts on their way at once
  __device__ void LoadCounts(int expert, int first, int end, int (&counts)[kLoaded]) const {
#pragma unroll
    for (int i = 0; i < kLoaded; ++i) {
      counts[i] = first + i < end ? __ldcg(Counts(first + i) + expert) : 0;
    }
  }

  // Counts become how many pairs there are in earlier blocks; behind the last block's is each
  // expert's first row. Several threads an expert, each a segment of the blocks.
  __device__ void Plan() {
    const int experts = p_.num_experts, segments = kRouteThreads / experts;
    const int expert = thread() % experts, segment = thread() / experts;
    const int begin = shape_.blocks * segment / segments;
    const int end = segment < segments ? shape_.blocks * (segment + 1) / segments : begin;
    int sum = 0;
    for (int b = begin; b < end; b += kLoaded) {
      int counts[kLoaded];
      LoadCounts(expert, b, end, counts);
      for (const int count : counts) sum += count;
    }
    s_.segments[thread()] = sum;
    __syncthreads();
    int before = 0;
    for (int i = 0; i < segment; ++i) before += s_.segments[i * experts + expert];
    if (segment == segments - 1) s_.count[expert] = before + sum;
    for (int b = begin; b < end; b += kLoaded) {
      int counts[kLoaded];
      LoadCounts(expert, b, end, counts);
#pragma unroll
      for (int i = 0; i < kLoaded; ++i) {
        if (b + i < end) Counts(b + i)[expert] = before;
        before += counts[i];
      }
    }
    __syncthreads();
    if (warp() == 0) MakeTiles();
  }

  // One warp.
  __device__ void MakeTiles() {
    const int tiles = PlaceExperts(p_.plan, p_.num_experts, s_.count, Counts(shape_.blocks),
                                   shape_.shared_groups, shape_.tile_rows);
    const int num_progress = 1 + NumSharedTiles(p_.num_tokens) + tiles;
    for (int i = lane(); i < num_progress; i += 32) p_.plan.progress[i] = 0;
  }

  const CudaMoeRouteParams& p_;
  const RouteShape& shape_;
  RouteShared& s_;
  const int64_t begin_, end_;  // tokens of the warp
};

__global__ void __launch_bounds__(kRouteThreads)
    RouteKernel(const __grid_constant__ CudaMoeRouteParams p,
                const __grid_constant__ RouteShape shape) {
  extern __shared__ __align__(16) std::byte memory[];
  Router(p, shape, *reinterpret_cast<RouteShared*>(memory)).Run();
}

constexpr int kGatherWarps = 8;
constexpr int64_t kManyTokens = 4096;

// A warp copies a part of a token's activations to the rows of all its pairs.
__global__ void __launch_bounds__(kGatherWarps * 32)
    GatherKernel(const __grid_constant__ CudaMoeRouteParams p,
                 const __grid_constant__ RouteShape shape, int parts) {
  __shared__ int rows[kGatherWarps][kMaxChosen];
  WaitForPredecessor();
  AllowSuccessor();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int item = static_cast<int>(blockIdx.x) * kGatherWarps + warp, part = item % parts;
  const int64_t t = item / parts, pair = t * p.num_chosen + lane;
  const bool is_pair = lane < p.num_chosen && t < p.num_tokens;
  const bool has_pairs = t < p.num_tokens && p.token_seq[t] >= 0;
  int row = 0;
  if (is_pair && has_pairs) {
    const int expert = p.expert_ids[pair];
    row = p.plan.pair_of[pair] + p.board->counts[t / shape.tokens][expert] +
          p.board->counts[shape.blocks][expert];
    rows[warp][lane] = row;
  }
  __syncthreads();  // all parts of the token have their rows
  if (is_pair && part == 0) {
    p.plan.pair_of[pair] = row;
    if (has_pairs) p.plan.pair_weight[row] = p.weights[pair];
  }
  if (!has_pairs) return;
  for (int64_t column = part * 512 + lane * 16; column < p.hidden; column += parts * 512) {
    const uint4 codes =
        *reinterpret_cast<const uint4*>(p.x.codes + Fp8TileOffset(t, column, p.x.row_groups));
    for (int i = 0; i < p.num_chosen; ++i) {
      const int64_t to = Fp8TileOffset(rows[warp][i], column, p.gathered.row_groups);
      *reinterpret_cast<uint4*>(p.gathered.codes + to) = codes;
    }
  }
  for (int64_t block = part * 32 + lane; block < p.hidden / 128; block += parts * 32) {
    const float scale = p.x.scales[block * p.x.row_groups * 8 + t];
    for (int i = 0; i < p.num_chosen; ++i) {
      p.gathered.scales[block * p.gathered.row_groups * 8 + rows[warp][i]] = scale;
    }
  }
}

constexpr int kLeastTokens = 4;  // of a block: a warp for each part of a multiprocessor

RouteShape MakeShape(const CudaMoeRouteParams& p) {
  const auto tokens = static_cast<int>(p.num_tokens);
  RouteShape s;
  s.tokens = std::max(kLeastTokens, (tokens + kMaxRouteBlocks - 1) / kMaxRouteBlocks);
  s.warp_tokens = (s.tokens + kRouteWarps - 1) / kRouteWarps;
  s.blocks = (tokens + s.tokens - 1) / s.tokens;
  s.shared_groups = (tokens + 63) / 64 * 8;
  s.tile_rows = PlanTileRows(p.num_tokens, p.prefill, p.num_experts, p.num_chosen);
  return s;
}

template <int kGroups, int kLane, bool kCluster>
void LaunchDirect(const CudaMoeRouteParams& p, device::Stream& stream) {
  using Route = DirectRoute<kGroups, kLane, kCluster>;
  const auto kernel = RouteDirectKernel<kGroups, kLane, kCluster>;
  const unsigned blocks =
      (static_cast<unsigned>(p.num_experts) + Route::kExperts - 1) / Route::kExperts;
  if constexpr (kCluster) {
    device::CheckCuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), __FILE__,
        __LINE__);
  }
  LaunchClusters(kernel, blocks, kCluster ? blocks : 1, kDirectThreads,
                 Route::SharedBytes(p.hidden), stream, p);
}

template <int kGroups>
void LaunchDirect(const CudaMoeRouteParams& p, device::Stream& stream) {
  constexpr size_t kMostSharedBytes = 227 << 10;
  if (p.num_experts > 256) return LaunchDirect<kGroups, 16, false>(p, stream);
  using Route = DirectRoute<kGroups, 8, true>;
  static_assert(kMaxCluster * Route::kExperts == 256);
  const bool is_cluster =
      p.num_experts > Route::kExperts && Route::SharedBytes(p.hidden) <= kMostSharedBytes;
  is_cluster ? LaunchDirect<kGroups, 8, true>(p, stream)
             : LaunchDirect<kGroups, 8, false>(p, stream);
}

void LaunchDirect(const CudaMoeRouteParams& p, device::Stream& stream) {
  p.num_tokens <= 8 ? LaunchDirect<1>(p, stream) : LaunchDirect<2>(p, stream);
}

void LaunchGate(const CudaMoeRouteParams& p, device::Stream& stream) {
  CudaGemmParams gate{
      .num_problems = 1, .num_tokens = p.num_tokens, .prefill = p.prefill, .few_rows = true};
  gate.problems[0] = {.w = p.gate,
                      .x_fp8 = {},
                      .x_bf16 = p.h,
                      .output = GemmOutput::kF32,
                      .y = p.scores,
                      .y_stride = p.num_experts,
                      .y_fp8 = {}};
  Launch(gate, stream);
}

}  // namespace

void Launch(const CudaMoeRouteParams& p, device::Stream& stream) {
  if (p.num_tokens == 0) return;
  CHECK_LE(p.num_experts, kMaxExperts);
  CHECK_LE(p.num_chosen, kMaxChosen);
  CHECK_LE(p.num_chosen, p.num_experts);
  CHECK_LT(p.num_tokens, 1 << 16);
  if (p.is_chosen) {
    CHECK(p.prefill && p.plans);
  } else {
    CHECK_NE(p.bias == nullptr, p.tid2eid == nullptr);
    CHECK(p.gate.kind == TileKind::kBf16 && p.gate.cols == p.hidden);
    if (p.num_tokens <= kDirectTokens && !p.prefill) return LaunchDirect(p, stream);
    LaunchGate(p, stream);
  }
  const RouteShape shape = MakeShape(p);
  LaunchKernel(RouteKernel, static_cast<unsigned>(shape.blocks), kRouteThreads, sizeof(RouteShared),
               stream, p, shape);
  if (!p.plans) return;
  const int parts = p.num_tokens < kManyTokens ? kGatherWarps : 1;
  const auto items = static_cast<unsigned>(p.num_tokens * parts);
  LaunchKernel(GatherKernel, (items + kGatherWarps - 1) / kGatherWarps, kGatherWarps * 32, 0,
               stream, p, shape, parts);
}

}  // namespace fathom::kernels
