// SamplingParams: how one sequence's tokens are chosen. A value; validated in api/ (ranges) before
// a Request exists. Names and meanings are OpenAI's and vLLM's.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace fathom::request {

struct SamplingParams {
  double temperature = 1.0;  // 0: greedy
  double top_p = 1.0;        // (0, 1]
  int top_k = 0;             // 0: off
  double min_p = 0.0;        // [0, 1]; 0: off
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  double repetition_penalty = 1.0;
  std::vector<std::pair<int32_t, float>> logit_bias;  // (token id, bias), ids unique
  std::vector<int32_t> allowed_token_ids;             // empty: all
  std::vector<std::vector<int32_t>> bad_words;        // token sequences never completed
  uint64_t seed = 0;                                  // api/ draws one where the client gave none

  int max_tokens = 16;
  int min_tokens = 0;
  bool ignore_eos = false;              // ignores every stop id; stop strings still stop
  std::vector<int32_t> stop_token_ids;  // besides the model's own
  // Set: report the sampled token's log-probability and this many best.
  std::optional<int> num_logprobs;
  std::optional<int> num_prompt_logprobs;
};

}  // namespace fathom::request
