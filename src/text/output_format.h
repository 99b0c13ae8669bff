// Output formats: what an answer may look like, as JSON texts that Grammar compiles (xgrammar's
// structural tags). Pure; any thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "json/json.h"

namespace fathom::text {

// Formats of the content alone.
json::Value JsonSchemaFormat(const json::Value& schema);  // an object, or true or false
json::Value JsonObjectFormat();
json::Value RegexFormat(const std::string& pattern);  // matches the whole content
json::Value ChoiceFormat(const std::vector<std::string>& choices);
json::Value EbnfFormat(const std::string& grammar);  // its rule `root`

// How tool calls are held to the tools.
struct ToolCallFormat {
  json::Value tools = json::Value::Array();  // {type, function} objects that may be called
  bool is_required = false;                  // at least one call, and nothing else
  bool parallel = true;                      // more than one
};

struct OutputFormat {
  bool in_reasoning = false;  // the prompt ended with <think>: free text up to </think>
  std::optional<json::Value> content = std::nullopt;   // unset: any text
  std::optional<ToolCallFormat> calls = std::nullopt;  // unset: calls are not held to anything
};

// The text to compile. A call is written as the model's prompt format writes it; parameters follow
// the tool's schema, or are free for a tool with "strict": false. Content, reasoning and texts
// within calls hold none of the markup that the output parser would take for something else.
std::string StructuralTag(const OutputFormat& format);

}  // namespace fathom::text
