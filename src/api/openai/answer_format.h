// What OpenAI's answers have in common: the envelope, usage, finish reasons, errors. Pure; any
// thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "api/api_error.h"
#include "api/choice_text.h"
#include "http/message.h"
#include "json/json.h"

namespace fathom::api::openai {

// {"error":{"message","type","param","code"}}
json::Value ErrorBody(const ApiError& error);
// With Retry-After where trying again helps, and WWW-Authenticate where a key is missing.
http::Response ErrorResponse(const ApiError& error);
http::Response JsonResponse(const json::Value& body);

// The members that every chunk of an answer repeats: `{"id":…,"object":…,"created":…,"model":…`,
// left open.
struct Envelope {
  std::string id;
  std::string object;
  int64_t created = 0;
  std::string model;

  std::string OpenObject() const;
};

// Token counts of one answer: the prompts once, the choices summed.
class UsageTally {
 public:
  // `choices_per_prompt`: neighbours that share a prompt, and so count its cached tokens once.
  UsageTally(int64_t num_prompt_tokens, size_t num_choices, size_t choices_per_prompt)
      : num_prompt_tokens_(num_prompt_tokens),
        choices_per_prompt_(choices_per_prompt),
        choices_(num_choices) {}

  void Update(size_t choice_idx, const ChoiceText& text);
  json::Value ToJson() const;

 private:
  struct Counts {
    int completion = 0;
    int reasoning = 0;
    int cached = 0;
  };
  const int64_t num_prompt_tokens_;
  const size_t choices_per_prompt_;
  std::vector<Counts> choices_;
};

std::string_view FinishReasonText(const ChoiceFinish& finish);
// The stop string, or the id of `stop_token_ids` that stopped it, or null. Ids of the model's own
// are null.
json::Value StopReason(const ChoiceFinish& finish, const std::vector<int32_t>& own_stop_ids);

json::Value IntegerArray(const std::vector<int32_t>& values);
json::Value Integer(int64_t value);
json::Value Text(std::string_view text);

}  // namespace fathom::api::openai
