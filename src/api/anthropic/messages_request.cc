#include "api/anthropic/messages_request.h"

#include <fmt/format.h>

#include <limits>
#include <optional>
#include <utility>

#include "api/anthropic/content.h"
#include "api/anthropic/wire.h"
#include "api/auth.h"
#include "api/identifiers.h"

namespace fathom::api::anthropic {
namespace {

using json::Value;

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

std::vector<std::string> ReadStopSequences(FieldReader* fields, const RequestLimits& limits) {
  const Value* list = fields->Array("stop_sequences");
  std::vector<std::string> out;
  if (list == nullptr) return out;
  if (list->items().size() > static_cast<size_t>(limits.max_stop_strings)) {
    fields->Fail("stop_sequences", fmt::format("stop_sequences: may have at most {} items, got {}",
                                               limits.max_stop_strings, list->items().size()));
    return out;
  }
  for (const Value& item : list->items()) {
    const bool fits = item.is_string() && !item.AsString().empty() &&
                      item.AsString().size() <= static_cast<size_t>(limits.max_stop_string_bytes);
    if (!fits) {
      fields->Fail("stop_sequences", fmt::format("stop_sequences: must be strings of 1 to {} bytes",
                                                 limits.max_stop_string_bytes));
      return out;
    }
    out.push_back(item.AsString());
  }
  return out;
}

GenerationParams ReadParams(FieldReader* fields, const ServerContext& context,
                            bool needs_max_tokens) {
  GenerationParams params;
  params.sampling = context.options.default_sampling;
  params.max_tokens = fields->Integer("max_tokens", 1, kMaxInt);
  if (needs_max_tokens && !params.max_tokens)
    fields->Fail("max_tokens", "max_tokens: Field required");
  request::SamplingParams& sampling = params.sampling;
  sampling.temperature = fields->Number("temperature", 0, 2).value_or(sampling.temperature);
  sampling.top_p = fields->Number("top_p", 0, 1).value_or(sampling.top_p);
  if (sampling.top_p == 0) fields->Fail("top_p", "top_p must be greater than 0");
  const auto top_k = fields->Integer("top_k", -1, kMaxInt);
  if (top_k) sampling.top_k = static_cast<int>(std::max<int64_t>(*top_k, 0));
  params.stop = ReadStopSequences(fields, context.options.limits);
  params.stream = fields->Bool("stream").value_or(false);
  params.cache_salt = ReadCacheSalt(fields);
  // A model that begins another turn by itself has ended its own.
  const text::SpecialTokens& special = context.model.special_tokens;
  sampling.stop_token_ids = {special.user, special.assistant};
  return params;
}

// Requests of one session share its fair part of the server.
std::string SessionOf(const http::Request& request, const Value& body) {
  if (const std::string* id = request.FindHeader("x-claude-code-session-id"))
    return SanitizeClientId(*id);
  const Value* metadata = body.Find("metadata");
  const Value* user = metadata == nullptr ? nullptr : metadata->Find("user_id");
  return user != nullptr && user->is_string() ? SanitizeClientId(user->AsString()) : "";
}

// thinking and output_config.effort, in the terms of thinking_mode.h. An effort alone turns nothing
// on.
ThinkingChoice ReadThinkingChoice(FieldReader* fields, const ServerContext& context,
                                  bool* omits_thinking) {
  const ApiOptions& options = context.options;
  Value wish = Value::Object();
  if (const Value* thinking = fields->Object("thinking")) {
    wish.Set("thinking", *thinking);
    const Value* type = thinking->Find("type");
    const bool is_between_tools =
        type != nullptr && type->is_string() && type->AsString() == "between_tools";
    if (is_between_tools) wish.Find("thinking")->Set("type", Value::String("adaptive"));
    const Value* display = thinking->Find("display");
    *omits_thinking =
        display != nullptr && display->is_string() && display->AsString() == "omitted";
  } else {
    FieldReader nothing(wish);
    const ThinkingChoice by_default =
        ReadThinking(&nothing, options.default_chat_template_kwargs, options.effort_profile);
    const bool on = by_default.mode == text::ThinkingMode::kThinking;
    wish.Set("thinking", Value::Object({{"type", Value::String(on ? "enabled" : "disabled")}}));
  }
  const Value* config = fields->Object("output_config");
  const Value* effort = config == nullptr ? nullptr : config->Find("effort");
  if (effort != nullptr && !effort->is_null()) wish.Set("reasoning_effort", *effort);
  FieldReader reader(wish);
  const ThinkingChoice choice =
      ReadThinking(&reader, options.default_chat_template_kwargs, options.effort_profile);
  if (!reader.ok()) {
    const bool is_effort = reader.error()->param == "reasoning_effort";
    fields->Fail(is_effort ? "output_config" : "thinking",
                 is_effort ? "output_config.effort: must be low, medium, high, xhigh or max"
                           : reader.error()->message);
  }
  return choice;
}

void ReadOutputFormat(FieldReader* fields, OutputRules* rules) {
  const Value* config = fields->Object("output_config");
  const Value* format = config == nullptr ? nullptr : config->Find("format");
  if (format == nullptr || format->is_null()) format = fields->Object("output_format");
  if (format == nullptr) return;
  Parsed<std::optional<Value>> read = ReadFormat(*format, "output_config.format");
  if (!read.ok()) return fields->Fail(read.error());
  rules->content = *std::move(read);
}

}  // namespace

Parsed<MessagesRequest> ParseMessagesRequest(const http::Request& http_request, const Value& body,
                                             const ServerContext& context, bool needs_max_tokens) {
  FieldReader fields(body);
  MessagesRequest request;
  request.model = fields.String("model").value_or("");
  if (request.model.empty()) fields.Fail("model", "model: Field required");
  if (!fields.ok()) return *fields.error();
  if (MaybeError error = CheckModelName(request.model, context)) return *std::move(error);
  request.params = ReadParams(&fields, context, needs_max_tokens);
  request.params.session = SessionOf(http_request, body);
  request.replay_scope = CallerScope(http_request, request.params.cache_salt);
  BindToCaller(http_request, context, &request.params);
  Conversation& conversation = request.conversation;
  conversation.thinking = ReadThinkingChoice(&fields, context, &request.omits_thinking);
  request.tool_use = ReadTools(&fields, context.options.limits);
  conversation.tools = request.tool_use.tools;
  ReadOutputFormat(&fields, &request.rules);
  if (!fields.ok()) return *fields.error();
  if (MaybeError error =
          ReadCallRules(request.tool_use.tools, request.tool_use.choice, &request.rules))
    return *std::move(error);
  Parsed<TurnList> turns =
      ReadTurns(fields.Find("system"), fields.Find("messages"), context.options.limits,
                *context.reasoning_seal, request.replay_scope);
  if (!turns.ok()) return turns.error();
  request.continues_last = turns->continues_last();
  // An answer that goes on with given text has no reasoning to come.
  if (request.continues_last && !turns->last_has_reasoning())
    conversation.thinking.mode = text::ThinkingMode::kChat;
  conversation.messages = turns->Take();
  return request;
}

Parsed<std::vector<int32_t>> EncodePrompt(const MessagesRequest& request,
                                          const ServerContext& context) {
  return EncodeConversation(request.conversation, context, request.replay_scope);
}

}  // namespace fathom::api::anthropic
