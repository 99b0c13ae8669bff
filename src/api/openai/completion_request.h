// CompletionRequest: the body of POST /v1/completions as a value: prompts as text, token ids or
// lists of either, and fill-in-the-middle by `suffix`. Pure but for the tokenizer; any thread.
//
// A text prompt is the whole prompt, written by the caller: special-token text in it is matched,
// and BOS is put in front unless it is there (or add_special_tokens is false). Token ids are taken
// as they are.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "api/generation_params.h"
#include "api/output_rules.h"

namespace fathom::api::openai {

struct CompletionPrompt {
  std::string text;  // as given; for token ids, their text when it is echoed
  std::vector<int32_t> token_ids;
};

struct CompletionRequest {
  std::string model;
  GenerationParams params;
  std::vector<CompletionPrompt> prompts;
  OutputRules rules;
};

// `body` is a JSON object.
Parsed<CompletionRequest> ParseCompletionRequest(const json::Value& body,
                                                 const ServerContext& context);

// The ids of a text prompt, as completions and /tokenize read it.
std::vector<int32_t> EncodeText(const std::string& text, bool add_bos,
                                const ServerContext& context);

}  // namespace fathom::api::openai
