// Routing of one token by a cluster that does not wait for the boundary before it to end: that one
// tells its output before the norm, and each 128 columns' sum of squares, as numbered words
// (CudaHyperConnectionParams::told), of which every warp makes what it multiplies. Each block has
// the scores of 16 experts, sends all blocks what they are sorted by, finds which of its own are
// chosen and tells their tiles. The experts' launch gets ready as soon as the gate is there, and is
// told when the boundary has ended (PlanBoard::input). Device code only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/hyper_connection/gates.cuh"
#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/moe_route/route_choice.cuh"
#include "kernels/numbered_words.cuh"
#include "kernels/ordered.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

class RouteAlone {
  static constexpr int kWarps = 16;
  static constexpr int kExperts = kAloneRouteBlock;
  static constexpr int kMost = kAloneRouteExperts;
  static constexpr int kLane = kMost / 32;
  static constexpr int kBlocks = kAloneRouteHidden / 64;  // of columns, at most
  static constexpr int kOfWarp = kBlocks / kWarps;
  static constexpr int kGateTileBytes = 64 * 128;  // of 64 columns of the gate
  static constexpr int kEightRowsBytes = 8 * 128;  // which lie together
  static constexpr int kGateBlockBytes = kExperts / 8 * kEightRowsBytes;
  static constexpr int kProducts = 1, kCleared = 2;  // named barriers
  static constexpr int kSumsRow = kWarps + 4;

 public:
  static constexpr int kThreads = kWarps * 32;

  struct Shared {
    std::byte gate[kBlocks][kGateBlockBytes];
    uint4 h[kWarps][kOfWarp][8];                 // eight columns each
    alignas(16) float sums[kExperts][kSumsRow];  // of each warp's columns
    alignas(16) uint32_t keys[kMost];            // that sort the experts; 0: none
    RouteScratch scratch;
    int tile[kMaxChosen];  // of the token's experts, in their order
    uint64_t gate_full[kWarps], keys_full;
  };

  __device__ RouteAlone(const CudaMoeRouteParams& params, Shared& shared)
      : p_(params),
        s_(shared),
        inverse_hidden_(1.0f / static_cast<float>(params.hidden)),
        first_(static_cast<int>(blockIdx.x) * kExperts),
        blocks_(static_cast<int>(params.hidden) / 64),
        plans_(blockIdx.x == 0),
        input_number_(ValueOf(params.input.told.number)),
        number_(NextLaunch(*params.board)) {}

  __device__ void Run() {
    FetchGate();
    if (thread() == 0) InitBarriers();
    if (thread() < kMost) s_.keys[thread()] = 0;
    __syncthreads();
    ClusterArrive();
    const float bias = p_.bias[min(first_ + thread() % kExperts, p_.num_experts - 1)];
    const uint4 weight = *reinterpret_cast<const uint4*>(p_.input.norm_weight + Column());
    if (plans_ && thread() == 0) BeginPlan();
    Gate gate;
    TakeGate(gate);
    if (warp() == 0) AllowSuccessor();  // the experts' first weights do not come before the gate
    ClusterWait();                      // all blocks have started
    AwaitInput(weight);
    Multiply(gate);
    if (plans_ && warp() == kWarps - 1) {
      NamedBarrierArrive(kProducts, kThreads);
      TellBoundaryEnded();
    } else {
      NamedBarrier(kProducts, kThreads);
      SendKeys(bias);
    }
    TellOwnTile();
    if (plans_ && warp() == 0) WriteChoice();
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }

  __device__ void InitBarriers() {
    BarrierInit(&s_.keys_full, 1);
    BarrierInitFence();
    // A score stands beside the key where the token is weighed.
    BarrierExpectBytes(&s_.keys_full, static_cast<uint32_t>(p_.num_experts * (plans_ ? 8 : 4)));
  }

  // Told before the experts' blocks start.
  __device__ void BeginPlan() const {
    p_.plan.board->launch = number_;
    SendWord(&p_.plan.board->num_tiles,
             static_cast<uint32_t>(p_.token_seq[0] >= 0 ? p_.num_chosen : 0), number_);
    __threadfence();
  }
  // One warp, beside those that send keys.
  __device__ void TellBoundaryEnded() const {
    WaitForPredecessor();
    if (lane() == 0) TellInput(*p_.plan.board, number_);
    ClearPlan();
    NamedBarrierArrive(kCleared, 64);
  }
  __device__ void ClearPlan() const {
    for (int row = lane(); row < p_.num_chosen * 8; row += 32) p_.plan.pair_weight[8 + row] = -1;
    for (int n = lane(); n < 2 + p_.num_chosen; n += 32) p_.plan.progress[n] = 0;
  }

  // A thread's pieces of eight experts' rows each: of a row's 64 columns two chunks of eight.
  using Gate = uint4[kOfWarp][2][kExperts / 8];

  // Where a lane's eight columns of the warp's begin; blocks of 64 are dealt out in turn. Of a
  // block that does not exist: the last one's, whose products with a gate of zeros are zero.
  __device__ int Column() const {
    return min(warp() + lane() / 8 * kWarps, blocks_ - 1) * 64 + lane() % 8 * 8;
  }
  // The expert whose key is a lane's i-th.
  __device__ static int KeyOf(int i) { return i / 4 * 128 + lane() * 4 + i % 4; }

  // Each warp its own: eight rows of a tile of 64 lie together.
  __device__ void FetchGate() {
    uint64_t* const full = &s_.gate_full[warp()];
    if (lane() == 0) {
      BarrierInit(full, 1);
      BarrierInitFence();
      const int count = (blocks_ - warp() + kWarps - 1) / kWarps;
      BarrierExpectBytes(full, static_cast<uint32_t>(max(count, 0) * kGateBlockBytes));
    }
    for (int block = warp(); block < kBlocks; block += kWarps) {
      if (block < blocks_) continue;
      for (int i = lane(); i < kGateBlockBytes / 16; i += 32) {
        reinterpret_cast<uint4*>(s_.gate[block])[i] = {};
      }
    }
    __syncwarp();
    const int block = warp() + lane() * kWarps;
    if (block >= blocks_) return;
    BulkCopyOnce(
        s_.gate[block],
        p_.gate.tiles + int64_t{first_ / 64 * blocks_ + block} * kGateTileBytes + first_ % 64 * 128,
        kGateBlockBytes, full);
  }
  // A row's columns are eight chunks of eight, of which a thread has two.
  __device__ void TakeGate(Gate& gate) {
    BarrierWait(&s_.gate_full[warp()], 0);
    const int row = lane() / 4, at = row * 128 + (lane() % 4 ^ row) * 16;
    const int other = (row & 4) == 0 ? 64 : -64;
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const std::byte* const block = s_.gate[warp() + i * kWarps] + at;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int eight = 0; eight < kExperts / 8; ++eight) {
          gate[i][half][eight] =
              *reinterpret_cast<const uint4*>(block + half * other + eight * kEightRowsBytes);
        }
      }
    }
  }

  // The boundary's output, normed as that does it.
  __device__ void AwaitInput(uint4 weight) {
    const uint2* const own = p_.input.told.words + Column() / 2;
    const uint2* const sum = p_.input.told.words + p_.hidden / 2 + min(lane(), blocks_ / 2 - 1);
    uint4 first, second;
    uint2 squares;
    bool there;
    do {
      first = LoadTwoNumbered(own), second = LoadTwoNumbered(own + 2), squares = LoadTogether(sum);
      there = HaveNumber(first, input_number_) && HaveNumber(second, input_number_) &&
              squares.y == input_number_;
    } while (!__all_sync(0xffffffffu, there));
    const float of_lane = lane() < blocks_ / 2 ? __uint_as_float(squares.x) : 0;
    const float mean = WarpSum(of_lane) * inverse_hidden_;
    const float inverse = InverseSqrt(mean + p_.input.norm_eps);
    const uint32_t y[4] = {first.x, first.z, second.x, second.z};
    const uint32_t w[4] = {weight.x, weight.y, weight.z, weight.w};
    uint32_t h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = UnpackBf16(y[i]), b = UnpackBf16(w[i]);
      h[i] = PackBf16(inverse * a.x * b.x, inverse * a.y * b.y);
    }
    s_.h[warp()][lane() / 8][lane() % 8] = {h[0], h[1], h[2], h[3]};
    __syncwarp();
  }

  // All columns of the products are the same token.
  __device__ void Multiply(const Gate& gate) {
    float sums[kOfWarp][4] = {};
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 x = s_.h[warp()][i][half * 4 + lane() % 4];
        const uint4 &low = gate[i][half][0], &high = gate[i][half][1];
        WarpMultiply(sums[i], {low.x, high.x, low.y, high.y}, x.x, x.y);
        WarpMultiply(sums[i], {low.z, high.z, low.w, high.w}, x.z, x.w);
      }
    }
    if (lane() % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s_.sums[lane() / 4 + i * 8][warp()] =
          (sums[0][2 * i] + sums[1][2 * i]) + (sums[2][2 * i] + sums[3][2 * i]);
    }
  }

  __device__ void SendKeys(float bias) {
    const int e = thread() % kExperts, to = thread() / kExperts;
    if (to >= static_cast<int>(gridDim.x) || first_ + e >= p_.num_experts) return;
    float logit = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&s_.sums[e][w]);
      logit = logit + four.x;
      logit = logit + four.y;
      logit = logit + four.z;
      logit = logit + four.w;
    }
    const float score = ExpertScore(logit);
    SendToBlock(reinterpret_cast<float*>(&s_.keys[first_ + e]),
                __uint_as_float(OrderedKey(score + bias)), &s_.keys_full,
                static_cast<uint32_t>(to));
    if (to == 0) SendToBlock(&s_.scratch.s[first_ + e], score, &s_.keys_full, 0);
  }

  // Each warp finds the place of one of the block's experts among all. Of padding nobody looks at
  // the tiles.
  __device__ void TellOwnTile() {
    const int own = first_ + warp();
    BarrierWaitCluster(&s_.keys_full, 0);
    if (own >= p_.num_experts) return;
    const uint32_t own_key = s_.keys[own];
    int better = 0;
#pragma unroll
    for (int i = 0; i < kLane; i += 4) {
      const uint4 keys = *reinterpret_cast<const uint4*>(&s_.keys[KeyOf(i)]);
      const uint32_t four[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        better += four[j] + (KeyOf(i + j) < own ? 1u : 0u) > own_key ? 1 : 0;  // of keys alike
      }
    }
    const int place = __reduce_add_sync(0xffffffffu, better);
    if (lane() == 0 && place < p_.num_chosen) {
      SendWord(&p_.plan.board->tiles[place], DirectTile{own, 0, 1}.word(), number_);
    }
  }

  // By one warp: the token's experts and what the experts' launch reads later.
  __device__ void WriteChoice() {
    uint32_t keys[kLane];
#pragma unroll
    for (int i = 0; i < kLane; ++i) keys[i] = s_.keys[i * 32 + lane()];
    const int id = ChooseBest(keys, p_.num_chosen);
    const int place = WeighExperts(p_, 0, id, s_.scratch);
    if (lane() < p_.num_chosen) s_.tile[place] = lane();
    NamedBarrier(kCleared, 64);
    if (lane() < p_.num_chosen) {
      int row = 0;
      if (p_.token_seq[0] >= 0) {
        row = (1 + s_.tile[lane()]) * 8;
        p_.plan.pair_weight[row] = s_.scratch.weights[lane()];
      }
      p_.plan.pair_of[lane()] = row;
    }
    WriteScores(p_, 0, s_.scratch);
    if (lane() == 0) p_.board->launches = number_;
  }

  const CudaMoeRouteParams& p_;
  Shared& s_;
  const float inverse_hidden_;
  const int first_, blocks_;
  const bool plans_;
  const uint32_t input_number_, number_;
};

__global__ void __launch_bounds__(RouteAlone::kThreads)
    RouteAloneKernel(const __grid_constant__ CudaMoeRouteParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  RouteAlone(p, *reinterpret_cast<RouteAlone::Shared*>(memory)).Run();
}

}  // namespace fathom::kernels
