#include "api/responses/tools.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace fathom::api::responses {
namespace {

using json::Value;

std::string StringOf(const Value& object, std::string_view key) {
  const Value* value = object.Find(key);
  return value != nullptr && value->is_string() ? value->AsString() : "";
}

Value FunctionTool(Value function) {
  return Value::Object({{"type", Value::String("function")}, {"function", std::move(function)}});
}

// name, description, parameters and strict in the client's order, nulls dropped.
Parsed<Value> ReadFunction(const Value& tool, const std::string& place) {
  const Value* parameters = tool.Find("parameters");
  if (parameters != nullptr && !parameters->is_null() && !parameters->is_object())
    return BadRequest(place + ".parameters must be a JSON schema object", "tools");
  Value function = Value::Object();
  for (const json::Member& member : tool.members()) {
    const bool is_shown = member.key == "name" || member.key == "description" ||
                          member.key == "parameters" || member.key == "strict";
    if (is_shown && !member.value.is_null()) function.Set(member.key, member.value);
  }
  return FunctionTool(std::move(function));
}

// A function of one text. A grammar for it is told to the model, not enforced.
Value CustomFunction(const Value& tool) {
  std::string description = StringOf(tool, "description");
  const Value* format = tool.Find("format");
  const std::string definition = format == nullptr ? "" : StringOf(*format, "definition");
  if (!definition.empty()) description += "\n\nThe input follows this grammar:\n" + definition;
  Value properties = Value::Object({{"input", Value::Object({{"type", Value::String("string")}})}});
  return FunctionTool(Value::Object(
      {{"name", *tool.Find("name")},
       {"description", Value::String(std::move(description))},
       {"parameters", Value::Object({{"type", Value::String("object")},
                                     {"properties", std::move(properties)},
                                     {"required", Value::Array({Value::String("input")})}})}}));
}

// Of {mode, tools: [{type, name}]}.
bool ReadAllowed(const Value& choice, ToolChoice* out) {
  const std::string mode = StringOf(choice, "mode");
  const Value* tools = choice.Find("tools");
  if ((mode != "auto" && mode != "required") || tools == nullptr || !tools->is_array())
    return false;
  if (mode == "required") out->mode = ToolChoice::Mode::kRequired;
  for (const Value& tool : tools->items()) {
    const std::string name = StringOf(tool, "name");
    if (!name.empty()) out->allowed.push_back(name);
  }
  return !out->allowed.empty();
}

void ReadToolChoice(FieldReader* fields, ToolUse* use) {
  use->choice.parallel = fields->Bool("parallel_tool_calls").value_or(true);
  const Value* choice = fields->Find("tool_choice");
  if (choice == nullptr) return;
  const std::string word = choice->is_string() ? choice->AsString() : "";
  const std::string type = StringOf(*choice, "type");
  const std::string name = StringOf(*choice, "name");
  if (word == "auto") return;
  if (word == "none") {
    use->choice.mode = ToolChoice::Mode::kNone;
  } else if (word == "required" && !use->tools.items().empty()) {
    use->choice.mode = ToolChoice::Mode::kRequired;
  } else if ((type == "function" || type == "custom") && !name.empty()) {
    use->choice.mode = ToolChoice::Mode::kRequired;
    use->choice.name = name;
  } else if (type != "allowed_tools" || !ReadAllowed(*choice, &use->choice)) {
    fields->Fail(
        "tool_choice",
        fmt::format("tool_choice must be none, auto, required (with tools to choose from), "
                    "a function or allowed_tools, got {}",
                    type.empty() ? ShortDump(*choice) : Shown(type)));
  }
}

}  // namespace

ToolUse ReadTools(FieldReader* fields, const RequestLimits& limits) {
  ToolUse use;
  const Value* tools = fields->Array("tools");
  if (tools != nullptr && tools->items().size() > static_cast<size_t>(limits.max_tools)) {
    fields->Fail("tools", fmt::format("tools may have at most {} items, got {}", limits.max_tools,
                                      tools->items().size()));
    return use;
  }
  for (size_t i = 0; tools != nullptr && i < tools->items().size(); ++i) {
    const Value& tool = tools->items()[i];
    const std::string type = StringOf(tool, "type");
    const std::string place = fmt::format("tools[{}]", i);
    if (type.empty()) {
      fields->Fail("tools", place + ".type is required");
      return use;
    }
    if (type != "function" && type != "custom") {
      LogDebug("left out the tool {}, which this server does not run", type);
      continue;
    }
    if (StringOf(tool, "name").empty()) {
      fields->Fail("tools", place + ".name is required");
      return use;
    }
    if (type == "custom") {
      use.custom_names.insert(StringOf(tool, "name"));
      use.tools.items().push_back(CustomFunction(tool));
      continue;
    }
    Parsed<Value> function = ReadFunction(tool, place);
    if (!function.ok()) {
      fields->Fail(function.error());
      return use;
    }
    use.tools.items().push_back(std::move(*function));
  }
  ReadToolChoice(fields, &use);
  return use;
}

}  // namespace fathom::api::responses
