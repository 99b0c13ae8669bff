// What the tool-call parser needs to know of a tool: the names of its parameters and which are
// texts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "json/json.h"

namespace fathom::text {

struct ToolParameter {
  std::string name;
  bool is_string = false;  // the schema's type is "string" and nothing else
};

struct ToolSchema {
  std::string name;
  std::vector<ToolParameter> parameters;

  // Null when the tool has no such parameter.
  const ToolParameter* Find(std::string_view parameter) const;
};

// From request-level tools: {type, function} or function objects. Items of another form are left
// out.
std::vector<ToolSchema> ReadToolSchemas(const json::Value& tools);

}  // namespace fathom::text
