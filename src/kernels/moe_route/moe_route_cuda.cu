// One warp routes a token; one block makes the plan. Few tokens: every block computes the scores of
// a few experts, and the last one to finish does the rest.
#include "base/check.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/launch.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/quantize/quantize.cuh"

namespace fathom::kernels {
namespace {

constexpr int kRouteWarps = 8;
constexpr int kPlanThreads = 1024;

__device__ float Softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Sorts as the float does.
__device__ uint32_t Ordered(float x) {
  const uint32_t u = __float_as_uint(x + 0.0f);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

constexpr int kExpertsOfLane = kMaxExperts / 32;

// The k best of a warp's scores into ids, best first; ties: the lower id. Lane l has those of
// experts l, l + 32, ….
__device__ void ChooseBest(uint32_t (&scores)[kExpertsOfLane], int k, int* ids) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int n = 0; n < k; ++n) {
    uint32_t best = 0;
    int best_i = 0;
#pragma unroll
    for (int i = 0; i < kExpertsOfLane; ++i) {
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

// Writes expert_ids and weights of token t. score(e): of expert e.
template <typename ScoreOf>
__device__ void RouteToken(const CudaMoeRouteParams& p, int64_t t, const LaneBias& bias,
                           const ScoreOf& score, RouteScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, k = p.num_chosen;
  float s[kExpertsOfLane];
#pragma unroll
  for (int i = 0; i < kExpertsOfLane; ++i) {
    s[i] = i * 32 + lane < p.num_experts ? score(i * 32 + lane) : 0.0f;
  }
  uint32_t biased[kExpertsOfLane];
#pragma unroll
  for (int i = 0; i < kExpertsOfLane; ++i) {
    const bool exists = i * 32 + lane < p.num_experts;
    if (exists) scratch.s[i * 32 + lane] = s[i];
    biased[i] = exists ? Ordered(s[i] + bias.of[i]) : 0u;
  }
  if (p.tid2eid != nullptr) {
    if (lane < k) scratch.ids[lane] = p.tid2eid[int64_t{p.token_ids[t]} * k + lane];
    __syncwarp();
  } else {
    __syncwarp();
    ChooseBest(biased, k, scratch.ids);
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

__global__ void __launch_bounds__(kRouteWarps * 32)
    RouteKernel(const __grid_constant__ CudaMoeRouteParams p) {
  __shared__ RouteScratch scratch[kRouteWarps];
  WaitForPredecessor();
  AllowSuccessor();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t t = int64_t{blockIdx.x} * kRouteWarps + warp;
  if (t >= p.num_tokens) return;
  const float* logits = p.scores + t * p.num_experts;
  RouteToken(p, t, LaneBias(p), [logits](int e) { return Score(logits[e]); }, scratch[warp]);
}

// Up to kDirectTokens tokens: choices and plan in one block, from the scores of all blocks.
// token_seq: of this thread's pair.
__device__ void PlanDirect(const CudaMoeRouteParams& p, const LaneBias& bias, int token_seq,
                           RouteScratch* scratch, int* tile_of) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int k = p.num_chosen;
  for (int e = thread; e < p.num_experts; e += kDirectTokens * 32) tile_of[e] = 0;
  if (warp < p.num_tokens) {
    const float* scores = p.scores + warp * p.num_experts;
    RouteToken(p, warp, bias, [scores](int e) { return __ldcg(scores + e); }, scratch[warp]);
  }
  __syncthreads();
  const bool is_pair = thread < p.num_tokens * k, has_pair = is_pair && token_seq >= 0;
  const RouteScratch& own = scratch[is_pair ? thread / k : 0];
  const int expert = own.chosen[thread % k];
  if (has_pair) tile_of[expert] = 1;
  __syncthreads();
  if (warp == 0) {  // numbers the experts that are used, in order
    int count = 0;
    for (int base = 0; base < p.num_experts; base += 32) {
      const int e = base + lane;
      const bool used = e < p.num_experts && tile_of[e] != 0;
      const uint32_t mask = __ballot_sync(0xffffffffu, used);
      const int tile = count + __popc(mask & ((1u << lane) - 1));
      if (used) {
        tile_of[e] = tile;
        p.plan.tiles[tile] = {e, 0, 1 + tile, static_cast<int32_t>(p.num_tokens)};
      }
      count += __popc(mask);
    }
    if (lane == 0) *p.plan.num_tiles = count;
    for (int row = lane; row < count * 8; row += 32) p.plan.pair_weight[8 + row] = 0;
    for (int i = lane; i < 2 + count; i += 32) p.plan.progress[i] = 0;
  }
  __syncthreads();
  if (!is_pair) return;
  const int row = has_pair ? (1 + tile_of[expert]) * 8 + thread / k : 0;
  p.plan.pair_of[thread] = row;
  if (has_pair) p.plan.pair_weight[row] = own.weights[thread % k];
}

constexpr int kDirectThreads = kDirectTokens * 32;
constexpr int kDirectExperts = 2;  // of a block
constexpr int kPrefetched = 2;     // 16-byte chunks of an expert's row: all, up to 4,096 columns

// Up to kDirectTokens tokens.
class DirectRouter {
 public:
  struct Shared {
    float sums[kDirectTokens][kDirectExperts][kDirectThreads / 32];
    RouteScratch scratch[kDirectTokens];
    int tile_of[kMaxExperts];
    bool last;
  };

  __device__ DirectRouter(const CudaMoeRouteParams& params, Shared& shared)
      : p_(params), s_(shared), first_(static_cast<int>(blockIdx.x) * kDirectExperts) {}

  __device__ void Run() {
    for (int i = 0; i < kPrefetched; ++i) LoadWeights(i, weights_[i]);
    const LaneBias bias(p_);
    const int token = thread() / p_.num_chosen;
    const int token_seq = token < p_.num_tokens ? p_.token_seq[token] : -1;
    WaitForPredecessor();
    AllowSuccessor();
    for (int64_t t = 0; t < p_.num_tokens; ++t) AddUp(t);
    __syncthreads();
    WriteScores();
    if (!IsLast()) return;
    PlanDirect(p_, bias, token_seq, s_.scratch, s_.tile_of);
  }

 private:
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  // The first column of this thread's i-th chunk.
  __device__ int64_t Column(int i) const { return (thread() + i * kDirectThreads) * int64_t{8}; }

  __device__ void LoadWeights(int i, uint4 (&w)[kDirectExperts]) const {
    const int64_t k = Column(i);
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

  __device__ void AddUp(int64_t t) {
    const auto* h = reinterpret_cast<const std::byte*>(p_.h.values);
    float sums[kDirectExperts] = {};
#pragma unroll 2
    for (int i = 0; Column(i) < p_.hidden; ++i) {
      const uint4 x =
          *reinterpret_cast<const uint4*>(h + Bf16TileOffset(t, Column(i), p_.h.row_groups));
      uint4 w[kDirectExperts];
      if (i >= kPrefetched) LoadWeights(i, w);
#pragma unroll
      for (int e = 0; e < kDirectExperts; ++e) {
        sums[e] += Dot(i == 0 ? weights_[0][e] : i == 1 ? weights_[1][e] : w[e], x);
      }
    }
#pragma unroll
    for (int e = 0; e < kDirectExperts; ++e) {
      const float sum = WarpSum(sums[e]);
      if (thread() % 32 == 0) s_.sums[t][e][thread() / 32] = sum;
    }
  }

  __device__ void WriteScores() {
    const int t = thread() / kDirectExperts, e = thread() % kDirectExperts;
    if (t >= p_.num_tokens || first_ + e >= p_.num_experts) return;
    float logit = 0;
    for (const float sum : s_.sums[t][e]) logit += sum;
    p_.scores[t * p_.num_experts + first_ + e] = Score(logit);
  }

  __device__ bool IsLast() {
    __threadfence();
    __syncthreads();
    if (thread() == 0) {
      s_.last = atomicAdd(p_.counter, 1u) + 1 == gridDim.x;
      if (s_.last) *p_.counter = 0;
      __threadfence();
    }
    __syncthreads();
    return s_.last;
  }

  const CudaMoeRouteParams& p_;
  Shared& s_;
  const int first_;
  uint4 weights_[kPrefetched][kDirectExperts] = {};
};

__global__ void __launch_bounds__(kDirectThreads)
    RouteDirectKernel(const __grid_constant__ CudaMoeRouteParams p) {
  __shared__ DirectRouter::Shared shared;
  DirectRouter(p, shared).Run();
}

// The sum of values before this thread's, over the first warp's 32 lanes.
__device__ int ExclusiveScan(int value, int& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int sum = value;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += other;
  }
  total = __shfl_sync(0xffffffffu, sum, 31);
  return sum - value;
}

// Sorts the pairs by expert, those of one in their order: every rank's rows are the same. One
// block; a warp has a stretch of the pairs.
__global__ void __launch_bounds__(kPlanThreads)
    PlanKernel(const __grid_constant__ CudaMoeRouteParams p, int shared_groups, int tile_rows) {
  constexpr int kWarps = kPlanThreads / 32;
  __shared__ int count[kMaxExperts], first_row[kMaxExperts], num_tiles;
  __shared__ uint16_t before[kWarps][kMaxExperts];  // an expert's pairs before the warp's next one
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int k = p.num_chosen;
  for (int i = thread; i < kWarps * kMaxExperts; i += kPlanThreads) (&before[0][0])[i] = 0;
  __syncthreads();
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t num_pairs = p.num_tokens * k, stretch = (num_pairs + kWarps - 1) / kWarps;
  const int64_t begin = min(warp * stretch, num_pairs), end = min(begin + stretch, num_pairs);
  // place(i, expert, n): pair i is the expert's n-th; expert -1: padding's.
  const auto each_pair = [&](const auto& place) {
    for (int64_t base = begin; base < end; base += 32) {
      const int64_t i = base + lane;
      const int e = i < end && p.token_seq[i / k] >= 0 ? p.expert_ids[i] : -1;
      const uint32_t same = __match_any_sync(0xffffffffu, e), earlier = same & ((1u << lane) - 1);
      const int n = e < 0 ? 0 : before[warp][e];
      __syncwarp();
      if (e >= 0 && earlier == 0) before[warp][e] = static_cast<uint16_t>(n + __popc(same));
      __syncwarp();
      if (i < end) place(i, e, n + __popc(earlier));
    }
  };
  each_pair([](int64_t, int, int) {});
  __syncthreads();
  for (int e = thread; e < p.num_experts; e += kPlanThreads) {
    int sum = 0;
    for (auto& of_warp : before) {
      const int n = of_warp[e];
      of_warp[e] = static_cast<uint16_t>(sum);
      sum += n;
    }
    count[e] = sum;
  }
  __syncthreads();
  if (thread < 32) {
    int groups = shared_groups, tiles = 0;
    for (int base = 0; base < p.num_experts; base += 32) {
      const int e = base + thread, n = e < p.num_experts ? count[e] : 0;
      int all_groups, all_tiles;
      const int group = groups + ExclusiveScan((n + 7) / 8, all_groups);
      const int first = tiles + ExclusiveScan((n + tile_rows - 1) / tile_rows, all_tiles);
      groups += all_groups;
      tiles += all_tiles;
      if (e >= p.num_experts) continue;
      first_row[e] = group * 8;
      for (int i = 0; i * tile_rows < n; ++i) {
        const int at = group + i * tile_rows / 8;
        p.plan.tiles[first + i] = {e, at, at, min(tile_rows, n - i * tile_rows)};
      }
    }
    if (thread == 0) *p.plan.num_tiles = num_tiles = tiles;
  }
  __syncthreads();
  const int num_progress = 1 + NumSharedTiles(p.num_tokens) + num_tiles;
  for (int i = thread; i < num_progress; i += kPlanThreads) p.plan.progress[i] = 0;
  each_pair([&](int64_t i, int e, int n) {
    const int row = e < 0 ? 0 : first_row[e] + n;
    p.plan.pair_of[i] = row;
    if (e >= 0) p.plan.pair_weight[row] = p.weights[i];
  });
}

// One warp a pair: its token's activations to its row.
__global__ void __launch_bounds__(256) GatherKernel(const __grid_constant__ CudaMoeRouteParams p) {
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t pair = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (pair >= p.num_tokens * p.num_chosen) return;
  const int64_t t = pair / p.num_chosen;
  if (p.token_seq[t] < 0) return;
  const int64_t row = p.plan.pair_of[pair];
  for (int64_t k = lane * 16; k < p.hidden; k += 512) {
    *reinterpret_cast<uint4*>(p.gathered.codes + Fp8TileOffset(row, k, p.gathered.row_groups)) =
        *reinterpret_cast<const uint4*>(p.x.codes + Fp8TileOffset(t, k, p.x.row_groups));
  }
  for (int64_t block = lane; block < p.hidden / 128; block += 32) {
    p.gathered.scales[block * p.gathered.row_groups * 8 + row] =
        p.x.scales[block * p.x.row_groups * 8 + t];
  }
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
  if (p.num_tokens <= kDirectTokens && !p.prefill) {
    const auto experts = static_cast<unsigned>(p.num_experts);
    return LaunchKernel(RouteDirectKernel, (experts + kDirectExperts - 1) / kDirectExperts,
                        kDirectThreads, 0, stream, p);
  }
  CudaGemmParams gate{.num_problems = 1, .num_tokens = p.num_tokens, .prefill = p.prefill};
  gate.problems[0] = {.w = p.gate,
                      .x_fp8 = {},
                      .x_bf16 = p.h,
                      .output = GemmOutput::kF32,
                      .y = p.scores,
                      .y_stride = p.num_experts,
                      .y_fp8 = {}};
  Launch(gate, stream);
  const auto tokens = static_cast<unsigned>(p.num_tokens);
  LaunchKernel(RouteKernel, (tokens + kRouteWarps - 1) / kRouteWarps, kRouteWarps * 32, 0, stream,
               p);
  LaunchKernel(PlanKernel, 1, kPlanThreads, 0, stream, p,
               static_cast<int>((p.num_tokens + 63) / 64 * 8),
               ExpertTileRows(p.num_tokens, p.prefill));
  LaunchKernel(GatherKernel, (tokens * static_cast<unsigned>(p.num_chosen) + 7) / 8, 256, 0, stream,
               p);
}

}  // namespace fathom::kernels
