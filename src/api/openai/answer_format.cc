#include "api/openai/answer_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fathom::api::openai {

using json::Value;

namespace {

std::string_view ErrorType(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 429:
      return "rate_limit_error";
    case 500:
    case 503:
      return "server_error";
    default:
      return "invalid_request_error";
  }
}

}  // namespace

Value Integer(int64_t value) { return Value::Number(value); }
Value Text(std::string_view text) { return Value::String(std::string(text)); }

Value IntegerArray(const std::vector<int32_t>& values) {
  std::vector<Value> items;
  items.reserve(values.size());
  for (const int32_t value : values) items.push_back(Integer(value));
  return Value::Array(std::move(items));
}

Value ErrorBody(const ApiError& error) {
  return Value::Object(
      {{"error", Value::Object({{"message", Text(error.message)},
                                {"type", Text(ErrorType(error.status))},
                                {"param", error.param.empty() ? Value() : Text(error.param)},
                                {"code", error.code.empty() ? Value() : Text(error.code)}})}});
}

http::Response JsonResponse(const Value& body) { return {.headers = {}, .body = json::Dump(body)}; }

http::Response ErrorResponse(const ApiError& error) {
  http::Response response = JsonResponse(ErrorBody(error));
  response.status = error.status;
  if (error.status == 429 || error.status == 503) response.headers.push_back({"Retry-After", "1"});
  if (error.status == 401) response.headers.push_back({"WWW-Authenticate", "Bearer"});
  return response;
}

std::string Envelope::OpenObject() const {
  return fmt::format(R"({{"id":{},"object":{},"created":{},"model":{})", json::Quote(id),
                     json::Quote(object), created, json::Quote(model));
}

void UsageTally::Update(size_t choice_idx, const ChoiceText& text) {
  choices_[choice_idx] = {text.num_tokens(), text.num_reasoning_tokens(), text.num_cached_tokens()};
}

Value UsageTally::ToJson() const {
  int64_t completion = 0;
  int64_t reasoning = 0;
  int64_t cached = 0;
  for (size_t i = 0; i < choices_.size(); ++i) {
    completion += choices_[i].completion;
    reasoning += choices_[i].reasoning;
    if (i % choices_per_prompt_ == 0) cached += choices_[i].cached;
  }
  return Value::Object(
      {{"prompt_tokens", Integer(num_prompt_tokens_)},
       {"completion_tokens", Integer(completion)},
       {"total_tokens", Integer(num_prompt_tokens_ + completion)},
       {"prompt_tokens_details", Value::Object({{"cached_tokens", Integer(cached)}})},
       {"completion_tokens_details", Value::Object({{"reasoning_tokens", Integer(reasoning)}})},
       {"prompt_cache_hit_tokens", Integer(cached)},
       {"prompt_cache_miss_tokens", Integer(num_prompt_tokens_ - cached)}});
}

std::string_view FinishReasonText(const ChoiceFinish& finish) {
  if (finish.is_length) return "length";
  return finish.has_tool_calls ? "tool_calls" : "stop";
}

Value StopReason(const ChoiceFinish& finish, const std::vector<int32_t>& own_stop_ids) {
  if (finish.stop_string) return Text(*finish.stop_string);
  const bool is_clients =
      finish.stop_token_id && std::find(own_stop_ids.begin(), own_stop_ids.end(),
                                        *finish.stop_token_id) == own_stop_ids.end();
  return is_clients ? Integer(*finish.stop_token_id) : Value();
}

}  // namespace fathom::api::openai
