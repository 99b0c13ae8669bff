#include "api/responses/input_items.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>

#include "api/field_reader.h"
#include "api/openai/content_parts.h"

namespace fathom::api::responses {
namespace {

using json::Value;

std::string StringOf(const Value& object, std::string_view key) {
  const Value* value = object.Find(key);
  return value != nullptr && value->is_string() ? value->AsString() : "";
}

ApiError TooMany(const RequestLimits& limits) {
  return BadRequest(fmt::format("input may have at most {} items", limits.max_messages), "input");
}

// The texts of a reasoning item's parts.
std::string PartTexts(const Value& item, std::string_view key) {
  const Value* parts = item.Find(key);
  std::string text;
  if (parts == nullptr || !parts->is_array()) return text;
  for (const Value& part : parts->items()) text += StringOf(part, "text");
  return text;
}

class ItemReader {
 public:
  ItemReader(const ReasoningSeal& seal, std::string_view scope) : seal_(seal), scope_(scope) {}

  MaybeError Read(const Value& item, const std::string& place);
  TurnList& turns() { return turns_; }

 private:
  MaybeError ReadMessage(const Value& item, const std::string& place);
  MaybeError ReadCall(const Value& item, bool is_custom, const std::string& place);
  MaybeError ReadOutput(const Value& item, const std::string& place);
  void ReadReasoning(const Value& item);
  void AddKeyOf(const Value& item);

  const ReasoningSeal& seal_;
  const std::string_view scope_;
  TurnList turns_;
  std::unordered_set<std::string> call_ids_;
};

MaybeError ItemReader::Read(const Value& item, const std::string& place) {
  if (!item.is_object()) return BadRequest(place + " must be an object", "input");
  const std::string type = StringOf(item, "type");
  if (type.empty() || type == "message") return ReadMessage(item, place);
  if (type == "function_call" || type == "custom_tool_call")
    return ReadCall(item, type == "custom_tool_call", place);
  if (type == "function_call_output" || type == "custom_tool_call_output")
    return ReadOutput(item, place);
  if (type == "reasoning") {
    ReadReasoning(item);
    return std::nullopt;
  }
  // What hosted tools of other servers left; no part of what this model said or saw.
  if (type.ends_with("_call") || type.ends_with("_call_output") || type.starts_with("mcp_"))
    return std::nullopt;
  return BadRequest(fmt::format("{}.type {} is not supported: send messages, reasoning, function "
                                "calls and their outputs",
                                place, Shown(type)),
                    "input");
}

void ItemReader::AddKeyOf(const Value& item) {
  const std::string id = StringOf(item, "id");
  if (!id.empty()) turns_.AddReplayKey(id);
}

MaybeError ItemReader::ReadMessage(const Value& item, const std::string& place) {
  const std::string role = StringOf(item, "role");
  Parsed<std::optional<std::string>> content =
      openai::ReadContent(item.Find("content"), place + ".content");
  if (!content.ok()) return content.error();
  if (role == "assistant") {
    turns_.AddContent(content->value_or(""));
    AddKeyOf(item);
    return std::nullopt;
  }
  if (!content->has_value()) return BadRequest(place + ".content is required", "input");
  if (role == "user") {
    turns_.AddUser(**std::move(content));
  } else if (role == "system" || role == "developer") {
    turns_.AddSystem(**content);
  } else {
    return BadRequest(fmt::format("{}.role must be user, assistant, system or developer, got {}",
                                  place, Shown(role)),
                      "input");
  }
  return std::nullopt;
}

MaybeError ItemReader::ReadCall(const Value& item, bool is_custom, const std::string& place) {
  const std::string call_id = StringOf(item, "call_id");
  const std::string name = StringOf(item, "name");
  if (call_id.empty() || name.empty())
    return BadRequest(place + " needs a call_id and a name", "input");
  std::string arguments = StringOf(item, "arguments");
  if (is_custom) {
    arguments = json::Dump(Value::Object({{"input", Value::String(StringOf(item, "input"))}}));
  }
  turns_.AddToolCall(call_id, name, arguments.empty() ? "{}" : arguments);
  call_ids_.insert(call_id);
  return std::nullopt;
}

MaybeError ItemReader::ReadOutput(const Value& item, const std::string& place) {
  const std::string call_id = StringOf(item, "call_id");
  if (call_ids_.count(call_id) == 0) {
    return BadRequest(
        fmt::format("No tool call found for the output with call_id {}; replay full input instead",
                    Shown(call_id)),
        "input");
  }
  const Value* output = item.Find("output");
  std::string text;
  if (output != nullptr && output->is_array()) {
    for (const Value& part : output->items()) {
      if (!text.empty()) text += "\n\n";
      const Value* part_text = part.Find("text");
      text += part_text != nullptr && part_text->is_string()
                  ? part_text->AsString()
                  : fmt::format("[Unsupported {}]", StringOf(part, "type"));
    }
  } else if (output != nullptr && output->is_string()) {
    text = output->AsString();
  } else if (output != nullptr && !output->is_null()) {
    return BadRequest(place + ".output must be a string or a list of parts", "input");
  }
  turns_.AddToolResult(call_id, std::move(text));
  return std::nullopt;
}

// The text as it was sealed, else as it is given; of other servers' sealed text the summary stands.
void ItemReader::ReadReasoning(const Value& item) {
  std::string text = PartTexts(item, "content");
  if (const auto sealed = seal_.Open(scope_, StringOf(item, "encrypted_content"))) {
    text = sealed->text;
    turns_.AddReplayKey(SignatureKey(sealed->id));
  }
  if (text.empty()) text = PartTexts(item, "summary");
  turns_.AddReasoning(text);
  AddKeyOf(item);
}

}  // namespace

Parsed<Value> ReadInput(const Value* input, ResponseStore& store, std::string_view scope,
                        const RequestLimits& limits) {
  if (input != nullptr && input->is_string()) {
    return Value::Array({Value::Object({{"type", Value::String("message")},
                                        {"role", Value::String("user")},
                                        {"content", *input}})});
  }
  if (input == nullptr || !input->is_array() || input->items().empty())
    return BadRequest("input must be a string or a list of at least one item", "input");
  if (input->items().size() > static_cast<size_t>(limits.max_messages)) return TooMany(limits);
  Value items = *input;
  for (size_t i = 0; i < items.items().size(); ++i) {
    Value& item = items.items()[i];
    if (StringOf(item, "type") != "item_reference") continue;
    const std::string id = StringOf(item, "id");
    Value found = store.FindItem(scope, id);
    if (found.is_null()) {
      return BadRequest(
          fmt::format("input[{}]: item {} is not known; send the item itself", i, Shown(id)),
          "input");
    }
    item = std::move(found);
  }
  return items;
}

Parsed<std::vector<Value>> EarlierItems(const std::string& id, ResponseStore& store,
                                        std::string_view scope, const RequestLimits& limits) {
  std::vector<std::shared_ptr<const StoredResponse>> chain;
  for (std::string at = id; !at.empty(); at = chain.back()->previous_id) {
    auto response = store.Find(scope, at);
    if (response == nullptr) {
      return BadRequest(fmt::format("Previous response with id {} not found; replay full input "
                                    "instead",
                                    Shown(at)),
                        "previous_response_id", "previous_response_not_found");
    }
    chain.push_back(std::move(response));
    if (chain.size() > static_cast<size_t>(limits.max_messages)) return TooMany(limits);
  }
  std::vector<Value> items;
  for (auto it = chain.rbegin(); it != chain.rend(); ++it) {
    for (const Value* list : {&(*it)->input, (*it)->response.Find("output")}) {
      items.insert(items.end(), list->items().begin(), list->items().end());
    }
  }
  return items;
}

Parsed<TurnList> ReadTurns(const std::string& instructions, const std::vector<Value>& earlier,
                           const Value& input, const ReasoningSeal& seal, std::string_view scope) {
  ItemReader reader(seal, scope);
  if (!instructions.empty()) reader.turns().AddSystem(instructions);
  for (const Value& item : earlier) {
    if (MaybeError error = reader.Read(item, "previous_response_id")) return *std::move(error);
  }
  for (size_t i = 0; i < input.items().size(); ++i) {
    if (MaybeError error = reader.Read(input.items()[i], fmt::format("input[{}]", i)))
      return *std::move(error);
  }
  if (reader.turns().ends_with_assistant()) {
    return BadRequest("the last item must be a message of the user or the output of a call",
                      "input");
  }
  return std::move(reader.turns());
}

}  // namespace fathom::api::responses
