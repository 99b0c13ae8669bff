// How many tokens a request may generate after its prompt. Pure; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "api/api_error.h"

namespace fathom::api {

struct PromptBudget {
  // As asked; unset: the default, or what the context leaves.
  std::optional<int64_t> max_tokens = std::nullopt;
  std::optional<int64_t> default_max_tokens = std::nullopt;
  // Keeps the last N; -1: as many as the context takes.
  std::optional<int64_t> truncate_prompt_tokens = std::nullopt;
  int64_t max_model_len = 0;
  std::string_view param = "messages";  // the field that holds the prompt
  std::string_view place = "messages";  // the word for it in the message
};

// Cuts the prompt if asked to, and gives max_tokens, lowered to what the context leaves. A prompt
// that leaves no room for one token is refused with the text that clients look for, code
// context_length_exceeded.
Parsed<int> FitPrompt(const PromptBudget& budget, std::vector<int32_t>* prompt);

}  // namespace fathom::api
