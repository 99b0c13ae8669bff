#include "api/conversation.h"

#include <utility>

#include "api/replay/restore.h"

namespace fathom::api {

using json::Value;

namespace {

void AppendText(const char* key, const std::string& text, std::string_view separator,
                Value* message) {
  const Value* before = message->Find(key);
  std::string joined = before == nullptr ? "" : before->AsString();
  if (!joined.empty() && !text.empty()) joined += separator;
  message->Set(key, Value::String(joined + text));
}

void AppendItem(const char* key, Value item, Value* message) {
  if (message->Find(key) == nullptr) message->Set(key, Value::Array());
  message->Find(key)->items().push_back(std::move(item));
}

}  // namespace

Parsed<std::vector<int32_t>> EncodeConversation(const Conversation& conversation,
                                                const ServerContext& context,
                                                std::string_view replay_scope) {
  Value messages = conversation.messages;
  const text::SampledTurns sampled = RestoreSampledTurns(*context.replay, replay_scope, &messages);
  if (!conversation.tools.items().empty()) {
    const Status status = text::AttachTools(conversation.tools, &messages);
    if (!status.ok()) return FromStatus(status);
  }
  const auto pieces =
      text::EncodeMessages(messages, {.mode = conversation.thinking.mode,
                                      .drop_thinking = conversation.thinking.drop_thinking,
                                      .effort = conversation.thinking.effort,
                                      .profile = context.options.effort_profile,
                                      .sampled = &sampled});
  if (!pieces.ok()) return FromStatus(pieces.status());
  return text::TokenizePieces(context.tokenizer, *pieces, context.options.raw_special_tokens);
}

void TurnList::Add(std::string_view role, std::string text) {
  messages_.push_back(Value::Object(
      {{"role", Value::String(std::string(role))}, {"content", Value::String(std::move(text))}}));
}

void TurnList::AddToolResult(const std::string& call_id, std::string text) {
  Add("tool", std::move(text));
  messages_.back().Set("tool_call_id", Value::String(call_id));
}

bool TurnList::LastIs(std::string_view role) const {
  return !messages_.empty() && messages_.back().Find("role")->AsString() == role;
}

void TurnList::AddSystem(const std::string& text) {
  if (!LastIs("system")) Add("system", "");
  AppendText("content", text, "\n\n", &messages_.back());
}

Value& TurnList::Assistant() {
  if (!IsAssistant()) Add("assistant", "");
  return messages_.back();
}

void TurnList::AddReasoning(const std::string& text) {
  if (!text.empty()) AppendText("reasoning", text, "", &Assistant());
}

void TurnList::AddContent(const std::string& text, std::string_view separator) {
  AppendText("content", text, separator, &Assistant());
}

void TurnList::AddToolCall(const std::string& id, const std::string& name,
                           const std::string& arguments) {
  Value function =
      Value::Object({{"name", Value::String(name)}, {"arguments", Value::String(arguments)}});
  AppendItem("tool_calls",
             Value::Object({{"id", Value::String(id)},
                            {"type", Value::String("function")},
                            {"function", std::move(function)}}),
             &Assistant());
}

void TurnList::AddReplayKey(std::string key) {
  AppendItem("replay_keys", Value::String(std::move(key)), &Assistant());
}

bool TurnList::ContinueLast() {
  if (Assistant().Find("tool_calls") != nullptr) return false;
  Assistant().Set("wo_eos", Value::Bool(true));
  return continues_last_ = true;
}

bool TurnList::last_has_reasoning() const {
  return IsAssistant() && messages_.back().Find("reasoning") != nullptr;
}

Value TurnList::Take() {
  if (LastIs("system")) AddUser("");
  return Value::Array(std::move(messages_));
}

}  // namespace fathom::api
