// One warp routes a token. Few tokens: one block makes the plan of the scores that the others send
// it. More: the last block to route its tokens makes it.
#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/launch.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/ordered.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/warp_sums.cuh"

namespace fathom::kernels {
namespace {

constexpr int kRouteThreads = 512;
constexpr int kRouteWarps = kRouteThreads / 32;

__device__ float Softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

constexpr int kExpertsOfLane = kMaxExperts / 32;

// The k best of a warp's scores into ids, best first; ties: the lower id. Lane l has those of
// experts l, l + 32, …: `count` of them.
__device__ void ChooseBest(uint32_t (&scores)[kExpertsOfLane], int count, int k, int* ids) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int n = 0; n < k; ++n) {
    uint32_t best = 0;
    int best_i = 0;
#pragma unroll
    for (int i = 0; i < kExpertsOfLane; ++i) {
      if (i == count) break;
      if (scores[i] > best) best = scores[i], best_i = i;
    }
    const uint32_t highest = __reduce_max_sync(0xffffffffu, best);
    const uint32_t own = best == highest ? static_cast<uint32_t>(best_i * 32 + lane) : 0xffffffffu;
    const uint32_t id = __reduce_min_sync(0xffffffffu, own);
    if (own == id) {
#pragma unroll
      for (int i = 0; i < kExpertsOfLane; ++i) {
        if (i == best_i) scores[i] = 0;
      }
    }
    if (lane == 0) ids[n] = static_cast<int>(id);
  }
  __syncwarp();
}

struct RouteScratch {
  float s[kMaxExperts];
  int ids[kMaxChosen];  // chosen, best first
  // In the order of the experts: what is written to expert_ids and weights.
  int chosen[kMaxChosen];
  float weights[kMaxChosen];
};

// A lane's biases of experts l, l + 32, ….
struct LaneBias {
  __device__ explicit LaneBias(const CudaMoeRouteParams& p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kExpertsOfLane; ++i) {
      const int e = i * 32 + lane;
      of[i] = p.bias != nullptr && e < p.num_experts ? p.bias[e] : 0.0f;
    }
  }
  float of[kExpertsOfLane];
};

__device__ float Score(float logit) { return sqrtf(Softplus(logit)); }

// Writes expert_ids and weights of token t. score[i]: of expert i * 32 + lane.
__device__ void RouteToken(const CudaMoeRouteParams& p, int64_t t, const LaneBias& bias,
                           const float (&score)[kExpertsOfLane], RouteScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, k = p.num_chosen;
  uint32_t biased[kExpertsOfLane] = {};
#pragma unroll
  for (int i = 0; i < kExpertsOfLane; ++i) {
    if (i * 32 + lane >= p.num_experts) break;
    scratch.s[i * 32 + lane] = score[i];
    biased[i] = OrderedKey(score[i] + bias.of[i]);
  }
  if (p.tid2eid != nullptr) {
    if (lane < k) scratch.ids[lane] = p.tid2eid[int64_t{p.token_ids[t]} * k + lane];
    __syncwarp();
  } else {
    __syncwarp();
    ChooseBest(biased, (p.num_experts + 31) / 32, k, scratch.ids);
  }
  float sum = 0;
  for (int i = 0; i < k; ++i) sum = sum + scratch.s[scratch.ids[i]];
  if (lane >= k) return;
  const int id = scratch.ids[lane];
  int place = 0;
  for (int i = 0; i < k; ++i) {
    place += scratch.ids[i] < id || (scratch.ids[i] == id && i < lane) ? 1 : 0;
  }
  const float weight = scratch.s[id] / sum * p.scaling;
  scratch.chosen[place] = p.expert_ids[t * k + place] = id;
  scratch.weights[place] = p.weights[t * k + place] = weight;
}

__device__ RouteBoard::Score* ScoreAt(const CudaMoeRouteParams& p, int token, int expert) {
  return &p.board->scores[token][expert];
}
__device__ uint32_t LaunchNumber(const CudaMoeRouteParams& p) {
  return *static_cast<volatile const uint32_t*>(&p.board->launches) + 1;
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

// Up to kDirectTokens tokens. The first block makes the plan; of the others each computes the
// scores of a few experts and sends them with the number of the launch beside them, so that whoever
// reads a pair of both knows that it has arrived: no counter, no fence.
constexpr int kDirectThreads = kDirectTokens * 32;
constexpr int kDirectWarps = kDirectTokens;
constexpr int kDirectExperts = 2;  // of a block
constexpr int kPrefetched = 2;     // 16-byte chunks of an expert's row: all, up to 4,096 columns

struct DirectShared {
  float sums[kDirectTokens][kDirectExperts][kDirectWarps];
  RouteScratch scratch[kDirectTokens];
  uint32_t used[kMaxExperts / 32];  // a bit an expert
};

// kTokens: that a block adds up at once.
template <int kTokens>
class DirectScores {
 public:
  __device__ DirectScores(const CudaMoeRouteParams& params, DirectShared& shared)
      : p_(params), s_(shared), first_((static_cast<int>(blockIdx.x) - 1) * kDirectExperts) {}

  __device__ void Run() {
    for (int i = 0; i < kPrefetched; ++i) LoadWeights(i, weights_[i]);
    WaitForPredecessor();
    AllowSuccessor();
    const uint32_t number = LaunchNumber(p_);
    const auto tokens = static_cast<int>(p_.num_tokens);
#pragma unroll 1
    for (int t = 0; t < tokens; t += kTokens) AddUp(t);
    __syncthreads();
    const int t = thread() / kDirectExperts, e = thread() % kDirectExperts;
    if (t >= tokens || first_ + e >= p_.num_experts) return;
    float logit = 0;
    for (const float sum : s_.sums[t][e]) logit += sum;
    SendScore(ScoreAt(p_, t, first_ + e), Score(logit), number);
  }

 private:
  static constexpr int kSums = kTokens * kDirectExperts;

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  // The first column of this thread's i-th chunk.
  __device__ static int Column(int i) { return (thread() + i * kDirectThreads) * 8; }

  __device__ void LoadWeights(int i, uint4 (&w)[kDirectExperts]) const {
    const int k = Column(i);
    if (k >= p_.hidden) return;
#pragma unroll
    for (int e = 0; e < kDirectExperts; ++e) {
      const int row = min(first_ + e, p_.num_experts - 1);
      const int64_t tile = row / 64 * p_.gate.col_blocks() + k / 64;
      w[e] = __ldg(reinterpret_cast<const uint4*>(p_.gate.tiles + tile * 8192 + row % 64 * 128 +
                                                  ((k % 64 / 8) ^ (row % 8)) * 16));
    }
  }

  __device__ static float Dot(uint4 a, uint4 b) {
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 u = UnpackBf16(x[i]), v = UnpackBf16(y[i]);
      sum += u.x * v.x + u.y * v.y;
    }
    return sum;
  }

  // Of kTokens tokens from t on; of those that do not exist the last one's.
  __device__ void AddUp(int t) {
    const auto* h = reinterpret_cast<const std::byte*>(p_.h.values);
    const int last = static_cast<int>(p_.num_tokens) - 1;
    float sums[kSums] = {};
#pragma unroll 2
    for (int i = 0; Column(i) < p_.hidden; ++i) {
      uint4 x[kTokens], w[kDirectExperts];
      for (int j = 0; j < kTokens; ++j) {
        x[j] = *reinterpret_cast<const uint4*>(
            h + Bf16TileOffset(min(t + j, last), Column(i), p_.h.row_groups));
      }
      if (i >= kPrefetched) LoadWeights(i, w);
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        for (int e = 0; e < kDirectExperts; ++e) {
          const uint4 of = i == 0 ? weights_[0][e] : i == 1 ? weights_[1][e] : w[e];
          sums[j * kDirectExperts + e] += Dot(of, x[j]);
        }
      }
    }
    const float sum = TransposedSum(sums);
    constexpr int kLanes = 32 / kSums;
    const int of = thread() % 32 / kLanes, token = t + of / kDirectExperts;
    if (thread() % kLanes == 0 && token <= last) {
      s_.sums[token][of % kDirectExperts][thread() / 32] = sum;
    }
  }

  const CudaMoeRouteParams& p_;
  DirectShared& s_;
  const int first_;
  uint4 weights_[kPrefetched][kDirectExperts] = {};
};

// A warp routes a token as soon as it has its scores.
class DirectPlan {
 public:
  __device__ DirectPlan(const CudaMoeRouteParams& params, DirectShared& shared)
      : p_(params), s_(shared), tokens_(static_cast<int>(params.num_tokens)) {}

  __device__ void Run() {
    const LaneBias bias(p_);
    const int token = thread() / p_.num_chosen;
    const bool is_pair = token < tokens_, has_pair = is_pair && p_.token_seq[token] >= 0;
    if (thread() < kMaxExperts / 32) s_.used[thread()] = 0;
    WaitForPredecessor();
    AllowSuccessor();
    const uint32_t number = LaunchNumber(p_);
    __syncthreads();
    if (warp() < tokens_) {
      float scores[kExpertsOfLane] = {};
      AwaitScores(number, scores);
      RouteToken(p_, warp(), bias, scores, s_.scratch[warp()]);
    }
    __syncthreads();
    const RouteScratch& own = s_.scratch[is_pair ? token : 0];
    const int i = thread() % p_.num_chosen, expert = own.chosen[i];
    if (has_pair) atomicOr(&s_.used[expert / 32], 1u << expert % 32);
    __syncthreads();
    const int count = UsedBefore(kMaxExperts);
    for (int row = thread(); row < count * 8; row += kDirectThreads) {
      p_.plan.pair_weight[8 + row] = 0;
    }
    for (int n = thread(); n < 2 + count; n += kDirectThreads) p_.plan.progress[n] = 0;
    __syncthreads();
    if (thread() == 0) {
      *p_.plan.num_tiles = count;
      p_.board->launches = number;
    }
    int row = 0;
    if (has_pair) {  // tiles are the experts that are used, in order
      const int tile = UsedBefore(expert);
      row = (1 + tile) * 8 + token;
      p_.plan.tiles[tile] = {expert, 0, 1 + tile, tokens_};
      p_.plan.pair_weight[row] = own.weights[i];
    }
    if (is_pair) p_.plan.pair_of[thread()] = row;
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }

  // Of the warp's token: a lane has those of experts l, l + 32, ….
  __device__ void AwaitScores(uint32_t number, float (&scores)[kExpertsOfLane]) const {
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kExpertsOfLane; ++i) {
        const int e = i * 32 + thread() % 32;
        if (e < p_.num_experts) all &= ReceiveScore(ScoreAt(p_, warp(), e), number, scores[i]);
      }
    } while (!all);
    __syncwarp();
  }

  // Experts below `expert` that have a pair.
  __device__ int UsedBefore(int expert) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kMaxExperts / 32; ++i) {
      const int bits = min(max(expert - i * 32, 0), 32);
      const uint32_t mask = bits == 32 ? 0xffffffffu : (1u << bits) - 1;
      count += __popc(s_.used[i] & mask);
    }
    return count;
  }

  const CudaMoeRouteParams& p_;
  DirectShared& s_;
  const int tokens_;
};

template <int kTokens>
__global__ void __launch_bounds__(kDirectThreads)
    RouteDirectKernel(const __grid_constant__ CudaMoeRouteParams p) {
  __shared__ DirectShared shared;
  if (blockIdx.x == 0) {
    DirectPlan(p, shared).Run();
  } else {
    DirectScores<kTokens>(p, shared).Run();
  }
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
    const LaneBias bias(p_);
    for (int e = lane(); e < p_.num_experts; e += 32) s_.pairs[warp()][e] = 0;
    WaitForPredecessor();
    AllowSuccessor();
    for (int64_t t = begin_; t < end_; ++t) RouteOne(t, bias);
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

  __device__ void RouteOne(int64_t t, const LaneBias& bias) {
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
    RouteToken(p_, t, bias, scores, s_.scratch[warp()]);
    CountPairs(t);
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

void LaunchDirect(const CudaMoeRouteParams& p, device::Stream& stream) {
  const auto blocks =
      1 + (static_cast<unsigned>(p.num_experts) + kDirectExperts - 1) / kDirectExperts;
  const auto launch = [&](auto kernel) {
    LaunchKernel(kernel, blocks, kDirectThreads, 0, stream, p);
  };
  if (p.num_tokens == 1) return launch(RouteDirectKernel<1>);
  if (p.num_tokens == 2) return launch(RouteDirectKernel<2>);
  p.num_tokens <= 4 ? launch(RouteDirectKernel<4>) : launch(RouteDirectKernel<8>);
}

}  // namespace

void Launch(const CudaMoeRouteParams& p, device::Stream& stream) {
  if (p.num_tokens == 0) return;
  CHECK_LE(p.num_experts, kMaxExperts);
  CHECK_LE(p.num_chosen, kMaxChosen);
  CHECK_LE(p.num_chosen, p.num_experts);
  CHECK_LT(p.num_tokens, 1 << 16);
  CHECK_NE(p.bias == nullptr, p.tid2eid == nullptr);
  CHECK(p.gate.kind == TileKind::kBf16 && p.gate.cols == p.hidden);
  if (p.num_tokens <= kDirectTokens && !p.prefill) return LaunchDirect(p, stream);
  CudaGemmParams gate{.num_problems = 1, .num_tokens = p.num_tokens, .prefill = p.prefill};
  gate.problems[0] = {.w = p.gate,
                      .x_fp8 = {},
                      .x_bf16 = p.h,
                      .output = GemmOutput::kF32,
                      .y = p.scores,
                      .y_stride = p.num_experts,
                      .y_fp8 = {}};
  Launch(gate, stream);
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
