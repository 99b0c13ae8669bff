#include <algorithm>
#include <numeric>

#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/moe_route/moe_route.h"
#include "model/layers.h"

namespace fathom::model {
namespace {

// Experts of `count` tokens of the workspace's rows from `first` on.
template <typename T>
void RunExperts(StepContext<T>& step, const MoeWeights& weights, const T* x, int64_t first,
                int64_t count, bool shared, T* y) {
  const config::ModelConfig& c = step.config;
  const int64_t k = c.num_experts_per_token;
  kernels::Launch(kernels::ExpertParams<T>{.x = x + first * c.hidden_size,
                                           .num_tokens = count,
                                           .hidden = c.hidden_size,
                                           .experts = weights.experts,
                                           .shared = shared ? &weights.shared : nullptr,
                                           .num_chosen = c.num_experts_per_token,
                                           .expert_ids = step.ws.expert_ids + first * k,
                                           .weights = step.ws.expert_weights + first * k,
                                           .swiglu_limit = static_cast<float>(c.swiglu_limit),
                                           .y = y + first * c.hidden_size,
                                           .workspace = step.ws.experts},
                  step.stream);
}

// A piece of a buffer of rows.
template <typename U>
std::span<U> Rows(U* rows, int64_t count, int64_t size) {
  return {rows, static_cast<size_t>(count * size)};
}

// The experts are spread over the data ranks too: every rank runs its own for the tokens of all,
// and takes back the sum for its own tokens.
template <typename T>
Status RunExpertsOfAll(StepContext<T>& step, const MoeWeights& weights, const T* x, int64_t first,
                       int64_t num_all) {
  Workspace<T>& ws = step.ws;
  const std::span<const int32_t> tokens_of = step.data_rank_tokens;
  const int64_t hidden = step.config.hidden_size, k = step.config.num_experts_per_token;
  std::copy_n(x, step.num_tokens() * hidden, ws.all_x + first * hidden);
  RETURN_IF_ERROR(step.ranks.GatherDataRanks(Rows(ws.all_x, num_all, hidden), hidden, tokens_of));
  RETURN_IF_ERROR(step.ranks.GatherDataRanks(Rows(ws.expert_ids, num_all, k), k, tokens_of));
  RETURN_IF_ERROR(step.ranks.GatherDataRanks(Rows(ws.expert_weights, num_all, k), k, tokens_of));
  const int64_t end = first + step.num_tokens();
  RunExperts(step, weights, ws.all_x, 0, first, false, ws.all_y);
  RunExperts(step, weights, ws.all_x, first, step.num_tokens(), true, ws.all_y);
  RunExperts(step, weights, ws.all_x, end, num_all - end, false, ws.all_y);
  RETURN_IF_ERROR(step.ranks.SumOverStage(Rows(ws.all_y, num_all, hidden), hidden, tokens_of));
  std::copy_n(ws.all_y + first * hidden, step.num_tokens() * hidden, ws.y);
  return OkStatus();
}

}  // namespace

template <typename T>
Status RunMoe(StepContext<T>& step, int layer, const MoeWeights& weights) {
  const config::ModelConfig& c = step.config;
  Workspace<T>& ws = step.ws;
  const int64_t m = step.num_tokens(), k = c.num_experts_per_token;
  const std::span<const int32_t> tokens_of = step.data_rank_tokens;
  const auto own = tokens_of.begin() + step.ranks.data_rank();
  const int64_t first = std::accumulate(tokens_of.begin(), own, int64_t{0});
  int32_t* const expert_ids = ws.expert_ids + first * k;
  if (m > 0) Linear(ws.h, m, weights.gate, ws.router_logits, step.stream);
  kernels::Launch(kernels::MoeRouteParams{.logits = ws.router_logits,
                                          .num_tokens = m,
                                          .num_experts = c.num_experts,
                                          .num_chosen = c.num_experts_per_token,
                                          .bias = weights.bias,
                                          .tid2eid = weights.tid2eid,
                                          .token_ids = ws.token_ids,
                                          .scaling = static_cast<float>(c.routed_scaling_factor),
                                          .expert_ids = expert_ids,
                                          .weights = ws.expert_weights + first * k},
                  step.stream);
  if (!step.expert_ids.empty()) {
    std::copy_n(expert_ids, m * k, step.expert_ids.begin() + layer * m * k);
  }
  if (step.recorder != nullptr) {
    for (int64_t t = 0; t < m; ++t) {
      step.recorder->OnRouting(layer, static_cast<int>(t),
                               {expert_ids + t * k, static_cast<size_t>(k)});
    }
  }
  const T* x = Quantize(ws.h, m, c.hidden_size, ws.h_fp8, step.stream);
  if (step.ranks.num_data_ranks() > 1) {
    const int64_t num_all = std::accumulate(own, tokens_of.end(), first);
    return RunExpertsOfAll(step, weights, x, first, num_all);
  }
  RunExperts(step, weights, x, 0, m, true, ws.y);
  return step.ranks.SumOverTensorRanks(Rows(ws.y, m, c.hidden_size));
}

template Status RunMoe(StepContext<BFloat16>&, int, const MoeWeights&);
template Status RunMoe(StepContext<float>&, int, const MoeWeights&);

}  // namespace fathom::model
