#include "api/anthropic/message_answer.h"

#include <utility>

#include "api/anthropic/content.h"
#include "api/anthropic/wire.h"
#include "api/identifiers.h"
#include "base/log.h"
#include "http/sse.h"

namespace fathom::api::anthropic {
namespace {

using json::Value;
using Kind = AnswerBlock::Kind;

Value Text(std::string_view text) { return Value::String(std::string(text)); }

std::string_view StopReason(const ChoiceFinish& finish) {
  if (finish.is_length) return "max_tokens";
  if (finish.stop_string) return "stop_sequence";
  return finish.has_tool_calls ? "tool_use" : "end_turn";
}

Value StopSequence(const ChoiceFinish& finish) {
  return finish.stop_string ? Text(*finish.stop_string) : Value();
}

// The arguments as an object; those of a call that was cut are none.
Value InputOf(const AnswerBlock& block) {
  auto input = json::Parse(block.text);
  if (input.ok() && input->is_object()) return *std::move(input);
  LogDebug("a call of {} was cut before its arguments were complete", block.name);
  return Value::Object();
}

}  // namespace

MessageAnswer::MessageAnswer(const ServerContext& context, MessageSpec spec)
    : context_(context),
      spec_(std::move(spec)),
      blocks_(this, spec_.has_thinking),
      message_id_(NewId("msg_")),
      reasoning_id_(ReasoningSeal::NewId()),
      recorder_(*context.replay, spec_.is_remembered ? spec_.replay_scope : "", spec_.in_reasoning,
                context.model.special_tokens.think_end) {}

void MessageAnswer::OnDelta(size_t, const ChoiceText& text, ChoiceDelta delta) {
  num_cached_tokens_ = text.num_cached_tokens();
  num_output_tokens_ = text.num_tokens();
  num_thinking_tokens_ = text.num_reasoning_tokens();
  blocks_.Add(delta.events);
  if (delta.finish) blocks_.Finish();
  recorder_.Add(delta);
  if (delta.finish) return OnFinish(*delta.finish);
  AfterDelta();
}

void MessageAnswer::OnBlockBegin(size_t, const AnswerBlock& block) {
  call_ids_.emplace_back();
  if (block.kind == Kind::kToolCall) {
    call_ids_.back() = NewId("toolu_").substr(0, 6 + 24);
    recorder_.AddKey(call_ids_.back());
  } else if (block.kind == Kind::kReasoning) {
    recorder_.AddKey(SignatureKey(reasoning_id_));
  }
}

std::string MessageAnswer::SignatureOf(const AnswerBlock& block) const {
  return context_.reasoning_seal->Sign(spec_.replay_scope, reasoning_id_, block.text);
}

Value MessageAnswer::UsageJson() const {
  return Value::Object(
      {{"input_tokens", Value::Number(spec_.num_prompt_tokens - num_cached_tokens_)},
       {"cache_creation_input_tokens", Value::Number(int64_t{0})},
       {"cache_read_input_tokens", Value::Number(num_cached_tokens_)},
       {"output_tokens", Value::Number(num_output_tokens_)},
       {"output_tokens_details",
        Value::Object({{"thinking_tokens", Value::Number(num_thinking_tokens_)}})}});
}

Value MessageAnswer::MessageJson(Value content, Value stop_reason, Value stop_sequence,
                                 Value usage) const {
  return Value::Object({{"id", Text(message_id_)},
                        {"type", Text("message")},
                        {"role", Text("assistant")},
                        {"model", Text(spec_.model)},
                        {"content", std::move(content)},
                        {"stop_reason", std::move(stop_reason)},
                        {"stop_sequence", std::move(stop_sequence)},
                        {"usage", std::move(usage)}});
}

Value MessageAnswer::BlockJson(size_t idx, bool whole) const {
  const AnswerBlock& block = blocks_.blocks()[idx];
  switch (block.kind) {
    case Kind::kReasoning:
      return Value::Object({{"type", Text("thinking")},
                            {"thinking", Text(whole && !spec_.omits_thinking ? block.text : "")},
                            {"signature", Text(whole ? SignatureOf(block) : "")}});
    case Kind::kText:
      return Value::Object({{"type", Text("text")}, {"text", Text(whole ? block.text : "")}});
    case Kind::kToolCall:
      return Value::Object({{"type", Text("tool_use")},
                            {"id", Text(call_ids_[idx])},
                            {"name", Text(block.name)},
                            {"input", whole ? InputOf(block) : Value::Object()}});
  }
  return Value();
}

void MessageStreamAnswer::AddEvent(const Value& event) {
  pending_ += http::SseEvent(event.Find("type")->AsString(), json::Dump(event));
}

void MessageStreamAnswer::Begin() {
  const std::string ping = http::SseEvent("ping", R"({"type":"ping"})");
  writer_->BeginStream({.content_type = "text/event-stream; charset=utf-8",
                        .headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}},
                        .body = ""});
  AddEvent(
      Value::Object({{"type", Text("message_start")},
                     {"message", MessageJson(Value::Array(), Value(), Value(), UsageJson())}}));
  pending_ += ping;
  AfterDelta();
  writer_->SetKeepAlive(context_.options.keep_alive_interval, ping);
}

void MessageStreamAnswer::AfterDelta() {
  if (!pending_.empty()) writer_->Write(std::exchange(pending_, ""));
}

void MessageStreamAnswer::OnBlockBegin(size_t idx, const AnswerBlock& block) {
  MessageAnswer::OnBlockBegin(idx, block);
  AddEvent(Value::Object({{"type", Text("content_block_start")},
                          {"index", Value::Number(static_cast<int64_t>(idx))},
                          {"content_block", BlockJson(idx, false)}}));
}

void MessageStreamAnswer::AddDelta(size_t idx, std::string_view type, std::string_view field,
                                   const std::string& text) {
  Value delta = Value::Object({{"type", Text(type)}});
  delta.Set(field, Text(text));
  AddEvent(Value::Object({{"type", Text("content_block_delta")},
                          {"index", Value::Number(static_cast<int64_t>(idx))},
                          {"delta", std::move(delta)}}));
}

void MessageStreamAnswer::OnBlockText(size_t idx, const AnswerBlock& block,
                                      const std::string& piece) {
  switch (block.kind) {
    case Kind::kReasoning:
      if (!spec_.omits_thinking) AddDelta(idx, "thinking_delta", "thinking", piece);
      return;
    case Kind::kText:
      return AddDelta(idx, "text_delta", "text", piece);
    case Kind::kToolCall:
      return AddDelta(idx, "input_json_delta", "partial_json", piece);
  }
}

void MessageStreamAnswer::OnBlockEnd(size_t idx, const AnswerBlock& block) {
  if (block.kind == Kind::kReasoning)
    AddDelta(idx, "signature_delta", "signature", SignatureOf(block));
  AddEvent(Value::Object(
      {{"type", Text("content_block_stop")}, {"index", Value::Number(static_cast<int64_t>(idx))}}));
}

void MessageStreamAnswer::OnFinish(const ChoiceFinish& finish) {
  AddEvent(Value::Object({{"type", Text("message_delta")},
                          {"delta", Value::Object({{"stop_reason", Text(StopReason(finish))},
                                                   {"stop_sequence", StopSequence(finish)}})},
                          {"usage", UsageJson()}}));
  AddEvent(Value::Object({{"type", Text("message_stop")}}));
  AfterDelta();
  writer_->End();
}

void MessageStreamAnswer::OnError(ApiError error) {
  AddEvent(ErrorEvent(error));
  AfterDelta();
  writer_->End();
}

void MessageWholeAnswer::OnFinish(const ChoiceFinish& finish) {
  std::vector<Value> content;
  for (size_t i = 0; i < blocks_.blocks().size(); ++i) content.push_back(BlockJson(i, true));
  const Value message = MessageJson(Value::Array(std::move(content)), Text(StopReason(finish)),
                                    StopSequence(finish), UsageJson());
  writer_->Send({.headers = {}, .body = json::Dump(message)});
}

void MessageWholeAnswer::OnError(ApiError error) {
  writer_->Send(ErrorResponse(error, spec_.request_id));
}

}  // namespace fathom::api::anthropic
