#include "api/responses/response_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "api/auth.h"
#include "api/identifiers.h"
#include "api/responses/input_items.h"

namespace fathom::api::responses {
namespace {

using json::Value;

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

void RefuseUnserved(FieldReader* fields) {
  if (fields->Find("conversation") != nullptr)
    fields->Fail("conversation", "conversation is not supported; replay full input instead");
  if (fields->Bool("background").value_or(false))
    fields->Fail("background", "background is not supported: stream the response instead");
  if (fields->Find("prompt") != nullptr)
    fields->Fail("prompt", "prompt templates are not supported: send instructions and input");
  if (fields->Integer("top_logprobs", 0, 20).value_or(0) > 0)
    fields->Fail("top_logprobs", "top_logprobs is not served here: use /v1/chat/completions");
}

GenerationParams ReadParams(FieldReader* fields, const ServerContext& context) {
  GenerationParams params;
  request::SamplingParams& sampling = params.sampling;
  sampling = context.options.default_sampling;
  sampling.temperature = fields->Number("temperature", 0, 2).value_or(sampling.temperature);
  sampling.top_p = fields->Number("top_p", 0, 1).value_or(sampling.top_p);
  if (sampling.top_p == 0) fields->Fail("top_p", "top_p must be greater than 0");
  params.max_tokens = fields->Integer("max_output_tokens", 1, kMaxInt);
  params.stream = fields->Bool("stream").value_or(false);
  params.session = SanitizeClientId(fields->String("prompt_cache_key").value_or(""));
  params.cache_salt = ReadCacheSalt(fields);
  // A model that begins another turn by itself has ended its own.
  const text::SpecialTokens& special = context.model.special_tokens;
  sampling.stop_token_ids = {special.user, special.assistant};
  return params;
}

void ReadInclude(FieldReader* fields, ResponseRequest* request) {
  const Value* include = fields->Array("include");
  if (include == nullptr) return;
  for (const Value& item : include->items()) {
    if (item.is_string() && item.AsString() == "reasoning.encrypted_content")
      request->wants_encrypted = true;
  }
}

// reasoning.effort and .summary, and chat_template_kwargs, in the terms of thinking_mode.h.
ThinkingChoice ReadThinkingChoice(FieldReader* fields, const ServerContext& context,
                                  bool* wants_summary) {
  Value wish = Value::Object();
  if (const Value* reasoning = fields->Object("reasoning")) {
    FieldReader reader(*reasoning);
    if (const Value* effort = reader.Find("effort")) wish.Set("reasoning_effort", *effort);
    *wants_summary =
        reader.Find("summary") != nullptr || reader.Find("generate_summary") != nullptr;
  }
  if (const Value* kwargs = fields->Object("chat_template_kwargs"))
    wish.Set("chat_template_kwargs", *kwargs);
  FieldReader reader(wish);
  const ThinkingChoice choice = ReadThinking(&reader, context.options.default_chat_template_kwargs,
                                             context.options.effort_profile);
  if (!reader.ok()) fields->Fail(*reader.error());
  return choice;
}

void ReadTextFormat(FieldReader* fields, OutputRules* rules) {
  const Value* text = fields->Object("text");
  const Value* format = text == nullptr ? nullptr : text->Find("format");
  if (format == nullptr || format->is_null()) return;
  Parsed<std::optional<Value>> read = ReadFormat(*format, "text.format");
  if (!read.ok()) return fields->Fail(read.error());
  rules->content = *std::move(read);
}

// What the response repeats of its request, with the values that hold where none was sent.
Value Echo(const Value& body, const ResponseRequest& request) {
  const auto given = [&body](std::string_view key, Value otherwise) {
    const Value* value = body.Find(key);
    return value == nullptr || value->is_null() ? std::move(otherwise) : *value;
  };
  const Value no_reasoning = Value::Object({{"effort", Value()}, {"summary", Value()}});
  const Value text = Value::Object({{"format", Value::Object({{"type", Value::String("text")}})}});
  Value echo = Value::Object();
  for (const char* key : {"instructions", "max_output_tokens", "max_tool_calls",
                          "previous_response_id", "prompt_cache_key", "safety_identifier", "user"})
    echo.Set(key, given(key, Value()));
  echo.Set("background", Value::Bool(false));
  echo.Set("metadata", given("metadata", Value::Object()));
  echo.Set("parallel_tool_calls", Value::Bool(request.tool_use.choice.parallel));
  echo.Set("reasoning", given("reasoning", no_reasoning));
  echo.Set("service_tier", Value::String("default"));
  echo.Set("store", Value::Bool(request.is_stored));
  echo.Set("temperature", Value::Number(request.params.sampling.temperature));
  echo.Set("text", given("text", text));
  echo.Set("tool_choice", given("tool_choice", Value::String("auto")));
  echo.Set("tools", given("tools", Value::Array()));
  echo.Set("top_logprobs", Value::Number(int64_t{0}));
  echo.Set("top_p", Value::Number(request.params.sampling.top_p));
  echo.Set("truncation", given("truncation", Value::String("disabled")));
  return echo;
}

}  // namespace

Parsed<ResponseRequest> ParseResponseRequest(const http::Request& http_request, const Value& body,
                                             const ServerContext& context) {
  FieldReader fields(body);
  ResponseRequest request;
  Parsed<std::string> model = ReadModelName(&fields, context);
  if (!model.ok()) return model.error();
  request.model = std::move(*model);
  RefuseUnserved(&fields);
  request.params = ReadParams(&fields, context);
  request.scope = CallerScope(http_request, request.params.cache_salt);
  BindToCaller(http_request, context, &request.params);
  request.conversation.thinking = ReadThinkingChoice(&fields, context, &request.wants_summary);
  request.tool_use = ReadTools(&fields, context.options.limits);
  request.conversation.tools = request.tool_use.tools;
  ReadTextFormat(&fields, &request.rules);
  ReadInclude(&fields, &request);
  request.is_stored = fields.Bool("store").value_or(true);
  request.previous_id = fields.String("previous_response_id").value_or("");
  const std::string instructions = fields.String("instructions").value_or("");
  if (!fields.ok()) return *fields.error();
  if (MaybeError error =
          ReadCallRules(request.tool_use.tools, request.tool_use.choice, &request.rules))
    return *std::move(error);

  ResponseStore& store = *context.responses;
  const RequestLimits& limits = context.options.limits;
  Parsed<Value> input = ReadInput(fields.Find("input"), store, request.scope, limits);
  if (!input.ok()) return input.error();
  request.input = *std::move(input);
  Parsed<std::vector<Value>> earlier =
      EarlierItems(request.previous_id, store, request.scope, limits);
  if (!earlier.ok()) return earlier.error();
  Parsed<TurnList> turns =
      ReadTurns(instructions, *earlier, request.input, *context.reasoning_seal, request.scope);
  if (!turns.ok()) return turns.error();
  request.conversation.messages = turns->Take();
  request.echo = Echo(body, request);
  return request;
}

}  // namespace fathom::api::responses
