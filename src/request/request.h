// Request and TokenEvent: what goes into the engine and what comes out. A Request is immutable
// after Submit and owned by the engine; one Request makes one sequence (`n` choices are n
// Requests).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "request/sampling_params.h"
#include "request/token_constraint.h"

namespace fathom::request {

using RequestId = uint64_t;  // unique in a server's life

enum class FinishReason {
  kStop,       // an end token, or a stop id
  kLength,     // max_tokens or the context is full
  kCancelled,  // Cancel, or the reader went away
  kError,
};

struct Request {
  RequestId id = 0;
  std::vector<int32_t> prompt_token_ids;  // non-empty, in vocabulary, shorter than the context
  SamplingParams sampling;
  int priority = 0;        // lower runs first
  std::string session;     // fairness key; empty: a session of its own
  std::string cache_salt;  // part of every prefix hash
  TimePoint arrival;
  std::optional<TimePoint> deadline;  // past it the request ends with kError, wherever it is
  bool report_progress = false;       // events for the chunks of the prompt, too
  std::optional<int> data_rank;       // the data rank that runs it; unset: the engine chooses
  // Set: report the experts of every token that is run, from this token of the prompt on.
  std::optional<int32_t> routed_experts_start;
  std::shared_ptr<TokenConstraint> constraint;  // may be null
};

// Whether the choice of a token needs to know which tokens of the output came before.
inline bool DependsOnOutput(const Request& request) {
  const SamplingParams& p = request.sampling;
  return request.constraint != nullptr || !p.bad_words.empty() || p.repetition_penalty != 1.0 ||
         p.frequency_penalty != 0.0 || p.presence_penalty != 0.0;
}

struct TokenLogprob {
  int32_t token_id = 0;
  float logprob = 0;  // of the raw distribution, before temperature and filters; natural log
};

struct TokenLogprobs {
  TokenLogprob chosen;
  int rank = 0;                   // of the chosen token, from 1
  std::vector<TokenLogprob> top;  // best first
};

// One step's outcome for one request, in order. The last event has `finish_reason` set.
struct TokenEvent {
  std::vector<int32_t> token_ids;  // new tokens; an end token that stopped the sequence included
  std::vector<TokenLogprobs> logprobs;  // one per token when asked for
  // First event only: tokens 1.. of the prompt, when asked for.
  std::vector<TokenLogprobs> prompt_logprobs;
  // When asked for: [tokens, layers, experts per token] of the tokens that were run since the last
  // event, ids ascending. The newest token has not been run: altogether one row less than tokens.
  std::vector<uint16_t> routed_experts;
  std::optional<FinishReason> finish_reason;
  std::optional<int32_t> stop_token_id;  // the end or stop id that finished it
  int num_cached_tokens = 0;             // prompt tokens taken from the prefix cache
  // Of an event for a chunk of the prompt: prompt tokens computed or cached so far.
  std::optional<int> num_processed_tokens;
  Status error;  // with FinishReason::kError
};

// Where a request's events go. Called on the engine thread: must return at once and never throw;
// the engine drops its reference after the last event.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  virtual void OnEvent(TokenEvent event) = 0;
};

}  // namespace fathom::request
