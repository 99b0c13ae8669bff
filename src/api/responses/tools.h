// The tools and tool_choice of a response. Pure; any thread.
#pragma once

#include <set>
#include <string>

#include "api/api_options.h"
#include "api/field_reader.h"
#include "api/output_rules.h"
#include "json/json.h"

namespace fathom::api::responses {

struct ToolUse {
  json::Value tools = json::Value::Array();  // {type, function}, as the encoder takes them
  // Those whose input is one text ("type": "custom"); the model is shown a function for each.
  std::set<std::string> custom_names;
  ToolChoice choice;
};

// Tools that OpenAI's servers run (web_search and the like) are left out: the model answers without
// them.
ToolUse ReadTools(FieldReader* fields, const RequestLimits& limits);

}  // namespace fathom::api::responses
