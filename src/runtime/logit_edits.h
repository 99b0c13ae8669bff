// LogitEdits: what a request's sampling parameters do to a row of logits before a token is drawn.
// In order: allowed_token_ids and the grammar, bad_words, logit_bias, min_tokens; then repetition,
// frequency and presence penalties. A token that is ruled out gets -infinity. Pure functions of
// their arguments.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "request/sampling_params.h"

namespace fathom::runtime {

struct TokenHistory {
  std::span<const int32_t> prompt;
  std::span<const int32_t> output;
  size_t num_missing = 0;  // tokens at the output's end, when no edit depends on what they are
  size_t num_output() const { return output.size() + num_missing; }
};

// Whether EditLogits would leave the row as it is (a grammar aside).
bool EditsNothing(const request::SamplingParams& params, size_t num_output_tokens);

// Whether end and stop ids are ruled out, because the output is too short.
bool IsMinTokensPending(const request::SamplingParams& params, size_t num_output_tokens);
// Whether the last token of a bad word would complete it.
bool CompletesBadWord(const std::vector<int32_t>& word, std::span<const int32_t> output);

// What a request is told when nothing may follow.
Status NoTokenLeft();

// `mask`: bit t set for every token that the grammar allows; empty when it allows all. `counts`:
// [vocab], zero before and after. kInvalidArgument when no token is left.
Status EditLogits(const request::SamplingParams& params, const TokenHistory& history,
                  std::span<const int32_t> eos_token_ids, std::span<const uint32_t> mask,
                  std::span<float> logits, std::vector<int32_t>& counts);

}  // namespace fathom::runtime
