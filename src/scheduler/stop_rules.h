// Stop rules by token: when a sequence ends. Stop strings are matched on text, in api/.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "request/request.h"
#include "scheduler/sequence.h"

namespace fathom::scheduler {

struct Stop {
  request::FinishReason reason = request::FinishReason::kLength;
  std::optional<int32_t> stop_token_id;
};

// Whether the last token of `sequence`, an output token, ends it. An end or stop id wins over the
// length. min_tokens is not looked at: the sampler gives no end token before them.
std::optional<Stop> CheckStop(const Sequence& sequence, std::span<const int32_t> eos_token_ids,
                              int64_t max_model_len);

}  // namespace fathom::scheduler
