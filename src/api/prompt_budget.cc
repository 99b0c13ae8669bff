#include "api/prompt_budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

namespace fathom::api {

Parsed<int> FitPrompt(const PromptBudget& budget, std::vector<int32_t>* prompt) {
  if (budget.truncate_prompt_tokens) {
    const int64_t keep = *budget.truncate_prompt_tokens < 0 ? budget.max_model_len - 1
                                                            : *budget.truncate_prompt_tokens;
    const auto size = static_cast<int64_t>(prompt->size());
    if (size > keep) prompt->erase(prompt->begin(), prompt->begin() + (size - keep));
  }
  const auto size = static_cast<int64_t>(prompt->size());
  const int64_t left = budget.max_model_len - size;
  if (left < 1) {
    const int64_t completion = budget.max_tokens.value_or(1);
    return BadRequest(
        fmt::format(
            "This model's maximum context length is {} tokens. However, you requested {} tokens "
            "({} in the {}, {} in the completion). Please reduce the length of the {} or "
            "completion.",
            budget.max_model_len, size + completion, size, budget.place, completion, budget.place),
        std::string(budget.param), "context_length_exceeded");
  }
  const int64_t asked = budget.max_tokens.value_or(budget.default_max_tokens.value_or(left));
  return static_cast<int>(std::min(asked, left));
}

}  // namespace fathom::api
