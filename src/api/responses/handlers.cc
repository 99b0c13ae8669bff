#include "api/responses/handlers.h"

#include <fmt/format.h>

#include <utility>

#include "api/auth.h"
#include "api/identifiers.h"
#include "api/openai/generation_start.h"
#include "api/prompt_budget.h"
#include "api/request_body.h"
#include "api/responses/response_answer.h"
#include "api/responses/response_request.h"

namespace fathom::api::responses {
namespace {

using json::Value;

// A request that has been read and rendered.
struct PreparedResponse {
  ResponseRequest request;
  std::vector<int32_t> prompt;
  int max_tokens = 0;
  bool in_reasoning = false;
};

Parsed<PreparedResponse> Prepare(const ServerContext& context, const http::Request& http_request) {
  Parsed<Value> body = ReadJsonObject(http_request, context.options.limits.json);
  if (!body.ok()) return body.error();
  Parsed<ResponseRequest> request = ParseResponseRequest(http_request, *body, context);
  if (!request.ok()) return request.error();
  Parsed<std::vector<int32_t>> prompt =
      EncodeConversation(request->conversation, context, request->scope);
  if (!prompt.ok()) return prompt.error();
  const Parsed<int> max_tokens = FitPrompt({.max_tokens = request->params.max_tokens,
                                            .max_model_len = context.engine.max_model_len(),
                                            .param = "input",
                                            .place = "input"},
                                           &*prompt);
  if (!max_tokens.ok()) return max_tokens.error();
  const bool in_reasoning = prompt->back() == context.model.special_tokens.think_begin;
  return PreparedResponse{.request = *std::move(request),
                          .prompt = *std::move(prompt),
                          .max_tokens = *max_tokens,
                          .in_reasoning = in_reasoning};
}

MaybeError Start(const ServerContext& context, PreparedResponse prepared, const GrammarPtr& grammar,
                 const Writer& writer) {
  const ToolUse& tool_use = prepared.request.tool_use;
  const text::ToolCallParser::Options parser{
      .in_reasoning = prepared.in_reasoning,
      .parse_tool_calls =
          !tool_use.tools.items().empty() && tool_use.choice.mode != ToolChoice::Mode::kNone,
      .parallel = tool_use.choice.parallel,
      .tools = text::ReadToolSchemas(tool_use.tools)};
  const bool stream = prepared.request.params.stream;
  const auto num_prompt_tokens = static_cast<int64_t>(prepared.prompt.size());
  std::vector<Generation::Choice> choices;
  choices.push_back(openai::MakeChoice(context, prepared.request.params, std::move(prepared.prompt),
                                       prepared.max_tokens, 0, parser, grammar));
  auto answer =
      std::make_shared<ResponseAnswer>(context,
                                       ResponseSpec{.request = std::move(prepared.request),
                                                    .num_prompt_tokens = num_prompt_tokens,
                                                    .in_reasoning = prepared.in_reasoning},
                                       writer);
  if (!stream) return openai::StartWhole(context, std::move(choices), std::move(answer), writer);
  const auto generation =
      std::make_shared<Generation>(&context.engine, std::move(choices), writer, answer);
  if (MaybeError error = generation->Start()) return error;
  answer->Begin();
  return std::nullopt;
}

ApiError NotFound(const std::string& id) {
  return {.status = 404,
          .message = fmt::format("Response with id '{}' not found.", SanitizeClientId(id)),
          .param = "id",
          .code = "response_not_found"};
}

}  // namespace

void HandleCreate(const ServerContext& context, const http::Request& request,
                  const Writer& writer) {
  Parsed<PreparedResponse> ready = Prepare(context, request);
  if (!ready.ok()) return writer->Send(openai::ErrorResponse(ready.error()));
  const auto prepared = std::make_shared<PreparedResponse>(*std::move(ready));
  PrepareGrammar(context, prepared->request.rules, prepared->in_reasoning, writer,
                 [&context, prepared, writer](const Parsed<GrammarPtr>& grammar) {
                   const MaybeError error =
                       grammar.ok() ? Start(context, std::move(*prepared), *grammar, writer)
                                    : grammar.error();
                   if (error) writer->Send(openai::ErrorResponse(*error));
                 });
}

void HandleGet(const ServerContext& context, const http::Request& request, const Writer& writer) {
  const auto stored = context.responses->Find(CallerScope(request, ""), request.path_tail);
  writer->Send(stored == nullptr ? openai::ErrorResponse(NotFound(request.path_tail))
                                 : openai::JsonResponse(stored->response));
}

void HandleDelete(const ServerContext& context, const http::Request& request,
                  const Writer& writer) {
  if (!context.responses->Delete(CallerScope(request, ""), request.path_tail))
    return writer->Send(openai::ErrorResponse(NotFound(request.path_tail)));
  writer->Send(openai::JsonResponse(Value::Object({{"id", Value::String(request.path_tail)},
                                                   {"object", Value::String("response")},
                                                   {"deleted", Value::Bool(true)}})));
}

}  // namespace fathom::api::responses
