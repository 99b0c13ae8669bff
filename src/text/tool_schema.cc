#include "text/tool_schema.h"

namespace fathom::text {
namespace {

using json::Value;

bool IsString(const Value* value, std::string_view text) {
  return value != nullptr && value->is_string() && value->AsString() == text;
}

bool IsStringOnly(const Value& property) {
  const Value* type = property.Find("type");
  if (type != nullptr && type->is_array() && type->items().size() == 1) type = &type->items()[0];
  return IsString(type, "string");
}

}  // namespace

const ToolParameter* ToolSchema::Find(std::string_view parameter) const {
  for (const ToolParameter& candidate : parameters) {
    if (candidate.name == parameter) return &candidate;
  }
  return nullptr;
}

std::vector<ToolSchema> ReadToolSchemas(const Value& tools) {
  std::vector<ToolSchema> schemas;
  if (!tools.is_array()) return schemas;
  for (const Value& tool : tools.items()) {
    const Value* function = tool.Find("function");
    if (function == nullptr) function = &tool;
    const Value* name = function->Find("name");
    if (name == nullptr || !name->is_string()) continue;
    ToolSchema schema{name->AsString(), {}};
    const Value* parameters = function->Find("parameters");
    const Value* properties = parameters != nullptr ? parameters->Find("properties") : nullptr;
    if (properties != nullptr && properties->is_object()) {
      for (const json::Member& property : properties->members()) {
        schema.parameters.push_back({property.key, IsStringOnly(property.value)});
      }
    }
    schemas.push_back(std::move(schema));
  }
  return schemas;
}

}  // namespace fathom::text
