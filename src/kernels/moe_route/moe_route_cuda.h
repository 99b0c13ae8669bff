// Routing on a GPU: the gate's product, moe_route.h, then the plan of the expert products
// (expert_plan.h): which rows each expert computes, and for more tokens their activations gathered
// by expert. Up to kDirectTokens tokens that is one launch, and up to kWordTokens where it
// RoutesAtOnce, but for prefill; between two of these lies a launch that waits for the first.
// Of more tokens the experts read the plan before they wait for the launch before them, which
// gathers: the plan is that of an earlier one. Padding tokens (token_seq -1) are routed nowhere.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/gemm/weight_tiles.h"
#include "kernels/grouped_gemm/expert_plan.h"
#include "kernels/launch_number.h"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

inline constexpr int kMaxRouteBlocks = 128;

// What the blocks of a launch tell each other, where they are no cluster. Zero at first; another
// stream's launches need another one.
struct RouteBoard {
  struct alignas(8) Score {
    float value;
    uint32_t launch;  // its number
  };
  uint32_t launches;  // which are all there is of a routing
  uint32_t blocks;    // that have ended, of the launch that runs
  Score scores[kWordTokens][kMaxExperts];
  int32_t counts[kMaxRouteBlocks + 1][kMaxExperts];
};

// What a boundary tells (CudaHyperConnectionParams::told), and its norm. Then the experts' launch
// starts before the boundary has ended: it is one that awaits PlanBoard::input.
struct RouteInput {
  NumberedWords told;
  const __nv_bfloat16* norm_weight = nullptr;  // [hidden]
  float norm_eps = 0;
};

struct CudaMoeRouteParams {
  TiledMatrix gate;       // kBf16 [num_experts, hidden]
  Bf16Tiles h = {};       // [num_tokens, hidden]
  RouteInput input = {};  // of one token, where RoutesAlone, instead of h
  // [num_tokens, num_experts]: the gate's products, or, where one launch is all, if wanted, the
  // scores that are made of them.
  float* scores = nullptr;
  RouteBoard* board = nullptr;
  int64_t num_tokens = 0;
  bool prefill = false;  // the same choices and weights for any number of tokens
  int num_experts = 0;
  int num_chosen = 0;
  const float* bias = nullptr;         // [num_experts], score routing
  const int32_t* tid2eid = nullptr;    // [vocab, k], hash routing; then bias is null
  const int32_t* token_ids = nullptr;  // [num_tokens]
  const int32_t* token_seq = nullptr;  // [num_tokens]
  float scaling = 1;
  int32_t* expert_ids = nullptr;  // [num_tokens, k], ascending
  float* weights = nullptr;       // [num_tokens, k]
  // expert_ids and weights are there: only the plan is made. Prefill.
  bool is_chosen = false;
  // Whether the experts run these tokens as they are. Otherwise the plan is scratch, and not made.
  bool plans = true;
  ExpertPlan plan;
  int64_t hidden = 0;
  Fp8Tiles x = {};         // [num_tokens, hidden]
  Fp8Tiles gathered = {};  // [MaxPairRows, hidden]
};

// One token, by scores: whether there may be an `input`.
inline constexpr int kAloneRouteHidden = 4096, kAloneRouteExperts = 256;  // at most
inline constexpr int kAloneRouteBlock = 16;  // experts of a block, of which there are several
constexpr bool RoutesAlone(int num_experts, int64_t hidden) {
  return num_experts > kAloneRouteBlock && num_experts <= kAloneRouteExperts &&
         hidden <= kAloneRouteHidden;
}

// More than kDirectTokens tokens of a decode in one launch, whose plan is told as words: clusters
// share the gate's columns, so there are whole blocks of them, and the last ones find room.
inline constexpr int kAtOnceExperts = 384, kAtOnceHidden = 7168;  // at most
constexpr bool RoutesAtOnce(int64_t num_tokens, bool prefill, int num_experts, int64_t hidden) {
  return num_tokens > kDirectTokens && num_tokens <= kWordTokens && !prefill &&
         num_experts % 128 == 0 && num_experts <= kAtOnceExperts && hidden % 1024 == 0 &&
         hidden <= kAtOnceHidden;
}

void Launch(const CudaMoeRouteParams& params, device::Stream& stream);

}  // namespace fathom::kernels
