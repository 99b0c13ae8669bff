#include <memory>
#include <utility>
#include <vector>

#include "api/openai/completion_answer.h"
#include "api/openai/completion_request.h"
#include "api/openai/generation_start.h"
#include "api/openai/handlers.h"
#include "api/prompt_budget.h"
#include "api/request_body.h"

namespace fathom::api::openai {
namespace {

constexpr int kDefaultMaxTokens = 16;

// The sequences of all prompts, prompt by prompt; cuts the prompts that asked to be cut.
Parsed<std::vector<Generation::Choice>> MakeChoices(const ServerContext& context,
                                                    const GrammarPtr& grammar,
                                                    CompletionRequest* request) {
  const GenerationParams& params = request->params;
  std::vector<Generation::Choice> choices;
  for (CompletionPrompt& prompt : request->prompts) {
    const Parsed<int> max_tokens =
        FitPrompt({.max_tokens = params.max_tokens,
                   .default_max_tokens = kDefaultMaxTokens,
                   .truncate_prompt_tokens = params.truncate_prompt_tokens,
                   .max_model_len = context.engine.max_model_len(),
                   .param = "prompt",
                   .place = "prompt"},
                  &prompt.token_ids);
    if (!max_tokens.ok()) return max_tokens.error();
    for (int i = 0; i < params.num_choices; ++i) {
      choices.push_back(
          MakeChoice(context, params, prompt.token_ids, *max_tokens, i, std::nullopt, grammar));
    }
  }
  return choices;
}

MaybeError StartCompletion(const ServerContext& context, CompletionRequest request,
                           const GrammarPtr& grammar, const Writer& writer) {
  Parsed<std::vector<Generation::Choice>> choices = MakeChoices(context, grammar, &request);
  if (!choices.ok()) return choices.error();

  const bool stream = request.params.stream;
  Envelope envelope = MakeEnvelope(request.params, "cmpl-", "text_completion", request.model);
  auto answer =
      std::make_shared<CompletionAnswer>(context, std::move(envelope), std::move(request), writer);
  if (!stream) return StartWhole(context, *std::move(choices), std::move(answer), writer);
  const auto generation =
      std::make_shared<Generation>(&context.engine, *std::move(choices), writer, answer);
  if (MaybeError error = generation->Start()) return error;
  answer->Begin();
  return std::nullopt;
}

}  // namespace

void HandleCompletions(const ServerContext& context, const http::Request& request,
                       const Writer& writer) {
  Parsed<json::Value> body = ReadJsonObject(request, context.options.limits.json);
  if (!body.ok()) return writer->Send(ErrorResponse(body.error()));
  Parsed<CompletionRequest> parsed = ParseCompletionRequest(*body, context);
  if (!parsed.ok()) return writer->Send(ErrorResponse(parsed.error()));
  BindToCaller(request, context, &parsed->params);
  const auto completion = std::make_shared<CompletionRequest>(*std::move(parsed));
  PrepareGrammar(context, completion->rules, false, writer,
                 [&context, completion, writer](const Parsed<GrammarPtr>& grammar) {
                   const MaybeError error =
                       grammar.ok()
                           ? StartCompletion(context, std::move(*completion), *grammar, writer)
                           : grammar.error();
                   if (error) writer->Send(ErrorResponse(*error));
                 });
}

}  // namespace fathom::api::openai
