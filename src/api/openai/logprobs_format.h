// Log-probabilities as OpenAI shows them. Pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "json/json.h"
#include "request/request.h"
#include "text/tokenizer.h"

namespace fathom::api::openai {

class LogprobsFormat {
 public:
  // `as_token_ids`: tokens are shown as "token_id:N".
  LogprobsFormat(const text::Tokenizer& tokenizer, bool as_token_ids)
      : tokenizer_(tokenizer), as_token_ids_(as_token_ids) {}

  // The text of one token; bytes that are no whole character show as U+FFFD.
  std::string TokenText(int32_t id) const;
  // Chat: one entry {token, logprob, bytes, top_logprobs} per token.
  std::vector<json::Value> ChatEntries(const std::vector<request::TokenLogprobs>& logprobs) const;
  // vLLM's prompt_logprobs: null, then {id: {logprob, rank, decoded_token}} per prompt token.
  json::Value PromptLogprobs(const std::vector<request::TokenLogprobs>& logprobs) const;

 private:
  json::Value ChatEntry(const request::TokenLogprob& logprob) const;

  const text::Tokenizer& tokenizer_;
  const bool as_token_ids_;
};

// Log-probabilities of a text completion: four lists, one item per token; text_offset counts
// characters and goes on from call to call.
class CompletionLogprobs {
 public:
  CompletionLogprobs(const LogprobsFormat& format, int num_top)
      : format_(format), num_top_(num_top) {}

  void AddUnscored(int32_t token_id);  // the first token of an echoed prompt
  void Add(const request::TokenLogprobs& logprobs);
  bool empty() const { return tokens_.empty(); }
  // What was added since the last call.
  json::Value Take();

 private:
  void AddToken(int32_t token_id);

  const LogprobsFormat& format_;
  const int num_top_;
  int64_t offset_ = 0;
  std::vector<json::Value> tokens_, token_logprobs_, top_logprobs_, text_offset_;
};

}  // namespace fathom::api::openai
