#include "api/openai/chat_messages.h"

#include <fmt/format.h>

#include <utility>

#include "api/field_reader.h"
#include "api/openai/content_parts.h"

namespace fathom::api::openai {
namespace {

using json::Value;

Value TextMessage(std::string role, std::string content) {
  Value message = Value::Object();
  message.Set("role", Value::String(std::move(role)));
  message.Set("content", Value::String(std::move(content)));
  return message;
}

// Arguments as the encoder wants them: the text of a JSON object wherever there is one.
std::string ArgumentsText(const Value* arguments) {
  if (arguments == nullptr || arguments->is_null()) return "{}";
  if (!arguments->is_string()) return json::Dump(*arguments);
  return arguments->AsString().empty() ? "{}" : arguments->AsString();
}

Parsed<Value> ReadToolCall(const Value& call, const std::string& param) {
  const Value* function = call.Find("function");
  const Value* name = function == nullptr ? nullptr : function->Find("name");
  if (name == nullptr || !name->is_string() || name->AsString().empty()) {
    return BadRequest(fmt::format("{}.function.name is required", param), param);
  }
  Value out_function = Value::Object();
  out_function.Set("name", *name);
  out_function.Set("arguments", Value::String(ArgumentsText(function->Find("arguments"))));
  Value out = Value::Object();
  if (const Value* id = call.Find("id"); id != nullptr && id->is_string()) out.Set("id", *id);
  out.Set("type", Value::String("function"));
  out.Set("function", std::move(out_function));
  return out;
}

class MessageReader {
 public:
  explicit MessageReader(size_t num_messages) : num_messages_(num_messages) {}

  MaybeError Read(const Value& message, size_t idx, bool continue_final_message);
  ChatMessages Finish();

 private:
  MaybeError ReadAssistant(const Value& message, const std::string& place, std::string content,
                           bool prefix);
  void Append(Value message) { out_.push_back(std::move(message)); }

  const size_t num_messages_;
  std::vector<Value> out_;
  ChatMessages result_;
};

MaybeError MessageReader::Read(const Value& message, size_t idx, bool continue_final_message) {
  const std::string place = fmt::format("messages[{}]", idx);
  if (!message.is_object()) return BadRequest(place + " must be an object", "messages");
  const Value* role_value = message.Find("role");
  const std::string role =
      role_value != nullptr && role_value->is_string() ? role_value->AsString() : "";
  Parsed<std::optional<std::string>> content =
      ReadContent(message.Find("content"), place + ".content");
  if (!content.ok()) return content.error();
  if (const Value* task = message.Find("task"); task != nullptr && !task->is_null()) {
    return BadRequest(place + ".task is not served", place + ".task");
  }
  const bool is_last = idx + 1 == num_messages_;
  if (role == "assistant") {
    const Value* prefix = message.Find("prefix");
    const bool has_prefix = prefix != nullptr && prefix->is_bool() && prefix->AsBool();
    if (has_prefix && !is_last)
      return BadRequest("prefix is for the last message only", place + ".prefix");
    return ReadAssistant(message, place, content->value_or(""),
                         is_last && (has_prefix || continue_final_message));
  }
  if (role == "tool") {
    Value out = TextMessage("tool", content->value_or(""));
    const Value* id = message.Find("tool_call_id");
    if (id != nullptr && id->is_string()) out.Set("tool_call_id", *id);
    Append(std::move(out));
    return std::nullopt;
  }
  if (role == "system" || role == "developer" || role == "user" || role == "latest_reminder") {
    if (!content->has_value()) {
      return BadRequest(fmt::format("{}.content is required for role {}", place, role),
                        place + ".content");
    }
    Append(TextMessage(role == "developer" ? "system" : role, **std::move(content)));
    return std::nullopt;
  }
  return BadRequest(
      fmt::format("{}.role must be system, developer, user, assistant or tool, got {}", place,
                  role_value == nullptr ? "nothing" : ShortDump(*role_value)),
      place + ".role");
}

MaybeError MessageReader::ReadAssistant(const Value& message, const std::string& place,
                                        std::string content, bool prefix) {
  std::string reasoning;
  for (const std::string_view key : {"reasoning_content", "reasoning"}) {
    const Value* value = message.Find(key);
    if (value != nullptr && value->is_string()) reasoning = value->AsString();
  }
  std::vector<Value> tool_calls;
  const Value* calls = message.Find("tool_calls");
  if (calls != nullptr && !calls->is_null()) {
    if (!calls->is_array())
      return BadRequest(place + ".tool_calls must be an array", place + ".tool_calls");
    for (size_t i = 0; i < calls->items().size(); ++i) {
      Parsed<Value> call =
          ReadToolCall(calls->items()[i], fmt::format("{}.tool_calls[{}]", place, i));
      if (!call.ok()) return call.error();
      tool_calls.push_back(std::move(*call));
    }
  }
  const bool merges = !out_.empty() && out_.back().Find("role")->AsString() == "assistant";
  if (!merges) Append(TextMessage("assistant", ""));
  Value& target = out_.back();
  target.Set("content", Value::String(target.Find("content")->AsString() + content));
  if (!reasoning.empty()) {
    const Value* before = target.Find("reasoning");
    target.Set("reasoning",
               Value::String(before == nullptr ? reasoning : before->AsString() + reasoning));
  }
  if (!tool_calls.empty()) {
    if (target.Find("tool_calls") == nullptr) target.Set("tool_calls", Value::Array());
    for (Value& call : tool_calls) target.Find("tool_calls")->items().push_back(std::move(call));
  }
  if (prefix) {
    target.Set("wo_eos", Value::Bool(true));
    result_.continues_last = true;
    result_.last_has_reasoning = target.Find("reasoning") != nullptr;
    result_.last_content = target.Find("content")->AsString();
  }
  return std::nullopt;
}

ChatMessages MessageReader::Finish() {
  // A conversation that ends with an instruction has no turn to answer; an empty one makes it
  // well-formed.
  const std::string& last_role = out_.back().Find("role")->AsString();
  if (last_role == "system") Append(TextMessage("user", ""));
  result_.messages = Value::Array(std::move(out_));
  return std::move(result_);
}

}  // namespace

Parsed<ChatMessages> ReadMessages(const Value* messages, bool continue_final_message,
                                  const RequestLimits& limits) {
  if (messages == nullptr || !messages->is_array() || messages->items().empty()) {
    return BadRequest("messages must be an array of at least one message", "messages");
  }
  const std::vector<Value>& items = messages->items();
  if (items.size() > static_cast<size_t>(limits.max_messages)) {
    return BadRequest(fmt::format("messages may have at most {} items, got {}", limits.max_messages,
                                  items.size()),
                      "messages");
  }
  MessageReader reader(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    if (MaybeError error = reader.Read(items[i], i, continue_final_message))
      return *std::move(error);
  }
  const bool ends_with_assistant = items.back().Find("role")->AsString() == "assistant";
  ChatMessages result = reader.Finish();
  if (ends_with_assistant && !result.continues_last) {
    return BadRequest(
        "the last message must be from user or tool; to continue an assistant message set prefix: "
        "true on it",
        "messages");
  }
  if (!ends_with_assistant && continue_final_message) {
    return BadRequest("continue_final_message needs an assistant message at the end",
                      "continue_final_message");
  }
  return result;
}

}  // namespace fathom::api::openai
