#include "api/openai/chat_answer.h"

#include <utility>

#include "api/identifiers.h"
#include "api/openai/routed_experts.h"

namespace fathom::api::openai {
namespace {

using json::Value;

size_t NumChoices(const ChatAnswerSpec& spec) {
  return static_cast<size_t>(spec.params.num_choices);
}

std::vector<int32_t> OwnStopIds(const ServerContext& context) {
  const text::SpecialTokens& special = context.model.special_tokens;
  return {special.eos, special.user, special.assistant};
}

ReplayRecorder MakeRecorder(const ServerContext& context, const ChatAnswerSpec& spec) {
  return {*context.replay, spec.replay_scope, spec.in_reasoning,
          context.model.special_tokens.think_end};
}

Value LogprobsJson(std::vector<Value> entries) {
  return Value::Object({{"content", Value::Array(std::move(entries))}});
}

Value ToolCallJson(std::string id, std::string_view name, std::string_view arguments) {
  return Value::Object(
      {{"id", Value::String(std::move(id))},
       {"type", Text("function")},
       {"function", Value::Object({{"name", Text(name)}, {"arguments", Text(arguments)}})}});
}

// Both names in use for the same text.
void SetReasoning(const std::string& reasoning, Value* message) {
  message->Set("reasoning", Text(reasoning));
  message->Set("reasoning_content", Text(reasoning));
}

}  // namespace

ChatStreamAnswer::ChatStreamAnswer(const ServerContext& context, ChatAnswerSpec spec,
                                   std::shared_ptr<http::ResponseWriter> writer)
    : context_(context),
      spec_(std::move(spec)),
      format_(context.tokenizer, spec_.params.return_tokens_as_token_ids),
      stream_(std::move(writer), spec_.envelope, spec_.params),
      usage_(static_cast<int64_t>(spec_.prompt_ids.size()), NumChoices(spec_), NumChoices(spec_)) {
  for (size_t i = 0; i < NumChoices(spec_); ++i) {
    choices_.push_back({.recorder = MakeRecorder(context_, spec_)});
  }
}

void ChatStreamAnswer::Begin() {
  stream_.Begin(context_.options.keep_alive_interval);
  if (spec_.cache_explanation.is_null()) return;
  stream_.AddMember("cache_explanation", spec_.cache_explanation);
  stream_.Send();
}

void ChatStreamAnswer::AddChunk(size_t choice_idx, Value delta, const ChoiceFinish* finish) {
  Choice& choice = choices_[choice_idx];
  Value json = Value::Object(
      {{"index", Integer(static_cast<int64_t>(choice_idx))}, {"delta", std::move(delta)}});
  json.Set("logprobs",
           choice.logprobs.empty() ? Value() : LogprobsJson(std::exchange(choice.logprobs, {})));
  json.Set("finish_reason", finish == nullptr ? Value() : Text(FinishReasonText(*finish)));
  if (finish != nullptr) json.Set("stop_reason", StopReason(*finish, OwnStopIds(context_)));
  if (spec_.params.return_token_ids) {
    json.Set("token_ids", IntegerArray(std::exchange(choice.token_ids, {})));
  }
  stream_.Add(json, usage_);
}

std::optional<Value> ChatStreamAnswer::DeltaOf(const text::OutputEvent& event,
                                               Choice* choice) const {
  using Kind = text::OutputEvent::Kind;
  Value delta = Value::Object();
  switch (event.kind) {
    case Kind::kReasoning:
      if (!spec_.has_reasoning_field) return std::nullopt;
      SetReasoning(event.text, &delta);
      return delta;
    case Kind::kContent:
      delta.Set("content", Text(event.text));
      return delta;
    case Kind::kToolCallBegin:
    case Kind::kArguments: {
      Value call;
      if (event.kind == Kind::kToolCallBegin) {
        const std::string id = NewToolCallId();
        choice->recorder.AddKey(id);
        call = ToolCallJson(id, event.text, "");
      } else {
        Value function = Value::Object();
        function.Set("arguments", Text(event.text));
        call = Value::Object();
        call.Set("function", std::move(function));
      }
      call.Set("index", Integer(event.tool_call_idx));
      delta.Set("tool_calls", Value::Array({std::move(call)}));
      return delta;
    }
    case Kind::kToolCallEnd:
      return std::nullopt;
  }
  return std::nullopt;
}

void ChatStreamAnswer::Start(size_t choice_idx) {
  choices_[choice_idx].started = true;
  Value delta = Value::Object({{"role", Text("assistant")}, {"content", Text("")}});
  Value json = Value::Object({{"index", Integer(static_cast<int64_t>(choice_idx))},
                              {"delta", std::move(delta)},
                              {"logprobs", Value()},
                              {"finish_reason", Value()}});
  if (spec_.params.return_token_ids) json.Set("prompt_token_ids", IntegerArray(spec_.prompt_ids));
  stream_.Add(json, usage_);
  if (!spec_.echo.empty())
    AddChunk(choice_idx, Value::Object({{"content", Text(spec_.echo)}}), nullptr);
}

void ChatStreamAnswer::OnDelta(size_t choice_idx, const ChoiceText& text, ChoiceDelta delta) {
  Choice& choice = choices_[choice_idx];
  usage_.Update(choice_idx, text);
  if (delta.num_processed_tokens) {
    if (choice_idx > 0) return;  // all have the same prompt
    stream_.AddProgress(0, *delta.num_processed_tokens, text.num_cached_tokens(),
                        static_cast<int64_t>(spec_.prompt_ids.size()));
    return stream_.Send();
  }
  if (!choice.started) Start(choice_idx);
  for (Value& entry : format_.ChatEntries(delta.logprobs))
    choice.logprobs.push_back(std::move(entry));
  choice.token_ids.insert(choice.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
  for (const text::OutputEvent& event : delta.events) {
    if (std::optional<Value> seen = DeltaOf(event, &choice)) {
      AddChunk(choice_idx, *std::move(seen), nullptr);
    }
  }
  choice.recorder.Add(delta);
  if (delta.finish) {
    ++num_finished_;
    AddChunk(choice_idx, Value::Object(), &*delta.finish);
  }
  if (num_finished_ == choices_.size()) return stream_.Finish(usage_);
  stream_.Send();
}

ChatWholeAnswer::ChatWholeAnswer(const ServerContext& context, ChatAnswerSpec spec,
                                 std::shared_ptr<http::ResponseWriter> writer)
    : context_(context),
      spec_(std::move(spec)),
      format_(context.tokenizer, spec_.params.return_tokens_as_token_ids),
      writer_(std::move(writer)),
      usage_(static_cast<int64_t>(spec_.prompt_ids.size()), NumChoices(spec_), NumChoices(spec_)) {
  for (size_t i = 0; i < NumChoices(spec_); ++i) {
    choices_.push_back({.recorder = MakeRecorder(context_, spec_)});
  }
}

void ChatWholeAnswer::OnDelta(size_t choice_idx, const ChoiceText& text, ChoiceDelta delta) {
  Choice& choice = choices_[choice_idx];
  usage_.Update(choice_idx, text);
  choice.message.Add(delta.events);
  while (choice.call_ids.size() < choice.message.tool_calls.size()) {
    choice.call_ids.push_back(NewToolCallId());
    choice.recorder.AddKey(choice.call_ids.back());
  }
  choice.recorder.Add(delta);
  for (Value& entry : format_.ChatEntries(delta.logprobs))
    choice.logprobs.push_back(std::move(entry));
  choice.token_ids.insert(choice.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
  choice.routed_experts.insert(choice.routed_experts.end(), delta.routed_experts.begin(),
                               delta.routed_experts.end());
  if (!delta.prompt_logprobs.empty())
    prompt_logprobs_ = format_.PromptLogprobs(delta.prompt_logprobs);
  if (!delta.finish) return;
  choice.finish = *delta.finish;
  if (++num_finished_ == choices_.size()) Send();
}

Value ChatWholeAnswer::MessageJson(const Choice& choice) const {
  const text::OutputMessage& parsed = choice.message;
  const bool no_content =
      parsed.content.empty() && (!parsed.reasoning.empty() || !parsed.tool_calls.empty());
  Value message =
      Value::Object({{"role", Text("assistant")},
                     {"content", no_content ? Value() : Text(spec_.echo + parsed.content)},
                     {"refusal", Value()}});
  if (spec_.has_reasoning_field) SetReasoning(parsed.reasoning, &message);
  if (parsed.tool_calls.empty()) return message;
  std::vector<Value> calls;
  for (size_t i = 0; i < parsed.tool_calls.size(); ++i) {
    const text::OutputMessage::ToolCall& call = parsed.tool_calls[i];
    calls.push_back(ToolCallJson(choice.call_ids[i], call.name, call.arguments));
  }
  message.Set("tool_calls", Value::Array(std::move(calls)));
  return message;
}

Value ChatWholeAnswer::ChoiceJson(size_t choice_idx) const {
  const Choice& choice = choices_[choice_idx];
  Value json = Value::Object(
      {{"index", Integer(static_cast<int64_t>(choice_idx))},
       {"message", MessageJson(choice)},
       {"logprobs", spec_.params.sampling.num_logprobs ? LogprobsJson(choice.logprobs) : Value()},
       {"finish_reason", Text(FinishReasonText(choice.finish))},
       {"stop_reason", StopReason(choice.finish, OwnStopIds(context_))}});
  if (spec_.params.return_token_ids) json.Set("token_ids", IntegerArray(choice.token_ids));
  if (spec_.params.routed_experts_start) {
    const size_t num_run = spec_.prompt_ids.size() + choice.token_ids.size() - 1;
    json.Set(
        "routed_experts",
        Value::String(EncodeRoutedExperts(
            choice.routed_experts,
            static_cast<int64_t>(num_run) - *spec_.params.routed_experts_start, context_.model)));
  }
  return json;
}

void ChatWholeAnswer::Send() {
  const Envelope& envelope = spec_.envelope;
  std::vector<Value> choices;
  for (size_t i = 0; i < choices_.size(); ++i) choices.push_back(ChoiceJson(i));
  Value body = Value::Object({{"id", Text(envelope.id)},
                              {"object", Text(envelope.object)},
                              {"created", Integer(envelope.created)},
                              {"model", Text(envelope.model)},
                              {"choices", Value::Array(std::move(choices))},
                              {"usage", usage_.ToJson()},
                              {"service_tier", Value()},
                              {"system_fingerprint", Value()}});
  if (spec_.params.sampling.num_prompt_logprobs) body.Set("prompt_logprobs", prompt_logprobs_);
  if (!spec_.cache_explanation.is_null()) body.Set("cache_explanation", spec_.cache_explanation);
  if (spec_.params.return_token_ids) body.Set("prompt_token_ids", IntegerArray(spec_.prompt_ids));
  writer_->Send(JsonResponse(body));
}

}  // namespace fathom::api::openai
