// Sampling on a GPU: the next token of each row of logits, and its log-probabilities. The meaning
// is runtime/sampler.h's, which is the reference: edits (logit_edits.h), greedy, or temperature,
// min_p, top_k, top_p and a draw. A row's result depends on its logits and its parameters alone.
//
// Weights are exp((logit - best) / temperature) in multiples of 2^-44 and their sums exact, so a
// draw differs from the reference's only where the random number, or top_p, meets the boundary
// between two tokens within 2^-45 of the best weight for each token of the vocabulary. Tokens are
// ordered by logit, then id; the reference's order, by weight, is another one only where unequal
// logits have equal weights (temperatures above 10^8).
#pragma once

#include <cstdint>

#include "device/device.h"

namespace fathom::kernels {

inline constexpr int kMaxTopLogprobs = 20;
// In place of a token id.
inline constexpr int32_t kLogitsNotFinite = -1;
inline constexpr int32_t kNoTokenLeft = -2;

// What happens to one token's logit. In a row every token has one edit at most.
struct LogitEdit {
  static constexpr uint32_t kRuledOut = 1;
  static constexpr uint32_t kStop = 2;      // ruled out, unless nothing else is left
  static constexpr uint32_t kRepeated = 4;  // repetition_penalty
  int32_t token_id = 0;                     // in the vocabulary
  float bias = 0;
  int32_t count = 0;  // in the output: frequency_penalty and presence_penalty
  uint32_t flags = 0;
};

struct SamplingRow {
  double temperature = 0;  // 0: greedy
  double top_p = 1;
  double min_p = 0;
  double uniform = 0;  // the random number, in [0, 1)
  double repetition_penalty = 1;
  double frequency_penalty = 0;
  double presence_penalty = 0;
  int32_t top_k = 0;  // 0: off
  int32_t logits_row = 0;
  int32_t mask_row = -1;  // of `masks`; -1: every token is allowed
  int32_t first_edit = 0;
  int32_t num_edits = 0;
  int32_t num_logprobs = -1;  // best ones to report, at most kMaxTopLogprobs; -1: none at all
};

struct TokenScore {
  int32_t token_id = 0;
  float logprob = 0;
};

// The fields after token_id are written when the row asks for log-probabilities.
struct SampledRow {
  int32_t token_id = 0;  // or one of the negative values above
  int32_t rank = 0;      // from 1
  float logprob = 0;
  TokenScore top[kMaxTopLogprobs];  // best first
};

struct CudaSamplingParams {
  const float* logits = nullptr;  // [.., vocab]
  int64_t vocab = 0;
  int num_rows = 0;
  const SamplingRow* rows = nullptr;  // [num_rows]
  const LogitEdit* edits = nullptr;
  const uint32_t* masks = nullptr;  // [.., ceil(vocab / 32)], bit t: token t is allowed
  SampledRow* results = nullptr;    // [num_rows], device or pinned host memory
  int32_t* token_ids = nullptr;     // [num_rows]: the tokens once more; 0 for a row that failed
};

// The largest vocabulary that a row's blocks hold.
int64_t MaxSamplingVocab();

void Launch(const CudaSamplingParams& params, device::Stream& stream);

}  // namespace fathom::kernels
