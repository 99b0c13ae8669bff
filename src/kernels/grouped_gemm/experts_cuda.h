// The experts on a GPU: grouped_gemm.h for official numerics. Routed experts are FP4 or FP8, the
// shared one FP8; the intermediate activations go from the first product to the second as FP8.
// The outputs stay apart, a row for each pair: whoever reads y adds them up in order of expert id
// (hyper_connection_cuda.h). Products may have all of their rows or a rank's own: a row's sums are
// the same, in one launch or two.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/collective/peer_view.h"
#include "kernels/gemm/weight_tiles.h"
#include "kernels/grouped_gemm/expert_plan.h"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

// Experts of one shape, one after the other. gate_up: pairs of row tiles of w1 and w3 in turn
// (weight_tiles.h, interleave 2). Scales of FP8 matrices likewise: rows of w1's and w3's in turn.
struct ExpertTiles {
  TileKind kind = TileKind::kFp4;
  const std::byte* gate_up = nullptr;
  const uint8_t* gate_up_scales = nullptr;
  const std::byte* down = nullptr;
  const uint8_t* down_scales = nullptr;
  // kFp4: the largest scale byte of each row, in the order of the tiles (experts_large.h).
  const uint8_t* gate_up_largest = nullptr;
  const uint8_t* down_largest = nullptr;
};

struct CudaExpertParams {
  int64_t num_tokens = 0;
  int64_t hidden = 0;        // H; LaunchDown: rows of w2
  int64_t intermediate = 0;  // I; LaunchGateUp: rows of w1, and of w3
  int num_experts = 0;
  int num_chosen = 0;
  float swiglu_limit = 0;  // 0: no clamp
  ExpertTiles routed, shared;
  Fp8Tiles x;  // [num_tokens, H]; where the plan is_large, with room for whole 64 tokens
  // [MaxPairRows, H], written by moe_route; unused up to kDirectTokens, unless the plan is_large,
  // and where it is as_words
  Fp8Tiles gathered;
  ExpertPlan plan;
  Fp8Tiles t;  // [MaxPairRows, I]; LaunchGateUp: from its first column on
  // [NumPackets], zero at first: t of one token, of which both products are one launch.
  uint4* t_packets = nullptr;
  Mirrors mirrors = {};        // of t; where the plan is_large
  __nv_bfloat16* y = nullptr;  // [MaxPairRows, H]
  int64_t y_stride = 0;        // from pair to pair
  // Where the shared expert has other tokens than the routed ones: how many x holds, and its
  // outputs. Only for more than kDirectTokens tokens.
  int64_t num_shared_tokens = -1;     // -1: num_tokens
  __nv_bfloat16* shared_y = nullptr;  // null: y

  __host__ __device__ int64_t shared_tokens() const {
    return num_shared_tokens < 0 ? num_tokens : num_shared_tokens;
  }
  __host__ __device__ __nv_bfloat16* outputs(bool of_shared) const {
    return of_shared && shared_y != nullptr ? shared_y : y;
  }
};

// Both products, of all rows.
void Launch(const CudaExpertParams& params, device::Stream& stream);

// A tensor rank's rows of both products, where ranks write to each other's memory: with its rows of
// w1 and w3 it makes some columns of t for all of them.
struct ExpertRank {
  PeerExchange exchange;
  RankParts blocks;             // of t, of 128 columns; no rank without
  int64_t down_rows = 0;        // of w2; no rank without
  uint64_t* arrived = nullptr;  // [NumArrivals], zero at first
  // One token's outputs go to all ranks as packets (RowPacket) of this exchange, which the boundary
  // ends, from this column on. size 1: to y.
  PeerExchange outputs;
  int64_t first_output = 0;
};
// Both products of a rank's rows in one launch, unless the plan is_large. hidden and intermediate
// are those of all ranks; t is all of it and, like its packets and rank.arrived, in the shared
// memory of all ranks; y from the rank's first column on.
void Launch(const CudaExpertParams& params, const ExpertRank& rank, device::Stream& stream);

void LaunchGateUp(const CudaExpertParams& params, device::Stream& stream);
// When t is all there.
void LaunchDown(const CudaExpertParams& params, device::Stream& stream);

}  // namespace fathom::kernels
