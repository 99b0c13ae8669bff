// The tools of a request: checked and reduced to what the prompt shows. Pure; any thread.
#pragma once

#include "api/api_error.h"
#include "api/api_options.h"
#include "api/field_reader.h"
#include "api/output_rules.h"
#include "json/json.h"

namespace fathom::api::openai {

// What the model may do with the tools of a request.
struct ToolUse {
  json::Value tools =
      json::Value::Array();  // [{type, function: {name, description, parameters, strict}}]
  bool parse_calls = false;  // tool calls are recognised in the answer
  ToolChoice choice;
};

ToolUse ReadTools(FieldReader* fields, const RequestLimits& limits);

}  // namespace fathom::api::openai
