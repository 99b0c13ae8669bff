#include "api/anthropic/content.h"

#include <fmt/format.h>

#include <unordered_set>
#include <utility>

#include "api/field_reader.h"

namespace fathom::api::anthropic {
namespace {

using json::Value;

constexpr std::string_view kBillingHeader = "x-anthropic-billing-header";

std::string StringOf(const Value& object, std::string_view key) {
  const Value* value = object.Find(key);
  return value != nullptr && value->is_string() ? value->AsString() : "";
}

ApiError Wrong(const std::string& place, std::string_view what) {
  return BadRequest(fmt::format("{}: {}", place, what), place);
}

// A system text without the line that tells whom to bill.
std::string WithoutBilling(const std::string& text) {
  if (!text.starts_with(kBillingHeader)) return text;
  const size_t line_end = text.find('\n');
  return line_end == std::string::npos ? "" : text.substr(line_end + 1);
}

class TurnReader {
 public:
  TurnReader(const ReasoningSeal& seal, std::string_view scope) : seal_(seal), scope_(scope) {}

  MaybeError ReadSystem(const Value& system, const std::string& place);
  MaybeError ReadMessage(const Value& message, const std::string& place);
  TurnList& turns() { return turns_; }

 private:
  MaybeError ReadUser(const Value& content, const std::string& place);
  MaybeError ReadAssistant(const Value& content, const std::string& place);
  MaybeError ReadUserBlock(const Value& block, const std::string& type, const std::string& place);
  MaybeError ReadAssistantBlock(const Value& block, const std::string& type,
                                const std::string& place);
  MaybeError ReadToolResult(const Value& block, const std::string& place);
  MaybeError ReadToolUse(const Value& block, const std::string& place);
  static Parsed<std::string> ReadDocument(const Value& block, const std::string& place);
  static Parsed<std::string> ResultText(const Value* content, const std::string& place);

  const ReasoningSeal& seal_;
  const std::string_view scope_;
  TurnList turns_;
  bool in_head_ = true;  // no message but system ones so far
  std::unordered_set<std::string> call_ids_;
};

void AppendParagraph(const std::string& text, std::string* joined) {
  if (!joined->empty() && !text.empty()) *joined += "\n\n";
  *joined += text;
}

// Which of the request's tools are there from here on. The prompt shows them all at its head, where
// they stay, so that the prefix holds.
bool IsToolChange(const Value& block) {
  const std::string type = StringOf(block, "type");
  return type == "tool_addition" || type == "tool_removal";
}

// A tool that a change brings along is told where it comes.
std::string ToolDefinition(const Value& block) {
  const Value* tool = block.Find("tool");
  const Value* definition = tool == nullptr ? nullptr : tool->Find("definition");
  if (definition == nullptr || !definition->is_object()) return "";
  return "A tool was added:\n" + json::DumpPython(*definition);
}

// The texts of a string or a list of text blocks, joined by an empty line.
Parsed<std::string> ReadTexts(const Value& content, const std::string& place) {
  if (content.is_string()) return WithoutBilling(content.AsString());
  if (!content.is_array()) return Wrong(place, "must be a string or a list of text blocks");
  std::string joined;
  for (size_t i = 0; i < content.items().size(); ++i) {
    const Value& block = content.items()[i];
    const Value* text = block.Find("text");
    if (IsToolChange(block)) {
      AppendParagraph(ToolDefinition(block), &joined);
    } else if (text == nullptr || !text->is_string()) {
      return Wrong(fmt::format("{}.{}", place, i), "must be a text block");
    } else if (!text->AsString().starts_with(kBillingHeader)) {
      AppendParagraph(text->AsString(), &joined);
    }
  }
  return joined;
}

MaybeError TurnReader::ReadSystem(const Value& system, const std::string& place) {
  Parsed<std::string> text = ReadTexts(system, place);
  if (!text.ok()) return text.error();
  if (text->empty()) return std::nullopt;
  // In the middle of a conversation it stands where it came, so that the prefix before it holds.
  in_head_ ? turns_.AddSystem(*text) : turns_.AddUser(*std::move(text));
  return std::nullopt;
}

MaybeError TurnReader::ReadMessage(const Value& message, const std::string& place) {
  if (!message.is_object()) return Wrong(place, "must be an object");
  const std::string role = StringOf(message, "role");
  const Value* content = message.Find("content");
  if (role == "system" && content == nullptr) return std::nullopt;
  if (content == nullptr || (!content->is_string() && !content->is_array()))
    return Wrong(place + ".content", "must be a string or a list of content blocks");
  if (role == "system") return ReadSystem(*content, place + ".content");
  in_head_ = false;
  if (role == "assistant") return ReadAssistant(*content, place + ".content");
  if (role == "user" || role == "ctx" || role == "msg")
    return ReadUser(*content, place + ".content");
  return Wrong(place + ".role", fmt::format("must be user or assistant, got {}", Shown(role)));
}

MaybeError TurnReader::ReadUser(const Value& content, const std::string& place) {
  if (content.is_string()) {
    turns_.AddUser(content.AsString());
    return std::nullopt;
  }
  for (size_t i = 0; i < content.items().size(); ++i) {
    const Value& block = content.items()[i];
    if (MaybeError error =
            ReadUserBlock(block, StringOf(block, "type"), fmt::format("{}.{}", place, i)))
      return error;
  }
  if (content.items().empty()) turns_.AddUser("");
  return std::nullopt;
}

MaybeError TurnReader::ReadUserBlock(const Value& block, const std::string& type,
                                     const std::string& place) {
  if (type == "tool_result") return ReadToolResult(block, place);
  if (type == "image") return Wrong(place, "image content is not supported by this model");
  if (type == "document" || type == "search_result") {
    Parsed<std::string> text = ReadDocument(block, place);
    if (!text.ok()) return text.error();
    turns_.AddUser(*std::move(text));
    return std::nullopt;
  }
  if (type == "tool_reference") {
    turns_.AddUser(StringOf(block, "tool_name"));
    return std::nullopt;
  }
  if (type != "text")
    return Wrong(place + ".type", fmt::format("{} is not supported", Shown(type)));
  const Value* text = block.Find("text");
  if (text == nullptr || !text->is_string()) return Wrong(place + ".text", "must be a string");
  if (!text->AsString().empty()) turns_.AddUser(text->AsString());
  return std::nullopt;
}

// Plain text only: a title, and the source's or content's text.
Parsed<std::string> TurnReader::ReadDocument(const Value& block, const std::string& place) {
  const Value* source = block.Find("source");
  std::string text = StringOf(block, "title");
  const auto add = [&text](const std::string& part) {
    if (!text.empty() && !part.empty()) text += "\n\n";
    text += part;
  };
  if (source != nullptr && source->is_string()) add(source->AsString());  // of a search result
  const bool is_text = source != nullptr && StringOf(*source, "type") == "text";
  const Value* content = block.Find("content");
  if (source != nullptr && StringOf(*source, "type") == "content")
    content = source->Find("content");
  if (is_text) {
    add(StringOf(*source, "data"));
  } else if (content != nullptr) {
    Parsed<std::string> parts = ReadTexts(*content, place + ".content");
    if (!parts.ok()) return parts.error();
    add(*parts);
  } else {
    return Wrong(place, "document content is supported as plain text only");
  }
  return text;
}

Parsed<std::string> TurnReader::ResultText(const Value* content, const std::string& place) {
  if (content == nullptr || content->is_null()) return std::string();
  if (content->is_string()) return content->AsString();
  if (!content->is_array()) return Wrong(place, "must be a string or a list of content blocks");
  std::string joined;
  for (size_t i = 0; i < content->items().size(); ++i) {
    const Value& block = content->items()[i];
    const std::string type = StringOf(block, "type");
    std::string text = fmt::format("[Unsupported {}]", type);
    if (type == "text") text = StringOf(block, "text");
    if (type == "tool_reference") text = StringOf(block, "tool_name");
    if (type == "document" || type == "search_result") {
      Parsed<std::string> document = ReadDocument(block, place);
      if (document.ok()) text = *std::move(document);
    }
    if (i > 0) joined += "\n\n";
    joined += text;
  }
  return joined;
}

MaybeError TurnReader::ReadToolResult(const Value& block, const std::string& place) {
  const std::string id = StringOf(block, "tool_use_id");
  if (call_ids_.count(id) == 0) {
    return Wrong(place, fmt::format("unknown tool_use_id {}: no tool_use block before it has this "
                                    "id; send the whole conversation",
                                    Shown(id)));
  }
  Parsed<std::string> text = ResultText(block.Find("content"), place + ".content");
  if (!text.ok()) return text.error();
  turns_.AddToolResult(id, *std::move(text));
  return std::nullopt;
}

MaybeError TurnReader::ReadAssistant(const Value& content, const std::string& place) {
  turns_.AddEmptyAssistant();
  if (content.is_string()) {
    turns_.AddContent(content.AsString());
    return std::nullopt;
  }
  for (size_t i = 0; i < content.items().size(); ++i) {
    const Value& block = content.items()[i];
    if (MaybeError error =
            ReadAssistantBlock(block, StringOf(block, "type"), fmt::format("{}.{}", place, i)))
      return error;
  }
  return std::nullopt;
}

MaybeError TurnReader::ReadAssistantBlock(const Value& block, const std::string& type,
                                          const std::string& place) {
  if (type == "tool_use") return ReadToolUse(block, place);
  if (type == "thinking") {
    const std::string text = StringOf(block, "thinking");
    turns_.AddReasoning(text);
    const auto id = seal_.VerifiedId(scope_, StringOf(block, "signature"), text);
    if (id) turns_.AddReplayKey(SignatureKey(*id));
    return std::nullopt;
  }
  // What servers of other models did by themselves; this one has no such tools.
  const bool is_servers = type == "redacted_thinking" || type == "server_tool_use" ||
                          type.ends_with("_tool_result") || type.starts_with("mcp_") ||
                          type == "fallback" || type == "compaction";
  if (is_servers) return std::nullopt;
  if (type != "text")
    return Wrong(place + ".type", fmt::format("{} is not supported", Shown(type)));
  turns_.AddContent(StringOf(block, "text"), "\n\n");
  return std::nullopt;
}

MaybeError TurnReader::ReadToolUse(const Value& block, const std::string& place) {
  const std::string id = StringOf(block, "id");
  const std::string name = StringOf(block, "name");
  if (id.empty() || name.empty()) return Wrong(place, "a tool_use block needs an id and a name");
  const Value* input = block.Find("input");
  if (input != nullptr && !input->is_object() && !input->is_null())
    return Wrong(place + ".input", "must be an object");
  const bool has_input = input != nullptr && input->is_object();
  turns_.AddToolCall(id, name, has_input ? json::Dump(*input) : "{}");
  call_ids_.insert(id);
  return std::nullopt;
}

}  // namespace

Parsed<TurnList> ReadTurns(const Value* system, const Value* messages, const RequestLimits& limits,
                           const ReasoningSeal& seal, std::string_view scope) {
  if (messages == nullptr || !messages->is_array() || messages->items().empty())
    return BadRequest("messages: must be a list of at least one message", "messages");
  const std::vector<Value>& items = messages->items();
  if (items.size() > static_cast<size_t>(limits.max_messages)) {
    return BadRequest(fmt::format("messages: may have at most {} items, got {}",
                                  limits.max_messages, items.size()),
                      "messages");
  }
  TurnReader reader(seal, scope);
  if (system != nullptr) {
    if (MaybeError error = reader.ReadSystem(*system, "system")) return *std::move(error);
  }
  size_t num_users = 0;  // still to come
  for (const Value& message : items) num_users += StringOf(message, "role") == "user" ? 1 : 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (StringOf(items[i], "role") == "user") --num_users;
    // A system message for one turn only.
    if (num_users > 0 && StringOf(items[i], "clear_at") == "next_user_message") continue;
    if (MaybeError error = reader.ReadMessage(items[i], fmt::format("messages.{}", i)))
      return *std::move(error);
  }
  if (reader.turns().ends_with_assistant() && !reader.turns().ContinueLast()) {
    return BadRequest(
        "messages: the last message has a tool_use block; send its tool_result, or end with text",
        "messages");
  }
  return std::move(reader.turns());
}

}  // namespace fathom::api::anthropic
