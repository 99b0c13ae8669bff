#include <algorithm>

#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/moe_route/moe_route.h"
#include "model/layers.h"

namespace fathom::model {

template <typename T>
void RunMoe(StepContext<T>& step, int layer, const MoeWeights& weights) {
  const config::ModelConfig& c = step.config;
  Workspace<T>& ws = step.ws;
  const int64_t m = step.num_tokens();
  Linear(ws.h, m, weights.gate, ws.router_logits, step.stream);
  kernels::Launch(kernels::MoeRouteParams{.logits = ws.router_logits,
                                          .num_tokens = m,
                                          .num_experts = c.num_experts,
                                          .num_chosen = c.num_experts_per_token,
                                          .bias = weights.bias,
                                          .tid2eid = weights.tid2eid,
                                          .token_ids = ws.token_ids,
                                          .scaling = static_cast<float>(c.routed_scaling_factor),
                                          .expert_ids = ws.expert_ids,
                                          .weights = ws.expert_weights},
                  step.stream);
  if (!step.expert_ids.empty()) {
    const int64_t count = m * c.num_experts_per_token;
    std::copy_n(ws.expert_ids, count, step.expert_ids.begin() + layer * count);
  }
  if (step.recorder != nullptr) {
    const auto k = static_cast<size_t>(c.num_experts_per_token);
    for (int64_t t = 0; t < m; ++t) {
      step.recorder->OnRouting(layer, static_cast<int>(t),
                               {ws.expert_ids + t * c.num_experts_per_token, k});
    }
  }
  kernels::Launch(
      kernels::ExpertParams<T>{.x = Quantize(ws.h, m, c.hidden_size, ws.h_fp8, step.stream),
                               .num_tokens = m,
                               .experts = weights.experts,
                               .shared = &weights.shared,
                               .num_chosen = c.num_experts_per_token,
                               .expert_ids = ws.expert_ids,
                               .weights = ws.expert_weights,
                               .swiglu_limit = static_cast<float>(c.swiglu_limit),
                               .y = ws.y,
                               .workspace = ws.experts},
      step.stream);
}

template void RunMoe(StepContext<BFloat16>&, int, const MoeWeights&);
template void RunMoe(StepContext<float>&, int, const MoeWeights&);

}  // namespace fathom::model
