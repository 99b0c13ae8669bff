#include "api/openai/generation_start.h"

#include <chrono>
#include <ctime>
#include <string>
#include <utility>

#include "api/identifiers.h"

namespace fathom::api::openai {
namespace {

std::vector<int32_t> HiddenIds(const ServerContext& context) {
  const text::SpecialTokens& special = context.model.special_tokens;
  std::vector<int32_t> ids = {special.bos, special.eos, special.user, special.assistant};
  const int32_t pad = context.tokenizer.AddedTokenId("<｜▁pad▁｜>");
  if (pad >= 0) ids.push_back(pad);
  return ids;
}

uint64_t SeedOf(const ServerContext& context, const GenerationParams& params, request::RequestId id,
                int choice_idx) {
  if (params.seed_given) return params.sampling.seed + static_cast<uint64_t>(choice_idx);
  return context.options.seed ? *context.options.seed + id : RandomSeed();
}

}  // namespace

Generation::Choice MakeChoice(const ServerContext& context, const GenerationParams& params,
                              std::vector<int32_t> prompt, int max_tokens, int choice_idx,
                              const AnswerParser& parser, const GrammarPtr& grammar) {
  request::Request request;
  if (grammar != nullptr) request.constraint = grammar->NewConstraint();
  request.id = context.engine.NextRequestId();
  request.prompt_token_ids = std::move(prompt);
  request.sampling = params.sampling;
  request.sampling.max_tokens = max_tokens;
  request.sampling.seed = SeedOf(context, params, request.id, choice_idx);
  request.session = params.session;
  request.cache_salt = params.cache_salt;
  request.priority = params.priority;
  request.data_rank = params.data_rank;
  request.routed_experts_start = params.routed_experts_start;
  request.report_progress = params.return_progress;
  request.arrival = std::chrono::steady_clock::now();
  ChoiceText text(
      context.tokenizer,
      {.parser = parser,
       .stop = params.stop,
       .include_stop_string = params.include_stop_str_in_output,
       .min_tokens = params.sampling.min_tokens,
       .hidden_ids = params.skip_special_tokens ? HiddenIds(context) : std::vector<int32_t>()});
  return {std::move(request), std::move(text)};
}

MaybeError StartWhole(const ServerContext& context, std::vector<Generation::Choice> choices,
                      std::shared_ptr<GenerationListener> answer,
                      const std::shared_ptr<http::ResponseWriter>& writer) {
  const auto generation =
      std::make_shared<Generation>(&context.engine, std::move(choices), writer, std::move(answer));
  if (MaybeError error = generation->Start()) return error;
  writer->KeepWholeAlive(context.options.keep_alive_interval, {.headers = {}, .body = ""});
  return std::nullopt;
}

Envelope MakeEnvelope(const GenerationParams& params, std::string_view id_prefix,
                      std::string_view object, std::string_view model) {
  const std::string& client_id = params.client_request_id;
  return {.id = client_id.empty() ? NewId(id_prefix) : std::string(id_prefix) + client_id,
          .object = std::string(object),
          .created = static_cast<int64_t>(std::time(nullptr)),
          .model = std::string(model)};
}

}  // namespace fathom::api::openai
