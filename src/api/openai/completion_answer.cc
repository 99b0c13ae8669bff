#include "api/openai/completion_answer.h"

#include <utility>

#include "api/openai/routed_experts.h"

namespace fathom::api::openai {
namespace {

using json::Value;

int64_t NumPromptTokens(const CompletionRequest& request) {
  size_t total = 0;
  for (const CompletionPrompt& prompt : request.prompts) total += prompt.token_ids.size();
  return static_cast<int64_t>(total);
}

size_t ChoicesPerPrompt(const CompletionRequest& request) {
  return static_cast<size_t>(request.params.num_choices);
}

}  // namespace

CompletionAnswer::CompletionAnswer(const ServerContext& context, Envelope envelope,
                                   CompletionRequest request,
                                   std::shared_ptr<http::ResponseWriter> writer)
    : context_(context),
      envelope_(std::move(envelope)),
      request_(std::move(request)),
      format_(context.tokenizer, request_.params.return_tokens_as_token_ids),
      writer_(std::move(writer)),
      stream_(writer_, envelope_, request_.params),
      usage_(NumPromptTokens(request_), request_.prompts.size() * ChoicesPerPrompt(request_),
             ChoicesPerPrompt(request_)) {
  const int num_top = request_.params.sampling.num_logprobs.value_or(0);
  for (size_t i = 0; i < request_.prompts.size() * ChoicesPerPrompt(request_); ++i) {
    choices_.push_back({.started = false,
                        .text = "",
                        .token_ids = {},
                        .logprobs = CompletionLogprobs(format_, num_top),
                        .prompt_logprobs = {},
                        .routed_experts = {},
                        .finish = {}});
  }
}

void CompletionAnswer::Begin() { stream_.Begin(context_.options.keep_alive_interval); }

const CompletionPrompt& CompletionAnswer::PromptOf(size_t choice_idx) const {
  return request_.prompts[choice_idx / ChoicesPerPrompt(request_)];
}

void CompletionAnswer::Start(size_t choice_idx, const ChoiceDelta& delta) {
  Choice& choice = choices_[choice_idx];
  choice.started = true;
  if (request_.params.sampling.num_prompt_logprobs) {
    choice.prompt_logprobs = format_.PromptLogprobs(delta.prompt_logprobs);
  }
  if (!request_.params.echo) return;
  choice.text = PromptOf(choice_idx).text;
  if (request_.params.sampling.num_logprobs) {
    choice.logprobs.AddUnscored(PromptOf(choice_idx).token_ids.front());
    for (const request::TokenLogprobs& token : delta.prompt_logprobs) choice.logprobs.Add(token);
  }
}

Value CompletionAnswer::TakeChoice(size_t choice_idx, bool finished) {
  Choice& choice = choices_[choice_idx];
  const bool has_logprobs = request_.params.sampling.num_logprobs && !choice.logprobs.empty();
  Value json = Value::Object(
      {{"index", Integer(static_cast<int64_t>(choice_idx))},
       {"text", Text(std::exchange(choice.text, ""))},
       {"logprobs", has_logprobs ? choice.logprobs.Take() : Value()},
       {"finish_reason", finished ? Text(FinishReasonText(choice.finish)) : Value()},
       {"stop_reason",
        finished ? StopReason(choice.finish, {context_.model.special_tokens.eos}) : Value()}});
  if (request_.params.return_token_ids) {
    json.Set("token_ids", IntegerArray(std::exchange(choice.token_ids, {})));
  }
  return json;
}

void CompletionAnswer::OnDelta(size_t choice_idx, const ChoiceText& text, ChoiceDelta delta) {
  Choice& choice = choices_[choice_idx];
  usage_.Update(choice_idx, text);
  if (delta.num_processed_tokens) {
    if (choice_idx % ChoicesPerPrompt(request_) > 0) return;
    stream_.AddProgress(choice_idx / ChoicesPerPrompt(request_), *delta.num_processed_tokens,
                        text.num_cached_tokens(), NumPromptTokens(request_));
    return stream_.Send();
  }
  const bool first = !choice.started;
  if (first) Start(choice_idx, delta);
  for (const text::OutputEvent& event : delta.events) choice.text += event.text;
  choice.token_ids.insert(choice.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
  for (const request::TokenLogprobs& token : delta.logprobs) choice.logprobs.Add(token);
  choice.routed_experts.insert(choice.routed_experts.end(), delta.routed_experts.begin(),
                               delta.routed_experts.end());
  if (delta.finish) {
    choice.finish = *delta.finish;
    ++num_finished_;
  }
  const bool all_finished = num_finished_ == choices_.size();
  if (!request_.params.stream) {
    if (all_finished) SendWhole();
    return;
  }
  if (!choice.text.empty() || delta.finish) {
    Value json = TakeChoice(choice_idx, delta.finish.has_value());
    if (first && request_.params.return_token_ids) {
      json.Set("prompt_token_ids", IntegerArray(PromptOf(choice_idx).token_ids));
    }
    stream_.Add(json, usage_);
  }
  all_finished ? stream_.Finish(usage_) : stream_.Send();
}

void CompletionAnswer::SendWhole() {
  std::vector<Value> choices;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const size_t num_run = PromptOf(i).token_ids.size() + choices_[i].token_ids.size() - 1;
    Value json = TakeChoice(i, true);
    if (const auto start = request_.params.routed_experts_start) {
      json.Set("routed_experts", Value::String(EncodeRoutedExperts(
                                     choices_[i].routed_experts,
                                     static_cast<int64_t>(num_run) - *start, context_.model)));
    }
    if (request_.params.sampling.num_prompt_logprobs) {
      json.Set("prompt_logprobs", std::move(choices_[i].prompt_logprobs));
    }
    if (request_.params.return_token_ids) {
      json.Set("prompt_token_ids", IntegerArray(PromptOf(i).token_ids));
    }
    choices.push_back(std::move(json));
  }
  writer_->Send(JsonResponse(Value::Object({{"id", Text(envelope_.id)},
                                            {"object", Text(envelope_.object)},
                                            {"created", Integer(envelope_.created)},
                                            {"model", Text(envelope_.model)},
                                            {"choices", Value::Array(std::move(choices))},
                                            {"usage", usage_.ToJson()},
                                            {"system_fingerprint", Value()}})));
}

void CompletionAnswer::OnError(ApiError error) {
  request_.params.stream ? stream_.Fail(error) : writer_->Send(ErrorResponse(error));
}

}  // namespace fathom::api::openai
