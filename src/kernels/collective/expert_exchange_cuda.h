// Experts that are given out whole to the ranks of a stage: D data ranks, each with tokens of its
// own, of T tensor ranks, each of which has all tokens of its data rank. A layer's tokens go to all
// ranks, each rank runs its experts on those that chose them, and their outputs go back to all
// ranks of the token's data rank, a row for each pair of a token and one of its experts. The GPUs
// write to each other's memory (peer_view.h, which has the D * T ranks, tensor fastest); nothing is
// added up on the way, so a token's output has the bits of one GPU that has all experts. No host
// takes part: a layer can be captured.
//
// A step has `slots` places for the tokens of each data rank, the same number on all: token t of
// data rank d is token d * slots + t of all. What a data rank leaves empty chose no experts (id
// -1). A rank has its data rank's tokens from itself, and others' from the rank with its tensor
// index.
//
// Why no rank writes where another one still reads: each awaits all D * T ranks, whoever of them
// sends it values. Nobody sends a layer's tokens before all ranks have returned the layer before's
// outputs, for which they had to read its tokens; and nobody returns outputs before all ranks have
// sent the layer's tokens, for which their boundary had to read the outputs of the layer before.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/device.h"
#include "kernels/collective/peer_view.h"
#include "kernels/grouped_gemm/expert_plan.h"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

// Where everything is in the shared memory of a rank, in bytes. H columns, k experts a token.
struct ExpertExchangeLayout {
  int data_ranks = 0;
  int tensor_ranks = 0;
  int64_t max_slots = 0;
  int64_t hidden = 0;
  int num_chosen = 0;
  // Of the tokens of all data ranks: FP8 tiles [D * slots, H] with scales; experts and weights
  // [D * slots, k].
  int64_t codes_offset = 0;
  int64_t scales_offset = 0;
  int64_t ids_offset = 0;
  int64_t weights_offset = 0;
  // BF16 [output_rows, H]: the shared expert's of the data rank's own tokens, then a row for each
  // of their pairs.
  int64_t outputs_offset = 0;
  int64_t pair_of_offset = 0;   // int32 [max_slots, k]: those rows
  int64_t flags_offset = 0;     // uint64 [2, D * T]: tokens', outputs'
  int64_t counters_offset = 0;  // uint32 [2]
  int64_t bytes = 0;

  // What the shared expert's product may write, and the first row of the pairs.
  constexpr int64_t shared_rows() const { return (max_slots + 63) / 64 * 64; }
  constexpr int64_t output_rows() const { return shared_rows() + max_slots * num_chosen; }
};
// Places of each data rank for up to so many tokens: whole tiles, and together more than
// kDirectTokens, whose experts need another plan.
constexpr int64_t ExpertSlots(int data_ranks, int64_t num_tokens) {
  const int64_t least = data_ranks * kTileRows > kDirectTokens ? kTileRows : 2 * kTileRows;
  const int64_t slots = (num_tokens + kTileRows - 1) / kTileRows * kTileRows;
  return slots < least ? least : slots;
}
constexpr ExpertExchangeLayout MakeExpertExchangeLayout(int data_ranks, int tensor_ranks,
                                                        int64_t max_tokens, int64_t hidden,
                                                        int num_chosen) {
  constexpr int64_t kAlignment = 1024;
  ExpertExchangeLayout l;
  l.data_ranks = data_ranks;
  l.tensor_ranks = tensor_ranks;
  l.max_slots = ExpertSlots(data_ranks, max_tokens);
  l.hidden = hidden;
  l.num_chosen = num_chosen;
  const auto take = [&l](int64_t bytes) {
    const int64_t offset = l.bytes;
    l.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  };
  const int64_t all = data_ranks * l.max_slots;
  l.codes_offset = take(all * hidden);
  l.scales_offset = take(all * hidden / 128 * 4);
  l.ids_offset = take(all * num_chosen * 4);
  l.weights_offset = take(all * num_chosen * 4);
  l.outputs_offset = take(l.output_rows() * hidden * 2);
  l.pair_of_offset = take(l.max_slots * num_chosen * 4);
  l.flags_offset = take(int64_t{2} * data_ranks * tensor_ranks * 8);
  l.counters_offset = take(8);
  return l;
}

// The ranks' memory, the shared part of this layout, and what a wait needs. Without a counter of
// exchanges (peers.exchanges null) a rank sends to its own memory alone and awaits nobody:
// something else brings it what others sent, and the outputs (expert_pieces_cuda.h).
struct ExpertExchange {
  PeerExchange exchange;
  ExpertExchangeLayout layout;
  int64_t slots = 0;  // of a data rank in this step: ExpertSlots

  __host__ __device__ bool has_others() const { return exchange.peers.exchanges != nullptr; }
};

// A data rank's tokens and what they chose, to all. A padding token (token_seq -1) chose nothing.
struct CudaSendTokensParams {
  ExpertExchange to;
  int64_t num_tokens = 0;               // at most slots
  Fp8Tiles x;                           // [num_tokens, H]
  const int32_t* expert_ids = nullptr;  // [num_tokens, k]
  const float* weights = nullptr;       // [num_tokens, k]
  const int32_t* token_seq = nullptr;   // [num_tokens]
};
void Launch(const CudaSendTokensParams& params, device::Stream& stream);

// Waits for the tokens of all data ranks, plans this rank's experts on them (expert_plan.h) behind
// `first_group` groups of 8 rows, and gathers their activations. Experts are numbered from the
// rank's first one on; plan.pair_of [D * slots, k]: -1 for another rank's.
struct CudaTakeTokensParams {
  ExpertExchange from;
  int first_expert = 0;
  int num_experts = 0;
  int64_t first_group = 0;
  ExpertPlan plan;
  Fp8Tiles gathered;
};
void Launch(const CudaTakeTokensParams& params, device::Stream& stream);

// The outputs of this rank's experts to the ranks whose tokens they are; ends when those of its own
// tokens are there. Token t's output of its i-th expert is row shared_rows + t * k + i.
struct CudaReturnOutputsParams {
  ExpertExchange to;
  const int32_t* pair_of = nullptr;  // the plan's
  const __nv_bfloat16* y = nullptr;  // [rows, H]
};
void Launch(const CudaReturnOutputsParams& params, device::Stream& stream);

}  // namespace fathom::kernels
