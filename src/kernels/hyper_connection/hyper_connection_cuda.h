// Everything between two sub-layers in one launch, on a GPU: hyper_connection.h's post of the
// sub-layer that ended, the mixes and pre of the next one, its norm, and its input in both forms
// that its products read. A cluster of blocks takes a token or two, a block a slice of the columns.
// Its successor is allowed at once (launch.cuh).
// C crosses from a launch to the next as raw logits: the softmax and Sinkhorn, which the sub-layer
// does not need, run while the next launch waits for its predecessor. Where a sub-layer ended it
// also reads the streams, post and pair_of before that wait: whoever writes them is not its
// predecessor. More tokens, and prefill: boundary_large.h.
//
// Where a rank has some columns of the output, or a part of its sums, the same launch completes it
// (collective/peer_view.h), for as few tokens as all blocks run at once; of a decode's columns so
// does boundary_large.h. What its predecessor sends as packets it awaits instead of that one's end,
// which it awaits at its own.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/collective/peer_view.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/launch_number.h"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

// What a launch leaves for the next one: written by one, read by the next, so two take turns.
struct HyperConnectionState {
  float* post = nullptr;         // [num_tokens, 4]
  float* comb_logits = nullptr;  // [num_tokens, 4, 4], L[j][k]
  float* comb = nullptr;         // [num_tokens, 4, 4], C[j][k], where boundary_large.h makes it

  HyperConnectionState From(int64_t token) const {
    return {post + token * 4, comb_logits + token * 16, comb + token * 16};
  }
};

// The output of the sub-layer that ended.
struct SublayerOutput {
  const __nv_bfloat16* y = nullptr;  // [num_tokens, hidden], or rows of pairs; null: none ended
  // Experts: y's row t is the shared expert's; pair_of [num_tokens, num_chosen] are the routed
  // ones'.
  const int32_t* pair_of = nullptr;
  int num_chosen = 0;
};

// What completes an output of which each rank has some columns, multiples of 4 and none without.
struct OutputExchange {
  PeerExchange exchange;
  RankParts columns;
  // What the predecessor sends all ranks in this exchange: then the boundary awaits that, not its
  // predecessor, and output.y is not read. Of 2 or 4 ranks a part of the sums, which are added up
  // as a tree (CudaColumnSumsParams); of one token each rank's columns of the experts' rows
  // (ExpertRank::outputs).
  enum class Sent { kNothing, kSums, kRows } sent = Sent::kNothing;
};

// A word that a launch leaves in pinned memory when the sub-layer before it has ended, so that the
// host can tell how far a GPU came that broke. Null: none.
struct Milestone {
  uint32_t* word = nullptr;
  uint32_t value = 0;
};

struct CudaHyperConnectionParams {
  __nv_bfloat16* streams = nullptr;  // [num_tokens, 4, hidden], in place
  int64_t num_tokens = 0;
  // The same bits for any number of tokens; without an exchange, where boundary_large.h's limits
  // are kept.
  bool prefill = false;
  int64_t hidden = 0;  // a multiple of 128
  SublayerOutput output = {};
  // Of up to MaxExchangeTokens tokens or rows, and of more tokens where LargeBoundaryExchanges.
  // size 1: the output is complete.
  OutputExchange gather = {};
  HyperConnectionState before = {};  // of the sub-layer that ended
  const float* fn = nullptr;         // [24, 4 * hidden]; head: [4, 4 * hidden]
  const float* scale = nullptr;
  const float* base = nullptr;
  const __nv_bfloat16* norm_weight = nullptr;  // [hidden]
  HyperConnectionConstants constants;
  HyperConnectionState after = {};  // not for the head
  Bf16Tiles h = {};                 // [num_tokens, hidden]
  Fp8Tiles h_fp8 = {};              // [num_tokens, hidden]; not for the head
  // One token: instead of h what it is before its norm, a word for two columns, and behind that the
  // sums of the squares of each 128 columns, as numbered words (numbered_words.cuh): who awaits
  // them does the norm itself (moe_route's route_alone.cuh).
  NumberedWords told = {};  // [ToldWords(hidden)]
  // Many tokens (boundary_large.h): BoundaryScratchFloats of them; null: none of them are.
  float* scratch = nullptr;
  Milestone milestone = {};  // not of the head
  // Head (the end of the model) for some tokens: row i of h is token rows[i]. num_tokens counts
  // rows.
  const int32_t* rows = nullptr;
};

constexpr int64_t ToldWords(int64_t hidden) { return hidden / 2 + hidden / 128; }

void Launch(const CudaHyperConnectionParams& params, device::Stream& stream);

// Of the calling thread's device. A block waits for its peers, so all must run. Fewer than
// boundary_large.h takes, so that a step has the same bits on any number of devices.
int64_t MaxExchangeTokens(int64_t hidden);

}  // namespace fathom::kernels
