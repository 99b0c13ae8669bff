#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api/auth.h"
#include "api/cache_explanation.h"
#include "api/openai/chat_answer.h"
#include "api/openai/chat_request.h"
#include "api/openai/generation_start.h"
#include "api/openai/handlers.h"
#include "api/output_rules.h"
#include "api/prompt_budget.h"
#include "api/request_body.h"
#include "api/tagged_writer.h"
#include "base/log.h"

namespace fathom::api::openai {
namespace {

// A request that has been read and rendered.
struct PreparedChat {
  ChatRequest request;
  std::string replay_scope;
  std::vector<int32_t> prompt;
  int max_tokens = 0;
  bool in_reasoning = false;
};

Parsed<PreparedChat> PrepareChat(const ServerContext& context, const http::Request& http_request) {
  Parsed<json::Value> body = ReadJsonObject(http_request, context.options.limits.json);
  if (!body.ok()) return body.error();
  Parsed<ChatRequest> request = ParseChatRequest(*body, context);
  if (!request.ok()) return request.error();
  std::string replay_scope = CallerScope(http_request, request->params.cache_salt);
  BindToCaller(http_request, context, &request->params);
  Parsed<std::vector<int32_t>> prompt = EncodePrompt(*request, context, replay_scope);
  if (!prompt.ok()) return prompt.error();
  const Parsed<int> max_tokens =
      FitPrompt({.max_tokens = request->params.max_tokens,
                 .default_max_tokens = std::nullopt,
                 .truncate_prompt_tokens = request->params.truncate_prompt_tokens,
                 .max_model_len = context.engine.max_model_len()},
                &*prompt);
  if (!max_tokens.ok()) return max_tokens.error();
  const bool in_reasoning = prompt->back() == context.model.special_tokens.think_begin;
  return PreparedChat{.request = *std::move(request),
                      .replay_scope = std::move(replay_scope),
                      .prompt = *std::move(prompt),
                      .max_tokens = *max_tokens,
                      .in_reasoning = in_reasoning};
}

// The prompt and its answer will be what a later request can be compared with.
void Remember(const ServerContext& context, const PreparedChat& chat, ChoiceText* text) {
  text->OnFinish([&context, scope = chat.replay_scope,
                  ids = chat.prompt](const std::vector<int32_t>& answer) mutable {
    ids.insert(ids.end(), answer.begin(), answer.end());
    context.history->Add(std::move(scope), std::move(ids));
  });
}

MaybeError StartChat(const ServerContext& context, PreparedChat chat, const GrammarPtr& grammar,
                     Writer writer) {
  const ChatRequest& request = chat.request;
  const GenerationParams& params = request.params;
  const text::ToolCallParser::Options parser{
      .in_reasoning = chat.in_reasoning,
      .parse_tool_calls = request.tool_use.parse_calls,
      .parallel = request.tool_use.choice.parallel,
      .tools = text::ReadToolSchemas(request.tool_use.tools)};
  std::vector<Generation::Choice> choices;
  for (int i = 0; i < params.num_choices; ++i) {
    choices.push_back(
        MakeChoice(context, params, chat.prompt, chat.max_tokens, i, parser, grammar));
  }
  Remember(context, chat, &choices.front().text);
  json::Value cache_explanation;
  if (request.explain_cache) {
    CacheExplanation explanation =
        ExplainCache(context, chat.replay_scope, chat.prompt, &request.conversation.messages);
    LogInfo("prefix cache: {}", explanation.line);
    writer = TagWriter(writer, {"x-cache-explanation", explanation.line});
    cache_explanation = std::move(explanation.json);
  }
  const bool stream = params.stream;
  ChatAnswerSpec spec{
      .envelope = MakeEnvelope(params, "chatcmpl-",
                               stream ? "chat.completion.chunk" : "chat.completion", request.model),
      .params = params,
      .has_reasoning_field =
          request.include_reasoning && request.thinking.mode == text::ThinkingMode::kThinking,
      .echo = params.echo ? request.conversation.last_content : "",
      .prompt_ids = std::move(chat.prompt),
      .cache_explanation = std::move(cache_explanation),
      .replay_scope = request.conversation.continues_last ? "" : chat.replay_scope,
      .in_reasoning = chat.in_reasoning};
  if (!stream) {
    auto answer = std::make_shared<ChatWholeAnswer>(context, std::move(spec), writer);
    return StartWhole(context, std::move(choices), std::move(answer), writer);
  }
  auto answer = std::make_shared<ChatStreamAnswer>(context, std::move(spec), writer);
  const auto generation =
      std::make_shared<Generation>(&context.engine, std::move(choices), writer, answer);
  if (MaybeError error = generation->Start()) return error;
  answer->Begin();
  return std::nullopt;
}

}  // namespace

void HandleChatCompletions(const ServerContext& context, const http::Request& request,
                           const Writer& writer) {
  Parsed<PreparedChat> prepared = PrepareChat(context, request);
  if (!prepared.ok()) return writer->Send(ErrorResponse(prepared.error()));
  const auto chat = std::make_shared<PreparedChat>(*std::move(prepared));
  PrepareGrammar(context, chat->request.rules, chat->in_reasoning, writer,
                 [&context, chat, writer](const Parsed<GrammarPtr>& grammar) {
                   const MaybeError error =
                       grammar.ok() ? StartChat(context, std::move(*chat), *grammar, writer)
                                    : grammar.error();
                   if (error) writer->Send(ErrorResponse(*error));
                 });
}

}  // namespace fathom::api::openai
