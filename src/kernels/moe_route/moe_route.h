// Which experts a token goes to, and with what weights. s = sqrt(softplus(logit)), FP32. Score
// routing takes the top k of s + bias (ties: the lower id); hash routing takes tid2eid[token].
// Weights are the chosen s over their sum, times routed_scaling_factor.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace fathom::kernels {

struct MoeRouteParams {
  float* logits = nullptr;  // [num_tokens, num_experts]; replaced by s
  int64_t num_tokens = 0;
  int num_experts = 0;
  int num_chosen = 0;                  // k
  const float* bias = nullptr;         // [num_experts], score routing
  const int32_t* tid2eid = nullptr;    // [vocab, k], hash routing; then bias is null
  const int32_t* token_ids = nullptr;  // [num_tokens], hash routing
  float scaling = 1;
  int32_t* expert_ids = nullptr;  // [num_tokens, k], ascending
  float* weights = nullptr;       // [num_tokens, k]
};

void Launch(const MoeRouteParams& params, device::Stream& stream);

}  // namespace fathom::kernels
