#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "kernels/moe_route/moe_route.h"

namespace fathom::kernels {
namespace {

// log(1 + e^x) without overflow. In double precision: rounded once to FP32, it does not depend on
// how a C library rounds.
float Softplus(float x) {
  const auto wide = static_cast<double>(x);
  return static_cast<float>(std::max(wide, 0.0) + std::log1p(std::exp(-std::fabs(wide))));
}

// The k best of s + bias, best first. Experts already chosen are in ids[0, n).
void ChooseBest(const float* s, const MoeRouteParams& p, int32_t* ids) {
  for (int n = 0; n < p.num_chosen; ++n) {
    int best = -1;
    float best_score = 0;
    for (int e = 0; e < p.num_experts; ++e) {
      const float score = s[e] + p.bias[e];
      if (best >= 0 && !(score > best_score)) continue;
      if (std::find(ids, ids + n, e) != ids + n) continue;
      best = e;
      best_score = score;
    }
    ids[n] = best;
  }
}

void RouteToken(const MoeRouteParams& p, int64_t t) {
  float* s = p.logits + t * p.num_experts;
  for (int e = 0; e < p.num_experts; ++e) s[e] = std::sqrt(Softplus(s[e]));
  int32_t* ids = p.expert_ids + t * p.num_chosen;
  if (p.tid2eid != nullptr) {
    const int32_t* row = p.tid2eid + int64_t{p.token_ids[t]} * p.num_chosen;
    std::copy(row, row + p.num_chosen, ids);
  } else {
    ChooseBest(s, p, ids);
  }
  float sum = 0;
  for (int i = 0; i < p.num_chosen; ++i) sum = sum + s[ids[i]];
  std::sort(ids, ids + p.num_chosen);
  float* weights = p.weights + t * p.num_chosen;
  for (int i = 0; i < p.num_chosen; ++i) weights[i] = s[ids[i]] / sum * p.scaling;
}

}  // namespace

void Launch(const MoeRouteParams& p, device::Stream& stream) {
  CHECK_NE(p.bias == nullptr, p.tid2eid == nullptr);
  CHECK_LE(p.num_chosen, p.num_experts);
  stream.thread_pool().ParallelFor(p.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) RouteToken(p, t);
  });
}

}  // namespace fathom::kernels
