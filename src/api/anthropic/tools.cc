#include "api/anthropic/tools.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace fathom::api::anthropic {
namespace {

using json::Value;

std::string StringOf(const Value& object, std::string_view key) {
  const Value* value = object.Find(key);
  return value != nullptr && value->is_string() ? value->AsString() : "";
}

// Anthropic's own tool types that its servers run, by their beginnings.
bool IsServerTool(std::string_view type) {
  static constexpr std::string_view kPrefixes[] = {"web_search",  "web_fetch",   "code_execution",
                                                   "tool_search", "mcp_toolset", "advisor"};
  return std::ranges::any_of(kPrefixes, [&](auto prefix) { return type.starts_with(prefix); });
}

// A schema says that it is an object's.
Value SchemaOf(const Value& given) {
  Value schema = given;
  if (schema.Find("type") == nullptr) schema.Set("type", Value::String("object"));
  return schema;
}

// {type, function} with name, description and parameters in the client's order.
Parsed<Value> ReadTool(const Value& tool, const std::string& place) {
  const std::string name = StringOf(tool, "name");
  if (name.empty() || name.size() > 256)
    return BadRequest(place + ".name: must be 1 to 256 characters", place);
  const Value* schema = tool.Find("input_schema");
  if (schema == nullptr || !schema->is_object())
    return BadRequest(place + ".input_schema: must be a JSON schema object", place);
  Value function = Value::Object();
  for (const json::Member& member : tool.members()) {
    if (member.key == "input_schema") function.Set("parameters", SchemaOf(member.value));
    const bool is_shown = member.key == "name" || member.key == "description";
    if (is_shown && member.value.is_string()) function.Set(member.key, member.value);
  }
  return Value::Object({{"type", Value::String("function")}, {"function", std::move(function)}});
}

void ReadToolChoice(FieldReader* fields, ToolUse* use) {
  const Value* choice = fields->Object("tool_choice");
  if (choice == nullptr) return;
  const std::string type = StringOf(*choice, "type");
  const Value* alone = choice->Find("disable_parallel_tool_use");
  use->choice.parallel = alone == nullptr || !alone->is_bool() || !alone->AsBool();
  if (type == "auto") return;
  if (type == "none") {
    use->choice.mode = ToolChoice::Mode::kNone;
  } else if (type == "any" || type == "tool") {
    use->choice.mode = ToolChoice::Mode::kRequired;
    use->choice.name = type == "tool" ? StringOf(*choice, "name") : "";
    const bool has_name = type == "any" || !use->choice.name.empty();
    if (use->tools.items().empty() || !has_name) {
      fields->Fail("tool_choice",
                   fmt::format("tool_choice: {} needs tools to choose from (tools that a server "
                               "would run do not count){}",
                               type, type == "tool" ? " and a name" : ""));
    }
  } else {
    fields->Fail("tool_choice", "tool_choice.type: must be auto, any, tool or none");
  }
}

}  // namespace

ToolUse ReadTools(FieldReader* fields, const RequestLimits& limits) {
  ToolUse use;
  const Value* tools = fields->Array("tools");
  if (tools != nullptr && tools->items().size() > static_cast<size_t>(limits.max_tools)) {
    fields->Fail("tools", fmt::format("tools: may have at most {} items, got {}", limits.max_tools,
                                      tools->items().size()));
    return use;
  }
  for (size_t i = 0; tools != nullptr && i < tools->items().size(); ++i) {
    const Value& item = tools->items()[i];
    const std::string place = fmt::format("tools.{}", i);
    const std::string type = StringOf(item, "type");
    if (IsServerTool(type)) {
      LogDebug("left out the tool {}, which this server does not run", type);
      continue;
    }
    if (!type.empty() && type != "custom" && item.Find("input_schema") == nullptr) {
      fields->Fail(place, fmt::format("{}.type: {} is not supported; send the tool as a custom one "
                                      "with its input_schema",
                                      place, Shown(type)));
      return use;
    }
    Parsed<Value> tool = ReadTool(item, place);
    if (!tool.ok()) {
      fields->Fail(tool.error());
      return use;
    }
    use.tools.items().push_back(std::move(*tool));
  }
  ReadToolChoice(fields, &use);
  return use;
}

}  // namespace fathom::api::anthropic
