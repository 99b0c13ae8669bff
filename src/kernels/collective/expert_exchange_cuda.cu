// Blocks copy, and the last one to have done so tells the other ranks: it alone may wait for them.
#include <algorithm>

#include "base/check.h"
#include "kernels/collective/copy_words.cuh"
#include "kernels/collective/expert_exchange_cuda.h"
#include "kernels/collective/packets.cuh"
#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/launch.cuh"
#include "kernels/moe_route/moe_route_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocks = 264;
constexpr int kPlanThreads = 1024;

enum Kind : int { kTokens, kOutputs };

template <typename U>
__device__ U* At(const ExpertExchange& e, int rank, int64_t offset) {
  const PeerView& peers = e.exchange.peers;
  return reinterpret_cast<U*>(peers.memory[rank] + peers.layout.shared_offset + offset);
}

__device__ uint64_t* Flag(const ExpertExchange& e, int to, int from, Kind kind) {
  return At<uint64_t>(e, to, e.layout.flags_offset) + kind * e.exchange.peers.size + from;
}

__device__ uint64_t NumberOf(const ExpertExchange& e) {
  return e.has_others() ? ExchangeNumber(e.exchange) : 0;
}

// Of this rank.
__device__ int DataRank(const ExpertExchange& e) {
  return e.exchange.peers.rank / e.layout.tensor_ranks;
}
// take(rank) for each that this rank sends its tokens to: of every data rank the one with its
// tensor index, or itself alone.
template <typename Take>
__device__ __forceinline__ void ForEachTaker(const ExpertExchange& e, const Take& take) {
  if (!e.has_others()) return take(e.exchange.peers.rank);
  const int tensor_ranks = e.layout.tensor_ranks, own = e.exchange.peers.rank % tensor_ranks;
  for (int data = 0; data < e.layout.data_ranks; ++data) take(data * tensor_ranks + own);
}

// By all threads of every block, after its writes: the last block raises this rank's flags. True
// for that block.
__device__ bool TellAll(const ExpertExchange& e, uint64_t number, Kind kind) {
  __shared__ bool is_last;
  const PeerView& peers = e.exchange.peers;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    uint32_t* const counter = At<uint32_t>(e, peers.rank, e.layout.counters_offset) + kind;
    is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __threadfence_system();
  }
  __syncthreads();
  const int to = static_cast<int>(threadIdx.x);
  if (is_last && to < peers.size && to != peers.rank) {
    RaiseFlag(Flag(e, to, peers.rank, kind), number);
  }
  return is_last;
}

// By all threads of a block; what the others wrote is there then, past the first-level cache.
__device__ void HearAll(const ExpertExchange& e, uint64_t number, Kind kind) {
  const PeerView& peers = e.exchange.peers;
  const int from = static_cast<int>(threadIdx.x);
  if (e.has_others() && from < peers.size && from != peers.rank) {
    AwaitFlag(peers, Flag(e, peers.rank, from, kind), number, from);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    SendTokensKernel(const __grid_constant__ CudaSendTokensParams p) {
  const ExpertExchange& e = p.to;
  const uint64_t number = NumberOf(e);
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  const int64_t col_blocks = e.layout.hidden / 128;
  const int64_t groups = (p.num_tokens + 7) / 8, all_groups = e.layout.data_ranks * e.slots / 8;
  const int64_t own_group = DataRank(e) * e.slots / 8;
  // 66 words of 16 bytes a tile: its codes, and the scales of its eight tokens.
  constexpr int64_t kWords = kTileBytes / 16 + 2;
  for (int64_t i = first; i < groups * col_blocks * kWords; i += stride) {
    const int64_t word = i % kWords, group = i / kWords % groups, block = i / kWords / groups;
    const int64_t from = block * p.x.row_groups + group;
    const int64_t to = block * all_groups + own_group + group;
    const bool is_scale = word >= kTileBytes / 16;
    const uint4 value =
        is_scale ? reinterpret_cast<const uint4*>(p.x.scales + from * 8)[word - kTileBytes / 16]
                 : reinterpret_cast<const uint4*>(p.x.codes + from * kTileBytes)[word];
    ForEachTaker(e, [&](int rank) {
      if (is_scale) {
        reinterpret_cast<uint4*>(At<float>(e, rank, e.layout.scales_offset) +
                                 to * 8)[word - kTileBytes / 16] = value;
      } else {
        At<uint4>(e, rank, e.layout.codes_offset + to * kTileBytes)[word] = value;
      }
    });
  }
  const int k = e.layout.num_chosen;
  for (int64_t i = first; i < e.slots * k; i += stride) {
    const bool is_token = i / k < p.num_tokens && p.token_seq[i / k] >= 0;
    const int32_t id = is_token ? p.expert_ids[i] : -1;
    const float weight = is_token ? p.weights[i] : 0.0f;
    const int64_t place = DataRank(e) * e.slots * k + i;
    ForEachTaker(e, [&](int rank) {
      At<int32_t>(e, rank, e.layout.ids_offset)[place] = id;
      At<float>(e, rank, e.layout.weights_offset)[place] = weight;
    });
  }
  if (e.has_others()) TellAll(e, number, kTokens);
}

// One block.
__global__ void __launch_bounds__(kPlanThreads)
    PlanOwnExpertsKernel(const __grid_constant__ CudaTakeTokensParams p, ExpertTileSplit split) {
  __shared__ int count[kMaxExperts], first_row[kMaxExperts], cursor[kMaxExperts];
  __shared__ PlacesOfWarps places;
  const ExpertExchange& x = p.from;
  const PeerView& peers = x.exchange.peers;
  const uint64_t number = NumberOf(x);
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < p.num_experts; e += kPlanThreads) count[e] = cursor[e] = 0;
  WaitForPredecessor();
  HearAll(x, number, kTokens);
  AllowSuccessor();
  const int32_t* const ids = At<int32_t>(x, peers.rank, x.layout.ids_offset);
  const float* const weights = At<float>(x, peers.rank, x.layout.weights_offset);
  const int64_t num_tokens = x.layout.data_ranks * x.slots;
  const int64_t num_pairs = num_tokens * x.layout.num_chosen;
  // body(pair, its expert of this rank's or -1, its weight). Several of a thread's pairs are on
  // their way at once: ids are only looked at when all of them have been asked for.
  const auto for_each_pair = [&](const auto& body) {
    constexpr int kAhead = 8;
    for (int64_t first = thread; first < num_pairs; first += kAhead * kPlanThreads) {
      int id[kAhead];
      float weight[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int64_t i = first + n * kPlanThreads;
        id[n] = i < num_pairs ? __ldcg(ids + i) : -1;
        weight[n] = i < num_pairs ? __ldcg(weights + i) : 0;
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int64_t i = first + n * kPlanThreads;
        const int e = id[n] - p.first_expert;
        if (i < num_pairs) body(i, e >= 0 && e < p.num_experts ? e : -1, weight[n]);
      }
    }
  };
  for_each_pair([&](int64_t, int e, float) {
    if (e >= 0) atomicAdd(&count[e], 1);
  });
  __syncthreads();
  const int tiles = PlaceExperts(p.plan, p.num_experts, count, first_row,
                                 static_cast<int>(p.first_group), split, places);
  __syncthreads();
  const int num_progress = 1 + NumSharedTiles(x.slots, num_tokens) + tiles;
  for (int i = thread; i < num_progress; i += kPlanThreads) p.plan.progress[i] = 0;
  for_each_pair([&](int64_t i, int e, float weight) {
    const int row = e < 0 ? -1 : first_row[e] + atomicAdd(&cursor[e], 1);
    p.plan.pair_of[i] = row;
    if (row >= 0) p.plan.pair_weight[row] = weight;
  });
}

// One warp a pair: its token's activations to its row.
__global__ void __launch_bounds__(kThreads)
    GatherTokensKernel(const __grid_constant__ CudaTakeTokensParams p) {
  const ExpertExchange& x = p.from;
  const PeerView& peers = x.exchange.peers;
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t pair = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, k = x.layout.num_chosen;
  const int64_t row_groups = x.layout.data_ranks * x.slots / 8;
  if (pair >= row_groups * 8 * k) return;
  const int64_t row = p.plan.pair_of[pair], token = pair / k;
  if (row < 0) return;
  const auto* const codes = At<uint8_t>(x, peers.rank, x.layout.codes_offset);
  const float* const scales = At<float>(x, peers.rank, x.layout.scales_offset);
  // 16 columns a lane: a word of a row of four tiles.
  constexpr int kColumns = 32 * 16;
  CopyWords(codes + Fp8TileOffset(token, lane * 16, row_groups),
            kColumns / 128 * row_groups * kTileBytes,
            p.gathered.codes + Fp8TileOffset(row, lane * 16, p.gathered.row_groups),
            kColumns / 128 * p.gathered.row_groups * kTileBytes,
            static_cast<int>((x.layout.hidden - lane * 16 + kColumns - 1) / kColumns));
  for (int64_t block = lane; block < x.layout.hidden / 128; block += 32) {
    p.gathered.scales[block * p.gathered.row_groups * 8 + row] =
        __ldcg(scales + block * row_groups * 8 + token);
  }
}

// One warp a pair and rank that it goes to.
__global__ void __launch_bounds__(kThreads)
    ReturnOutputsKernel(const __grid_constant__ CudaReturnOutputsParams p) {
  const ExpertExchange& e = p.to;
  const uint64_t number = ExchangeNumber(e.exchange);
  WaitForPredecessor();
  AllowSuccessor();
  const int k = e.layout.num_chosen, tensor_ranks = e.layout.tensor_ranks;
  const int64_t copies = e.layout.data_ranks * e.slots * k * tensor_ranks;
  const int64_t words = e.layout.hidden / 8;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < copies;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t pair = i / tensor_ranks, row = p.pair_of[pair];
    if (row < 0) continue;
    const int64_t data = pair / k / e.slots, place = pair - data * e.slots * k;
    const int to = static_cast<int>(data) * tensor_ranks + static_cast<int>(i % tensor_ranks);
    const auto* const from = reinterpret_cast<const uint4*>(p.y + row * e.layout.hidden);
    auto* const out =
        At<uint4>(e, to, e.layout.outputs_offset) + (e.layout.shared_rows() + place) * words;
    CopyRowOfWords(from, out, static_cast<int>(words));
  }
  if (TellAll(e, number, kOutputs)) HearAll(e, number, kOutputs);
}

unsigned NumBlocks(int64_t work, int64_t of_block) {
  return static_cast<unsigned>(std::clamp<int64_t>((work + of_block - 1) / of_block, 1, kBlocks));
}

void CheckExchange(const ExpertExchange& e) {
  CHECK_EQ(e.layout.hidden % 128, 0);
  CHECK_EQ(e.exchange.peers.size, e.layout.data_ranks * e.layout.tensor_ranks);
  CHECK_EQ(e.slots, ExpertSlots(e.layout.data_ranks, e.slots));
  CHECK_LE(e.slots, e.layout.max_slots);
}

}  // namespace

void Launch(const CudaSendTokensParams& p, device::Stream& stream) {
  CheckExchange(p.to);
  CHECK_LE(p.num_tokens, p.to.slots);
  const int64_t words = (p.num_tokens + 7) / 8 * (p.to.layout.hidden / 128) * 66;
  LaunchKernel(SendTokensKernel, NumBlocks(words, kThreads), kThreads, 0, stream, p);
}

void Launch(const CudaTakeTokensParams& p, device::Stream& stream) {
  CheckExchange(p.from);
  CHECK_LE(p.num_experts, kMaxExperts);
  const int64_t tokens = p.from.layout.data_ranks * p.from.slots;
  const ExpertTileSplit split =
      SplitOfTiles(p.plan, tokens, p.num_experts, p.from.layout.num_chosen);
  LaunchKernel(PlanOwnExpertsKernel, 1, kPlanThreads, 0, stream, p, split);
  const int64_t pairs = tokens * p.from.layout.num_chosen;
  LaunchKernel(GatherTokensKernel, static_cast<unsigned>((pairs + kWarps - 1) / kWarps), kThreads,
               0, stream, p);
}

void Launch(const CudaReturnOutputsParams& p, device::Stream& stream) {
  CheckExchange(p.to);
  CHECK(p.to.has_others());
  const int64_t copies = p.to.exchange.peers.size * p.to.slots * p.to.layout.num_chosen;
  LaunchKernel(ReturnOutputsKernel, NumBlocks(copies, kWarps), kThreads, 0, stream, p);
}

}  // namespace fathom::kernels
