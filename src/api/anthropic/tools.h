// Anthropic's tools and tool_choice. Pure; any thread.
#pragma once

#include "api/api_options.h"
#include "api/field_reader.h"
#include "api/output_rules.h"
#include "json/json.h"

namespace fathom::api::anthropic {

struct ToolUse {
  json::Value tools = json::Value::Array();  // {type, function}, as the encoder takes them
  ToolChoice choice;
};

// Tools that Anthropic's servers run (web search and the like) are left out: the model answers
// without them.
ToolUse ReadTools(FieldReader* fields, const RequestLimits& limits);

}  // namespace fathom::api::anthropic
