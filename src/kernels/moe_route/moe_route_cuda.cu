// One warp routes a token; one block makes the plan.
#include "base/check.h"
#include "kernels/launch.cuh"
#include "kernels/moe_route/moe_route_cuda.h"

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

// The k best of s + bias into ids, best first; ties: the lower id. `scores` is this warp's scratch.
__device__ void ChooseBest(const CudaMoeRouteParams& p, const float* s, float* scores, int* ids) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int e = lane; e < p.num_experts; e += 32) scores[e] = s[e] + p.bias[e];
  for (int n = 0; n < p.num_chosen; ++n) {
    uint32_t best = 0, best_id = 0xffffffffu;
    for (int e = lane; e < p.num_experts; e += 32) {
      const uint32_t score = Ordered(scores[e]);
      if (score > best) {
        best = score;
        best_id = static_cast<uint32_t>(e);
      }
    }
    const uint32_t highest = __reduce_max_sync(0xffffffffu, best);
    const uint32_t id = __reduce_min_sync(0xffffffffu, best == highest ? best_id : 0xffffffffu);
    if (static_cast<uint32_t>(lane) == id % 32) scores[id] = -INFINITY;
    if (lane == 0) ids[n] = static_cast<int>(id);
    __syncwarp();
  }
}

struct RouteScratch {
  float s[kMaxExperts];
  float scores[kMaxExperts];
  int ids[kMaxChosen];
};

// Writes expert_ids and weights of token t.
__device__ void RouteToken(const CudaMoeRouteParams& p, int64_t t, RouteScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, k = p.num_chosen;
  for (int e = lane; e < p.num_experts; e += 32) {
    scratch.s[e] = sqrtf(Softplus(p.logits[t * p.num_experts + e]));
  }
  __syncwarp();
  if (p.tid2eid != nullptr) {
    if (lane < k) scratch.ids[lane] = p.tid2eid[int64_t{p.token_ids[t]} * k + lane];
    __syncwarp();
  } else {
    ChooseBest(p, scratch.s, scratch.scores, scratch.ids);
  }
  float sum = 0;
  for (int i = 0; i < k; ++i) sum = sum + scratch.s[scratch.ids[i]];
  if (lane >= k) return;
  const int id = scratch.ids[lane];
  int place = 0;
  for (int i = 0; i < k; ++i) {
    place += scratch.ids[i] < id || (scratch.ids[i] == id && i < lane) ? 1 : 0;
  }
  p.expert_ids[t * k + place] = id;
  p.weights[t * k + place] = scratch.s[id] / sum * p.scaling;
}

__global__ void __launch_bounds__(kRouteWarps * 32)
    RouteKernel(const __grid_constant__ CudaMoeRouteParams p) {
  __shared__ RouteScratch scratch[kRouteWarps];
  WaitForPredecessor();
  AllowSuccessor();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t t = int64_t{blockIdx.x} * kRouteWarps + warp;
  if (t < p.num_tokens) RouteToken(p, t, scratch[warp]);
}

// Up to kDirectTokens tokens: routing and plan in one block.
__global__ void __launch_bounds__(kDirectTokens * 32)
    RouteDirectKernel(const __grid_constant__ CudaMoeRouteParams p) {
  __shared__ RouteScratch scratch[kDirectTokens];
  __shared__ int tile_of[kMaxExperts];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int k = p.num_chosen;
  for (int e = thread; e < p.num_experts; e += kDirectTokens * 32) tile_of[e] = 0;
  WaitForPredecessor();
  AllowSuccessor();
  if (warp < p.num_tokens) RouteToken(p, warp, scratch[warp]);
  __syncthreads();
  const bool has_pair = thread < p.num_tokens * k && p.token_seq[thread / k] >= 0;
  if (has_pair) tile_of[p.expert_ids[thread]] = 1;
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
  }
  __syncthreads();
  if (thread >= p.num_tokens * k) return;
  const int row = has_pair ? (1 + tile_of[p.expert_ids[thread]]) * 8 + thread / k : 0;
  p.plan.pair_of[thread] = row;
  if (has_pair) p.plan.pair_weight[row] = p.weights[thread];
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

// Sorts the pairs by expert. One block.
__global__ void __launch_bounds__(kPlanThreads)
    PlanKernel(const __grid_constant__ CudaMoeRouteParams p, int shared_groups, int tile_rows) {
  __shared__ int count[kMaxExperts], first_row[kMaxExperts], cursor[kMaxExperts];
  const int thread = static_cast<int>(threadIdx.x), k = p.num_chosen;
  for (int e = thread; e < p.num_experts; e += kPlanThreads) count[e] = cursor[e] = 0;
  __syncthreads();
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t num_pairs = p.num_tokens * k;
  for (int64_t i = thread; i < num_pairs; i += kPlanThreads) {
    if (p.token_seq[i / k] >= 0) atomicAdd(&count[p.expert_ids[i]], 1);
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
    if (thread == 0) *p.plan.num_tiles = tiles;
  }
  __syncthreads();
  for (int64_t i = thread; i < num_pairs; i += kPlanThreads) {
    const int e = p.expert_ids[i];
    if (p.token_seq[i / k] < 0) {
      p.plan.pair_of[i] = 0;
      continue;
    }
    const int row = first_row[e] + atomicAdd(&cursor[e], 1);
    p.plan.pair_of[i] = row;
    p.plan.pair_weight[row] = p.weights[i];
  }
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
  CHECK_NE(p.bias == nullptr, p.tid2eid == nullptr);
  if (p.num_tokens <= kDirectTokens) {
    return LaunchKernel(RouteDirectKernel, 1, kDirectTokens * 32, 0, stream, p);
  }
  const auto tokens = static_cast<unsigned>(p.num_tokens);
  LaunchKernel(RouteKernel, (tokens + kRouteWarps - 1) / kRouteWarps, kRouteWarps * 32, 0, stream,
               p);
  LaunchKernel(PlanKernel, 1, kPlanThreads, 0, stream, p,
               static_cast<int>((p.num_tokens + 63) / 64 * 8), ExpertTileRows(p.num_tokens));
  LaunchKernel(GatherKernel, (tokens * static_cast<unsigned>(p.num_chosen) + 7) / 8, 256, 0, stream,
               p);
}

}  // namespace fathom::kernels
