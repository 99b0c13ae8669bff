#include "runtime/logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace fathom::runtime {
namespace {

// What clients can parse: no infinity.
constexpr double kLogprobFloor = -9999;

}  // namespace

Status LogitsNotFinite() {
  return InternalError("the model's logits are not finite: this request cannot go on");
}

Status CheckLogits(std::span<const float> logits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  bool finite = false;
  for (const float x : logits) {
    if (!(x < kInfinity)) {  // NaN compares false
      finite = false;
      break;
    }
    finite |= x > -kInfinity;
  }
  return finite ? OkStatus() : LogitsNotFinite();
}

request::TokenLogprobs ComputeLogprobs(std::span<const float> logits, int32_t token_id,
                                       int num_top) {
  // Relative to the largest logit, however large that is.
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - max);
  const double log_sum = std::log(sum);
  const auto logprob_of = [&](int32_t id) {
    const double logprob = logits[static_cast<size_t>(id)] - max - log_sum;
    return request::TokenLogprob{id, static_cast<float>(std::max(kLogprobFloor, logprob))};
  };
  request::TokenLogprobs out;
  out.chosen = logprob_of(token_id);
  const float chosen = logits[static_cast<size_t>(token_id)];
  out.rank = 1;
  for (size_t i = 0; i < logits.size(); ++i) {
    const bool better =
        logits[i] > chosen || (logits[i] == chosen && static_cast<int32_t>(i) < token_id);
    out.rank += better ? 1 : 0;
  }
  if (num_top <= 0) return out;

  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto end = ids.begin() + std::min<int64_t>(num_top, static_cast<int64_t>(ids.size()));
  std::partial_sort(ids.begin(), end, ids.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  });
  for (auto it = ids.begin(); it != end; ++it) out.top.push_back(logprob_of(*it));
  return out;
}

}  // namespace fathom::runtime
