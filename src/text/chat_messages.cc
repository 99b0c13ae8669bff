#include "text/chat_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

namespace fathom::text {
namespace {

using json::Value;

constexpr std::string_view kTasks[] = {"action", "query",    "authority",
                                       "domain", "read_url", "title"};

std::optional<Role> RoleOf(std::string_view name) {
  if (name == "system") return Role::kSystem;
  if (name == "user") return Role::kUser;
  if (name == "assistant") return Role::kAssistant;
  if (name == "tool") return Role::kTool;
  if (name == "developer") return Role::kDeveloper;
  if (name == "latest_reminder") return Role::kLatestReminder;
  return std::nullopt;
}

bool IsAbsent(const Value* value) { return value == nullptr || value->is_null(); }

// Reads one message object; `where` is its place, for errors.
class MessageReader {
 public:
  MessageReader(const Value& object, std::string where, const SampledTurns* sampled)
      : object_(object), where_(std::move(where)), sampled_(sampled) {}

  Result<ChatMessage> Read() {
    if (!object_.is_object()) return InvalidArgument(where_ + ": expected an object");
    ChatMessage message;
    ASSIGN_OR_RETURN(message.role, ReadRole());
    ASSIGN_OR_RETURN(message.content, ReadText("content"));
    if (message.role == Role::kUser || message.role == Role::kTool) {
      RETURN_IF_ERROR(ReadBlock(&message));
    } else {
      RETURN_IF_ERROR(ReadTools(&message));
    }
    if (message.role == Role::kDeveloper && message.content.empty()) {
      return InvalidArgument(where_ + ".content: expected text, since the role is developer");
    }
    if (message.role == Role::kAssistant) RETURN_IF_ERROR(ReadAssistant(&message));
    if (message.role != Role::kTool) RETURN_IF_ERROR(ReadTask(&message));
    return message;
  }

 private:
  Result<Role> ReadRole() const {
    const Value* role = object_.Find("role");
    if (role == nullptr || !role->is_string()) {
      return InvalidArgument(where_ + ".role: expected a text");
    }
    const auto known = RoleOf(role->AsString());
    if (known.has_value()) return *known;
    return InvalidArgument(
        fmt::format("{}.role: unknown role {}, expected system, user, assistant, tool, developer "
                    "or latest_reminder",
                    where_, json::Quote(role->AsString())));
  }

  // A text, or a list of parts whose texts are joined by a blank line; absent and null are "".
  Result<std::string> ReadText(std::string_view key) const {
    const Value* value = object_.Find(key);
    if (IsAbsent(value)) return std::string();
    if (value->is_string()) return value->AsString();
    if (!value->is_array()) {
      return InvalidArgument(fmt::format("{}.{}: expected a text or a list of parts", where_, key));
    }
    std::string text;
    for (size_t i = 0; i < value->items().size(); ++i) {
      if (i > 0) text += "\n\n";
      ASSIGN_OR_RETURN(const std::string part,
                       ReadPart(value->items()[i], fmt::format("{}.{}[{}]", where_, key, i)));
      text += part;
    }
    return text;
  }

  static Result<std::string> ReadPart(const Value& part, const std::string& where) {
    const Value* type = part.Find("type");
    if (type == nullptr || !type->is_string()) {
      return InvalidArgument(where + ".type: expected a text");
    }
    if (type->AsString() != "text") return fmt::format("[Unsupported {}]", type->AsString());
    const Value* text = part.Find("text");
    if (text == nullptr || !text->is_string()) {
      return InvalidArgument(where + ".text: expected a text");
    }
    return text->AsString();
  }

  Status ReadBlock(ChatMessage* message) const {
    ContentBlock block;
    block.text = std::move(message->content);
    block.is_tool_result = message->role == Role::kTool;
    const Value* content = object_.Find("content");
    block.is_null = content != nullptr && content->is_null();
    if (block.is_tool_result) {
      ASSIGN_OR_RETURN(block.tool_call_id, ReadOptionalString(object_, "tool_call_id", where_));
    }
    message->content.clear();
    message->blocks.push_back(std::move(block));
    return OkStatus();
  }

  static Result<std::string> ReadOptionalString(const Value& object, std::string_view key,
                                                const std::string& where) {
    const Value* value = object.Find(key);
    if (IsAbsent(value)) return std::string();
    if (!value->is_string())
      return InvalidArgument(fmt::format("{}.{}: expected a text", where, key));
    return value->AsString();
  }

  Status ReadTools(ChatMessage* message) const {
    if (const Value* tools = object_.Find("tools"); !IsAbsent(tools)) {
      if (!tools->is_array()) return InvalidArgument(where_ + ".tools: expected a list");
      if (!tools->items().empty()) message->tools = tools;
    }
    if (const Value* format = object_.Find("response_format"); !IsAbsent(format)) {
      if (!format->is_object()) {
        return InvalidArgument(where_ + ".response_format: expected an object");
      }
      if (!format->members().empty()) message->response_format = format;
    }
    return OkStatus();
  }

  Status ReadAssistant(ChatMessage* message) const {
    const bool has_reasoning = !IsAbsent(object_.Find("reasoning"));
    ASSIGN_OR_RETURN(message->reasoning,
                     ReadText(has_reasoning ? "reasoning" : "reasoning_content"));
    if (const Value* without_eos = object_.Find("wo_eos"); !IsAbsent(without_eos)) {
      if (!without_eos->is_bool()) return InvalidArgument(where_ + ".wo_eos: expected a boolean");
      message->without_eos = without_eos->AsBool();
    }
    if (const Value* sampled = object_.Find("sampled"); sampled_ != nullptr && sampled != nullptr) {
      const auto idx = sampled->is_number() ? sampled->ToInt64() : std::nullopt;
      if (!idx || *idx < 0 || *idx >= static_cast<int64_t>(sampled_->size())) {
        return InvalidArgument(where_ + ".sampled: expected an index");
      }
      message->sampled = (*sampled_)[static_cast<size_t>(*idx)].get();
    }
    const Value* calls = object_.Find("tool_calls");
    if (IsAbsent(calls)) return OkStatus();
    if (!calls->is_array()) return InvalidArgument(where_ + ".tool_calls: expected a list");
    for (size_t i = 0; i < calls->items().size(); ++i) {
      ASSIGN_OR_RETURN(ToolCall call, ReadToolCall(calls->items()[i],
                                                   fmt::format("{}.tool_calls[{}]", where_, i)));
      message->tool_calls.push_back(std::move(call));
    }
    return OkStatus();
  }

  static Result<ToolCall> ReadToolCall(const Value& object, const std::string& where) {
    const Value* function = object.Find("function");
    if (function == nullptr || !function->is_object()) {
      return InvalidArgument(where + ".function: expected an object");
    }
    const Value* name = function->Find("name");
    if (name == nullptr || !name->is_string()) {
      return InvalidArgument(where + ".function.name: expected a text");
    }
    ToolCall call;
    call.name = name->AsString();
    call.arguments = function->Find("arguments");
    ASSIGN_OR_RETURN(call.id, ReadOptionalString(object, "id", where));
    if (call.id.empty()) {
      ASSIGN_OR_RETURN(call.id, ReadOptionalString(*function, "id", where + ".function"));
    }
    return call;
  }

  Status ReadTask(ChatMessage* message) const {
    ASSIGN_OR_RETURN(message->task, ReadOptionalString(object_, "task", where_));
    if (IsAbsent(object_.Find("task")) || std::ranges::count(kTasks, message->task) > 0) {
      return OkStatus();
    }
    return InvalidArgument(fmt::format("{}.task: unknown task {}, expected one of {}", where_,
                                       json::Quote(message->task), fmt::join(kTasks, ", ")));
  }

  const Value& object_;
  const std::string where_;
  const SampledTurns* const sampled_;
};

// Where a user or tool message goes: into the user turn before it, or null when it starts a turn.
ChatMessage* OpenTurn(std::vector<ChatMessage>* merged, const ChatMessage& message) {
  if (merged->empty()) return nullptr;
  ChatMessage& last = merged->back();
  if (last.role != Role::kUser || last.is_context != message.is_context) return nullptr;
  const bool takes_text = last.task.empty();
  return message.role == Role::kTool || takes_text ? &last : nullptr;
}

Status CheckUserContent(const std::vector<ChatMessage>& messages) {
  const auto is_null = [](const ContentBlock& b) { return b.is_null && !b.is_tool_result; };
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto& blocks = messages[i].blocks;
    if (!blocks.empty() && std::ranges::all_of(blocks, is_null)) {
      return InvalidArgument("messages: a user turn whose content is null, expected a text");
    }
  }
  return OkStatus();
}

}  // namespace

Result<std::vector<ChatMessage>> ReadMessages(const Value& messages, size_t num_context,
                                              const SampledTurns* sampled) {
  if (!messages.is_array()) return InvalidArgument("messages: expected a list");
  std::vector<ChatMessage> merged;
  for (size_t i = 0; i < messages.items().size(); ++i) {
    ASSIGN_OR_RETURN(
        ChatMessage message,
        MessageReader(messages.items()[i], fmt::format("messages[{}]", i), sampled).Read());
    message.is_context = i < num_context;
    const bool is_user_part = message.role == Role::kUser || message.role == Role::kTool;
    ChatMessage* turn = is_user_part ? OpenTurn(&merged, message) : nullptr;
    if (turn != nullptr) {
      turn->blocks.push_back(std::move(message.blocks.front()));
      continue;
    }
    if (is_user_part) message.role = Role::kUser;
    merged.push_back(std::move(message));
  }
  RETURN_IF_ERROR(CheckUserContent(merged));
  return merged;
}

void SortToolResults(std::vector<ChatMessage>* messages) {
  std::unordered_map<std::string_view, int> position_of;  // of the latest calls that had ids
  for (ChatMessage& message : *messages) {
    if (!message.tool_calls.empty()) {
      position_of.clear();
      for (size_t i = 0; i < message.tool_calls.size(); ++i) {
        if (!message.tool_calls[i].id.empty()) position_of[message.tool_calls[i].id] = i;
      }
    }
    std::vector<ContentBlock> results;
    for (const ContentBlock& block : message.blocks) {
      if (block.is_tool_result) results.push_back(block);
    }
    if (results.size() < 2 || position_of.empty()) continue;
    const auto position = [&](const ContentBlock& block) {
      const auto it = position_of.find(block.tool_call_id);
      return it != position_of.end() ? it->second : 0;
    };
    std::ranges::stable_sort(results, {}, position);
    auto next = results.begin();
    for (ContentBlock& block : message.blocks) {
      if (block.is_tool_result) block = std::move(*next++);
    }
  }
}

int LastUserIndex(const std::vector<ChatMessage>& messages) {
  int index = static_cast<int>(messages.size()) - 1;
  while (index >= 0 && messages[index].role != Role::kUser &&
         messages[index].role != Role::kDeveloper) {
    --index;
  }
  return index;
}

void DropOldThinking(std::vector<ChatMessage>* messages) {
  const int last_user = LastUserIndex(*messages);
  std::vector<ChatMessage> kept;
  for (int i = 0; i < static_cast<int>(messages->size()); ++i) {
    ChatMessage& message = (*messages)[i];
    if (i < last_user && message.role == Role::kDeveloper) continue;
    if (i < last_user) message.reasoning.clear();
    kept.push_back(std::move(message));
  }
  *messages = std::move(kept);
}

}  // namespace fathom::text
