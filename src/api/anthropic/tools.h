// Anthropic's tools and tool_choice. Pure; any thread.
#pragma once

#include <string>

#include "api/api_options.h"
#include "api/field_reader.h"
#include "json/json.h"

namespace fathom::api::anthropic {

struct ToolUse {
  enum class Choice { kAuto, kAny, kNamed, kNone };
  json::Value tools = json::Value::Array();  // {type, function}, as the encoder takes them
  Choice choice = Choice::kAuto;
  std::string name;      // of kNamed
  bool parallel = true;  // more than one call per answer
};

// Tools that Anthropic's servers run (web search and the like) are left out: the model answers
// without them.
ToolUse ReadTools(FieldReader* fields, const RequestLimits& limits);

}  // namespace fathom::api::anthropic
