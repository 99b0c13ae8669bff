// One warp routes a token. Few tokens: route_direct.cuh; a decode of some more: route_batch.cuh.
// Else the last block to route its tokens makes the plan, behind the gate's product.
#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/launch.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/moe_route/route_alone.cuh"
#include "kernels/moe_route/route_batch.cuh"
#include "kernels/moe_route/route_choice.cuh"
#include "kernels/moe_route/route_direct.cuh"

namespace fathom::kernels {
namespace {

constexpr int kRouteThreads = 512;
constexpr int kRouteWarps = kRouteThreads / 32;

static_assert(kRouteThreads >= kMaxExperts);  // PlaceExperts

constexpr int kExpertsOfLane = kMaxExperts / 32;

// How more tokens are shared: block i has those from i * tokens on.
struct RouteShape {
  int tokens = 0;         // of a block
  int warp_tokens = 0;    // of a warp, at most
  int blocks = 0;         // up to kMaxRouteBlocks
  int shared_groups = 0;  // of rows, of the shared expert
  ExpertTileSplit split = {};
};

struct RouteShared {
  RouteScratch scratch[kRouteWarps];
  // Of a warp, how many an expert has; then those of the warps before it.
  uint16_t pairs[kRouteWarps][kMaxExperts];
  int segments[kRouteThreads];
  int count[kMaxExperts];  // pairs
  PlacesOfWarps places;
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
      if (p_.plans) CountPairs(t);
    }
    if (!p_.plans) return;
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
      scores[i] = ExpertScore(scores[i]);
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
      for (int w = 0; w * shape_.warp_tokens < shape_.tokens; ++w) {
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

  static constexpr int kLoaded = 64;  // counts on their way at once
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
    const int tiles = PlaceExperts(p_.plan, experts, s_.count, Counts(shape_.blocks),
                                   shape_.shared_groups, shape_.split, s_.places);
    const int num_progress = 1 + NumSharedTiles(p_.num_tokens) + tiles;
    for (int i = thread(); i < num_progress; i += kRouteThreads) p_.plan.progress[i] = 0;
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
  s.shared_groups = static_cast<int>(SharedPairRows(tokens)) / 8;
  s.split = SplitOfTiles(p.plan, p.num_tokens, p.num_experts, p.num_chosen);
  return s;
}

void LaunchAlone(const CudaMoeRouteParams& p, device::Stream& stream) {
  device::CheckCuda(
      cudaFuncSetAttribute(RouteAloneKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
      __FILE__, __LINE__);
  const auto blocks =
      static_cast<unsigned>((p.num_experts + kAloneRouteBlock - 1) / kAloneRouteBlock);
  LaunchClusters(RouteAloneKernel, blocks, blocks, RouteAlone::kThreads, sizeof(RouteAlone::Shared),
                 stream, p);
}

template <int kGroups, int kLane, RouteBlocks kBlocks>
void LaunchDirect(const CudaMoeRouteParams& p, device::Stream& stream) {
  using Route = DirectRoute<kGroups, kLane, kBlocks>;
  const auto kernel = RouteDirectKernel<kGroups, kLane, kBlocks>;
  const unsigned blocks =
      (static_cast<unsigned>(p.num_experts) + Route::kExperts - 1) / Route::kExperts;
  if constexpr (kBlocks != RouteBlocks::kApart) {
    device::CheckCuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), __FILE__,
        __LINE__);
  }
  const unsigned cluster = kBlocks == RouteBlocks::kApart     ? 1
                           : kBlocks == RouteBlocks::kCluster ? blocks
                                                              : kMaxCluster;
  LaunchClusters(kernel, blocks, cluster, kGateThreads, Route::SharedBytes(p.hidden), stream, p);
}

template <int kGroups>
void LaunchDirect(const CudaMoeRouteParams& p, device::Stream& stream) {
  using enum RouteBlocks;
  if (p.num_experts > 256) {
    constexpr int kLane = 12;
    using Shared = DirectRoute<kGroups, kLane, kColumns>;
    const bool share_columns =
        p.num_experts <= kLane * 32 && p.num_experts % Shared::Product::kOwnExperts == 0 &&
        p.hidden % (64 * kMaxCluster) == 0 && Shared::SharedBytes(p.hidden) <= kMaxSharedBytes;
    return share_columns ? LaunchDirect<kGroups, kLane, kColumns>(p, stream)
                         : LaunchDirect<kGroups, 16, kApart>(p, stream);
  }
  using Route = DirectRoute<kGroups, 8, kCluster>;
  static_assert(kMaxCluster * Route::kExperts == 256);
  const bool is_cluster =
      p.num_experts > Route::kExperts && Route::SharedBytes(p.hidden) <= kMaxSharedBytes;
  is_cluster ? LaunchDirect<kGroups, 8, kCluster>(p, stream)
             : LaunchDirect<kGroups, 8, kApart>(p, stream);
}

void LaunchDirect(const CudaMoeRouteParams& p, device::Stream& stream) {
  p.num_tokens <= 8 ? LaunchDirect<1>(p, stream) : LaunchDirect<2>(p, stream);
}

template <int kGroups, int kTeams, int kLane>
void LaunchBatch(const CudaMoeRouteParams& p, device::Stream& stream) {
  using Route = BatchRoute<kGroups, kTeams, kLane>;
  const auto kernel = RouteBatchKernel<kGroups, kTeams, kLane>;
  CHECK_LE(Route::SharedBytes(p.hidden), kMaxSharedBytes);
  device::CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                    __FILE__, __LINE__);
  LaunchClusters(kernel, static_cast<unsigned>(p.num_experts) / Route::kExperts, kMaxCluster,
                 kGateThreads, Route::SharedBytes(p.hidden), stream, p);
}

template <int kLane>
void LaunchBatch(const CudaMoeRouteParams& p, device::Stream& stream) {
  if (p.num_tokens <= 16) return LaunchBatch<2, 1, kLane>(p, stream);
  p.num_tokens <= 32 ? LaunchBatch<2, 2, kLane>(p, stream) : LaunchBatch<4, 2, kLane>(p, stream);
}

void LaunchBatch(const CudaMoeRouteParams& p, device::Stream& stream) {
  static_assert(kAtOnceExperts == 12 * 32);
  p.num_experts <= 256 ? LaunchBatch<8>(p, stream) : LaunchBatch<12>(p, stream);
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
    if (p.input.told.words != nullptr) {
      CHECK(p.num_tokens == 1 && !p.prefill && p.plans && p.bias != nullptr);
      CHECK(RoutesAlone(p.num_experts, p.hidden));
      return LaunchAlone(p, stream);
    }
    if (p.num_tokens <= kDirectTokens && !p.prefill) return LaunchDirect(p, stream);
    if (RoutesAtOnce(p.num_tokens, p.prefill, p.num_experts, p.hidden)) {
      return LaunchBatch(p, stream);
    }
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
