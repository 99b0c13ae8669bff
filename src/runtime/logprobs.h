// Log-probabilities of one row of raw logits: before temperature, penalties and filters. Sums run
// in double, in the order of the vocabulary, so that a row gives the same numbers wherever it
// stands. Any thread.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "request/request.h"

namespace fathom::runtime {

// What a request is told when its logits are no distribution.
Status LogitsNotFinite();

// LogitsNotFinite when a logit is NaN or +infinity, or none is finite: such a row is no
// distribution.
Status CheckLogits(std::span<const float> logits);

// Of a row that passes CheckLogits: the token's log-probability and rank, and the `num_top` best
// tokens; of equal logits the lower id is better.
request::TokenLogprobs ComputeLogprobs(std::span<const float> logits, int32_t token_id,
                                       int num_top);

}  // namespace fathom::runtime
