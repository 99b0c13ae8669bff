#include "scheduler/stop_rules.h"

#include <algorithm>

namespace fathom::scheduler {

std::optional<Stop> CheckStop(const Sequence& sequence, std::span<const int32_t> eos_token_ids,
                              int64_t max_model_len) {
  const request::SamplingParams& sampling = sequence.request.sampling;
  const int32_t token_id = sequence.token_ids.back();
  const auto is_in = [token_id](std::span<const int32_t> ids) {
    return std::find(ids.begin(), ids.end(), token_id) != ids.end();
  };
  if (!sampling.ignore_eos && (is_in(eos_token_ids) || is_in(sampling.stop_token_ids))) {
    return Stop{request::FinishReason::kStop, token_id};
  }
  if (sequence.num_output_tokens() >= sampling.max_tokens ||
      sequence.num_tokens() >= max_model_len) {
    return Stop{request::FinishReason::kLength, std::nullopt};
  }
  return std::nullopt;
}

}  // namespace fathom::scheduler
