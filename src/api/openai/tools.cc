#include "api/openai/tools.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fathom::api::openai {
namespace {

using json::Value;

bool IsToolName(const std::string& name) {
  return !name.empty() && name.size() <= 128 && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.' || c == ':' || c == '/';
  });
}

// {type, function} with the function's known keys, in the client's order, nulls dropped.
Parsed<Value> ReadTool(const Value& tool, const std::string& place) {
  const Value* type = tool.Find("type");
  const Value* function = tool.Find("function");
  if (type == nullptr || !type->is_string() || type->AsString() != "function" ||
      function == nullptr || !function->is_object()) {
    return BadRequest(
        fmt::format("{} must be {{\"type\": \"function\", \"function\": {{…}}}}", place), place);
  }
  const Value* name = function->Find("name");
  if (name == nullptr || !name->is_string() || !IsToolName(name->AsString())) {
    return BadRequest(
        place + ".function.name must be 1 to 128 characters of A-Z, a-z, 0-9 and _ - . : /",
        place + ".function.name");
  }
  const Value* parameters = function->Find("parameters");
  if (parameters != nullptr && !parameters->is_null() && !parameters->is_object()) {
    return BadRequest(place + ".function.parameters must be a JSON schema object",
                      place + ".function.parameters");
  }
  Value out_function = Value::Object();
  for (const json::Member& member : function->members()) {
    const bool known = member.key == "name" || member.key == "description" ||
                       member.key == "parameters" || member.key == "strict";
    if (known && !member.value.is_null()) out_function.Set(member.key, member.value);
  }
  Value out = Value::Object();
  out.Set("type", Value::String("function"));
  out.Set("function", std::move(out_function));
  return out;
}

const Value* NameIn(const Value& choice) {
  const Value* function = choice.Find("function");
  const Value* name = (function != nullptr ? *function : choice).Find("name");
  return name != nullptr && name->is_string() ? name : nullptr;
}

// {type: allowed_tools, allowed_tools: {mode, tools}}: the tools that may be called; the prompt
// shows all.
bool ReadAllowedTools(const Value& choice, ToolUse* use) {
  const Value* allowed = choice.Find("allowed_tools");
  const Value* mode = allowed != nullptr ? allowed->Find("mode") : nullptr;
  const Value* tools = allowed != nullptr ? allowed->Find("tools") : nullptr;
  if (mode == nullptr || !mode->is_string() || tools == nullptr || !tools->is_array()) return false;
  if (mode->AsString() != "auto" && mode->AsString() != "required") return false;
  if (mode->AsString() == "required") use->choice.mode = ToolChoice::Mode::kRequired;
  for (const Value& tool : tools->items()) {
    const Value* name = NameIn(tool);
    if (name == nullptr) return false;
    use->choice.allowed.push_back(name->AsString());
  }
  return !use->choice.allowed.empty();
}

// An object that names one function, or those allowed.
bool ReadChoiceObject(const Value& choice, ToolUse* use) {
  const Value* type = choice.Find("type");
  const std::string kind = type != nullptr && type->is_string() ? type->AsString() : "";
  if (kind == "allowed_tools") return ReadAllowedTools(choice, use);
  const Value* name = NameIn(choice);
  if (kind != "function" || name == nullptr) return false;
  use->choice.mode = ToolChoice::Mode::kRequired;
  use->choice.name = name->AsString();
  return true;
}

void ReadToolChoice(FieldReader* fields, ToolUse* use) {
  const Value* choice = fields->Find("tool_choice");
  const bool has_tools = !use->tools.items().empty();
  use->parse_calls = has_tools;
  if (choice == nullptr) return;
  const std::string name = choice->is_string() ? choice->AsString() : "";
  const bool is_empty_list = fields->Find("tools") != nullptr && !has_tools;
  if (name == "none" || (name == "required" && is_empty_list)) {
    use->parse_calls = false;
    use->choice.mode = ToolChoice::Mode::kNone;
  } else if (!has_tools) {
    fields->Fail("tool_choice", "tool_choice is only allowed when tools are given");
  } else if (name == "required") {
    use->choice.mode = ToolChoice::Mode::kRequired;
  } else if (name != "auto" && !(choice->is_object() && ReadChoiceObject(*choice, use))) {
    fields->Fail("tool_choice",
                 fmt::format("tool_choice must be none, auto, required or a function, got {}",
                             ShortDump(*choice)));
  }
}

}  // namespace

ToolUse ReadTools(FieldReader* fields, const RequestLimits& limits) {
  ToolUse use;
  if (const Value* tools = fields->Array("tools")) {
    if (tools->items().size() > static_cast<size_t>(limits.max_tools)) {
      fields->Fail("tools", fmt::format("tools may have at most {} items, got {}", limits.max_tools,
                                        tools->items().size()));
      return use;
    }
    for (size_t i = 0; i < tools->items().size(); ++i) {
      Parsed<Value> tool = ReadTool(tools->items()[i], fmt::format("tools[{}]", i));
      if (!tool.ok()) {
        fields->Fail(tool.error());
        return use;
      }
      use.tools.items().push_back(std::move(*tool));
    }
  }
  ReadToolChoice(fields, &use);
  use.choice.parallel = fields->Bool("parallel_tool_calls").value_or(true);
  return use;
}

}  // namespace fathom::api::openai
