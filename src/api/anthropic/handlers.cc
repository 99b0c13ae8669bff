#include "api/anthropic/handlers.h"

#include <fmt/format.h>

#include <ctime>
#include <utility>

#include "api/anthropic/message_answer.h"
#include "api/anthropic/messages_request.h"
#include "api/anthropic/wire.h"
#include "api/openai/generation_start.h"
#include "api/prompt_budget.h"
#include "api/request_body.h"

namespace fathom::api::anthropic {
namespace {

using json::Value;

// The text by which Claude Code knows that it has to shorten the conversation.
ApiError PromptTooLong(size_t num_tokens, int64_t max_model_len) {
  return BadRequest(
      fmt::format("prompt is too long: {} tokens > {} maximum", num_tokens, max_model_len - 1),
      "messages", "context_length_exceeded");
}

Parsed<MessagesRequest> ReadRequest(const ServerContext& context, const http::Request& request,
                                    bool needs_max_tokens) {
  Parsed<Value> body = ReadJsonObject(request, context.options.limits.json);
  if (!body.ok()) return body.error();
  return ParseMessagesRequest(request, *body, context, needs_max_tokens);
}

// A request that has been read and rendered.
struct PreparedMessages {
  MessagesRequest request;
  std::vector<int32_t> prompt;
  int max_tokens = 0;
  bool in_reasoning = false;
};

Parsed<PreparedMessages> Prepare(const ServerContext& context, const http::Request& http_request) {
  Parsed<MessagesRequest> request = ReadRequest(context, http_request, true);
  if (!request.ok()) return request.error();
  Parsed<std::vector<int32_t>> prompt = EncodePrompt(*request, context);
  if (!prompt.ok()) return prompt.error();
  const Parsed<int> max_tokens = FitPrompt(
      {.max_tokens = request->params.max_tokens, .max_model_len = context.engine.max_model_len()},
      &*prompt);
  if (!max_tokens.ok()) return PromptTooLong(prompt->size(), context.engine.max_model_len());
  const bool in_reasoning = prompt->back() == context.model.special_tokens.think_begin;
  return PreparedMessages{.request = *std::move(request),
                          .prompt = *std::move(prompt),
                          .max_tokens = *max_tokens,
                          .in_reasoning = in_reasoning};
}

MaybeError Start(const ServerContext& context, PreparedMessages prepared, const GrammarPtr& grammar,
                 const std::string& request_id, const Writer& writer) {
  const MessagesRequest& request = prepared.request;
  const ToolUse& tool_use = request.tool_use;
  const text::ToolCallParser::Options parser{
      .in_reasoning = prepared.in_reasoning,
      .parse_tool_calls =
          !tool_use.tools.items().empty() && tool_use.choice.mode != ToolChoice::Mode::kNone,
      .parallel = tool_use.choice.parallel,
      .tools = text::ReadToolSchemas(tool_use.tools)};
  MessageSpec spec{
      .model = request.model,
      .replay_scope = request.replay_scope,
      .request_id = request_id,
      .num_prompt_tokens = static_cast<int64_t>(prepared.prompt.size()),
      .has_thinking = request.conversation.thinking.mode == text::ThinkingMode::kThinking,
      .omits_thinking = request.omits_thinking,
      .in_reasoning = prepared.in_reasoning,
      .is_remembered = !request.continues_last};
  std::vector<Generation::Choice> choices;
  choices.push_back(openai::MakeChoice(context, request.params, std::move(prepared.prompt),
                                       prepared.max_tokens, 0, parser, grammar));
  if (!request.params.stream) {
    auto answer = std::make_shared<MessageWholeAnswer>(context, std::move(spec), writer);
    return openai::StartWhole(context, std::move(choices), std::move(answer), writer);
  }
  auto answer = std::make_shared<MessageStreamAnswer>(context, std::move(spec), writer);
  const auto generation =
      std::make_shared<Generation>(&context.engine, std::move(choices), writer, answer);
  if (MaybeError error = generation->Start()) return error;
  answer->Begin();
  return std::nullopt;
}

Parsed<Value> CountTokens(const ServerContext& context, const http::Request& http_request) {
  Parsed<MessagesRequest> request = ReadRequest(context, http_request, false);
  if (!request.ok()) return request.error();
  Parsed<std::vector<int32_t>> prompt = EncodePrompt(*request, context);
  if (!prompt.ok()) return prompt.error();
  return Value::Object({{"input_tokens", Value::Number(static_cast<int64_t>(prompt->size()))}});
}

}  // namespace

void HandleMessages(const ServerContext& context, const http::Request& request,
                    const std::string& request_id, const Writer& writer) {
  Parsed<PreparedMessages> ready = Prepare(context, request);
  if (!ready.ok()) return writer->Send(ErrorResponse(ready.error(), request_id));
  const auto prepared = std::make_shared<PreparedMessages>(*std::move(ready));
  PrepareGrammar(context, prepared->request.rules, prepared->in_reasoning, writer,
                 [&context, prepared, request_id, writer](const Parsed<GrammarPtr>& grammar) {
                   const MaybeError error = grammar.ok() ? Start(context, std::move(*prepared),
                                                                 *grammar, request_id, writer)
                                                         : grammar.error();
                   if (error) writer->Send(ErrorResponse(*error, request_id));
                 });
}

void HandleCountTokens(const ServerContext& context, const http::Request& request,
                       const std::string& request_id, const Writer& writer) {
  const Parsed<Value> count = CountTokens(context, request);
  if (!count.ok()) return writer->Send(ErrorResponse(count.error(), request_id));
  writer->Send({.headers = {}, .body = json::Dump(*count)});
}

void HandleModels(const ServerContext& context, const Writer& writer) {
  const std::time_t start = context.start_time;
  std::tm utc{};
  gmtime_r(&start, &utc);
  char created[32];
  std::strftime(created, sizeof(created), "%Y-%m-%dT%H:%M:%SZ", &utc);
  std::vector<Value> cards;
  for (const std::string& name : context.options.served_model_names) {
    cards.push_back(Value::Object({{"type", Value::String("model")},
                                   {"id", Value::String(name)},
                                   {"display_name", Value::String(name)},
                                   {"created_at", Value::String(created)}}));
  }
  const std::vector<std::string>& names = context.options.served_model_names;
  const Value list = Value::Object({{"data", Value::Array(std::move(cards))},
                                    {"has_more", Value::Bool(false)},
                                    {"first_id", Value::String(names.front())},
                                    {"last_id", Value::String(names.back())}});
  writer->Send({.headers = {}, .body = json::Dump(list)});
}

}  // namespace fathom::api::anthropic
