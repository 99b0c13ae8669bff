#include "text/format_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace fathom::text {
namespace {

using json::Value;

constexpr size_t kMaxSchemaBytes = 64 << 10;
constexpr size_t kMaxEbnfBytes = 64 << 10;
constexpr size_t kMaxRegexBytes = 8 << 10;
constexpr int kMaxNesting = 64;
constexpr size_t kMaxEnumValues = 5'000;
constexpr int64_t kMaxAtLeast = 10'000;    // minLength, minItems, minProperties, {n}
constexpr int64_t kMaxAtMost = 1'000'000;  // maxLength, maxItems, maxProperties

using Keywords = std::span<const std::string_view>;

// No grammar can hold an answer to these.
constexpr std::string_view kUnsupported[] = {
    "not",          "if",           "then",        "else",        "dependentRequired",
    "dependencies", "contains",     "minContains", "maxContains", "dependentSchemas",
    "$dynamicRef",  "$recursiveRef"};

// Keywords that narrow what a value may be. The first one present of these seven is the one that
// counts; what else may stand beside it follows below.
constexpr std::string_view kChoosing[] = {"$ref",  "const", "enum", "anyOf",
                                          "oneOf", "allOf", "type"};
constexpr std::string_view kBounds[] = {"minimum", "maximum", "exclusiveMinimum",
                                        "exclusiveMaximum"};
constexpr std::string_view kNumberKeywords[] = {"minimum", "maximum", "exclusiveMinimum",
                                                "exclusiveMaximum", "multipleOf"};
constexpr std::string_view kStringKeywords[] = {"minLength", "maxLength", "pattern"};
constexpr std::string_view kArrayKeywords[] = {"items", "prefixItems", "minItems", "maxItems"};
constexpr std::string_view kObjectKeywords[] = {
    "properties",    "required",          "additionalProperties", "minProperties",
    "maxProperties", "patternProperties", "propertyNames"};

bool IsIn(std::string_view word, Keywords list) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

std::string FirstOf(const Value& schema, Keywords keywords) {
  for (const std::string_view keyword : keywords) {
    if (schema.Find(keyword) != nullptr) return std::string(keyword);
  }
  return "";
}

// The deepest nesting of round brackets, outside of quotes and character classes.
int NestingOf(std::string_view text, bool has_quotes) {
  int depth = 0, deepest = 0;
  char closer = 0;  // of the quotes or the class at hand
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\\') {
      ++i;
    } else if (closer != 0) {
      if (c == closer) closer = 0;
    } else if (c == '[') {
      closer = ']';
    } else if (c == '"' && has_quotes) {
      closer = '"';
    } else if (c == '(') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ')') {
      --depth;
    }
  }
  return deepest;
}

// The largest number in braces, such as {3,200}.
int64_t LargestRepeat(std::string_view text) {
  int64_t largest = 0;
  for (size_t i = text.find('{'); i != std::string_view::npos; i = text.find('{', i + 1)) {
    int64_t number = 0;
    for (size_t j = i + 1; j < text.size() && text[j] != '}'; ++j) {
      const bool is_digit = text[j] >= '0' && text[j] <= '9';
      number = is_digit ? std::min<int64_t>(number * 10 + (text[j] - '0'), kMaxAtMost) : 0;
      largest = std::max(largest, number);
      if (!is_digit && text[j] != ',' && text[j] != ' ') break;
    }
  }
  return largest;
}

Status CheckText(std::string_view text, std::string_view place, size_t max_bytes, bool has_quotes) {
  if (text.size() > max_bytes) {
    return InvalidArgument(
        fmt::format("{} may have at most {} bytes, got {}", place, max_bytes, text.size()));
  }
  if (NestingOf(text, has_quotes) > kMaxNesting) {
    return InvalidArgument(fmt::format("{} may nest at most {} brackets", place, kMaxNesting));
  }
  if (LargestRepeat(text) > kMaxAtLeast) {
    return InvalidArgument(fmt::format("{} may repeat at most {} times", place, kMaxAtLeast));
  }
  return OkStatus();
}

class SchemaChecker {
 public:
  Status Check(const Value& schema, const std::string& place, int depth);

 private:
  Status CheckKeywords(const Value& schema, const std::string& place);
  Status CheckNumbers(const Value& schema, const std::string& place);
  Status CheckTyped(const Value& schema, const std::string& place);
  Status CheckRequired(const Value& schema, const std::string& place);
  Status CheckChildren(const Value& schema, const std::string& place, int depth);

  size_t num_enum_values_ = 0;
};

Status Unsupported(std::string_view place, std::string_view keyword, std::string_view why = "") {
  return InvalidArgument(
      fmt::format("{}: the keyword '{}' is not supported{}", place, keyword, why));
}

// What narrows a value must be what the grammar is made from: anything else would be dropped.
Status SchemaChecker::CheckKeywords(const Value& schema, const std::string& place) {
  if (const std::string found = FirstOf(schema, kUnsupported); !found.empty()) {
    return Unsupported(place, found);
  }
  const Value* unique = schema.Find("uniqueItems");
  if (unique != nullptr && unique->is_bool() && unique->AsBool()) {
    return Unsupported(place, "uniqueItems");
  }
  const std::string chosen = FirstOf(schema, kChoosing);
  if (chosen == "type") return CheckTyped(schema, place);
  for (const Keywords keywords : std::initializer_list<Keywords>{
           kChoosing, kNumberKeywords, kStringKeywords, kArrayKeywords, kObjectKeywords}) {
    for (const std::string_view keyword : keywords) {
      const bool counts =
          keyword == chosen || (keyword == "type" && (chosen == "enum" || chosen == "const")) ||
          (chosen.empty() && (IsIn(keyword, kArrayKeywords) || IsIn(keyword, kObjectKeywords)));
      if (!counts && schema.Find(keyword) != nullptr) {
        return Unsupported(place, keyword,
                           chosen.empty() ? " without 'type'" : " beside '" + chosen + "'");
      }
    }
  }
  if (chosen == "allOf" && schema.Find("allOf")->is_array() &&
      schema.Find("allOf")->items().size() > 1) {
    return Unsupported(place, "allOf", " with more than one schema");
  }
  const Value* ref = schema.Find("$ref");
  if (ref != nullptr && (!ref->is_string() || !ref->AsString().starts_with("#"))) {
    return Unsupported(place, "$ref", " to another document");
  }
  return OkStatus();
}

Status SchemaChecker::CheckTyped(const Value& schema, const std::string& place) {
  const bool has_length =
      schema.Find("minLength") != nullptr || schema.Find("maxLength") != nullptr;
  if (has_length && (schema.Find("pattern") != nullptr || schema.Find("format") != nullptr)) {
    return Unsupported(place, "minLength or maxLength", " beside 'pattern' or 'format'");
  }
  if (schema.Find("pattern") != nullptr && schema.Find("format") != nullptr) {
    return Unsupported(place, "pattern", " beside 'format'");
  }
  if (schema.Find("multipleOf") != nullptr) {
    const Value& type = *schema.Find("type");
    const bool is_integer = type.is_string() && type.AsString() == "integer";
    if (!is_integer || !FirstOf(schema, kBounds).empty()) {
      return Unsupported(place, "multipleOf", " but of an unbounded integer");
    }
  }
  return OkStatus();
}

Status SchemaChecker::CheckNumbers(const Value& schema, const std::string& place) {
  for (const auto& [keyword, limit] :
       {std::pair<std::string_view, int64_t>{"minLength", kMaxAtLeast},
        {"minItems", kMaxAtLeast},
        {"minProperties", kMaxAtLeast},
        {"maxLength", kMaxAtMost},
        {"maxItems", kMaxAtMost},
        {"maxProperties", kMaxAtMost}}) {
    const Value* value = schema.Find(keyword);
    if (value == nullptr) continue;
    const std::optional<double> number = value->is_number() ? value->ToDouble() : std::nullopt;
    if (!number || *number < 0 || *number > static_cast<double>(limit)) {
      return InvalidArgument(
          fmt::format("{}.{} must be an integer from 0 to {}", place, keyword, limit));
    }
  }
  const Value* values = schema.Find("enum");
  if (values == nullptr) return OkStatus();
  if (!values->is_array() || values->items().empty()) {
    return InvalidArgument(place + ".enum must be a list of values");
  }
  num_enum_values_ += values->items().size();
  if (num_enum_values_ > kMaxEnumValues) {
    return InvalidArgument(
        fmt::format("{}: enums may have at most {} values in all", place, kMaxEnumValues));
  }
  return OkStatus();
}

Status SchemaChecker::CheckRequired(const Value& schema, const std::string& place) {
  const Value* required = schema.Find("required");
  if (required == nullptr) return OkStatus();
  const Value* properties = schema.Find("properties");
  if (!required->is_array()) return InvalidArgument(place + ".required must be a list of names");
  for (const Value& name : required->items()) {
    if (!name.is_string()) return InvalidArgument(place + ".required must be a list of names");
    if (properties == nullptr || properties->Find(name.AsString()) == nullptr) {
      return InvalidArgument(fmt::format("{}.required names '{}', which is not in properties",
                                         place, name.AsString()));
    }
  }
  return OkStatus();
}

Status SchemaChecker::CheckChildren(const Value& schema, const std::string& place, int depth) {
  for (const std::string_view keyword : {"items", "additionalProperties", "propertyNames",
                                         "unevaluatedProperties", "unevaluatedItems"}) {
    const Value* child = schema.Find(keyword);
    if (child == nullptr) continue;
    RETURN_IF_ERROR(Check(*child, fmt::format("{}.{}", place, keyword), depth));
  }
  for (const std::string_view keyword :
       {"properties", "patternProperties", "$defs", "definitions"}) {
    const Value* children = schema.Find(keyword);
    if (children == nullptr) continue;
    if (!children->is_object()) {
      return InvalidArgument(fmt::format("{}.{} must be an object of schemas", place, keyword));
    }
    for (const json::Member& member : children->members()) {
      const std::string inner = fmt::format("{}.{}.{}", place, keyword, member.key);
      if (keyword == "patternProperties") RETURN_IF_ERROR(CheckRegex(member.key, inner));
      RETURN_IF_ERROR(Check(member.value, inner, depth));
    }
  }
  for (const std::string_view keyword : {"anyOf", "oneOf", "allOf", "prefixItems"}) {
    const Value* children = schema.Find(keyword);
    if (children == nullptr) continue;
    if (!children->is_array() || children->items().empty()) {
      return InvalidArgument(fmt::format("{}.{} must be a list of schemas", place, keyword));
    }
    for (size_t i = 0; i < children->items().size(); ++i) {
      RETURN_IF_ERROR(
          Check(children->items()[i], fmt::format("{}.{}[{}]", place, keyword, i), depth));
    }
  }
  return OkStatus();
}

Status SchemaChecker::Check(const Value& schema, const std::string& place, int depth) {
  if (depth > kMaxNesting) {
    return InvalidArgument(
        fmt::format("{}: schemas may nest at most {} levels", place, kMaxNesting));
  }
  if (schema.is_bool()) return OkStatus();
  if (!schema.is_object()) {
    return InvalidArgument(place + " must be a JSON schema: an object, true or false");
  }
  RETURN_IF_ERROR(CheckKeywords(schema, place));
  RETURN_IF_ERROR(CheckNumbers(schema, place));
  RETURN_IF_ERROR(CheckRequired(schema, place));
  if (const Value* pattern = schema.Find("pattern"); pattern != nullptr) {
    if (!pattern->is_string()) return InvalidArgument(place + ".pattern must be a string");
    RETURN_IF_ERROR(CheckRegex(pattern->AsString(), place + ".pattern"));
  }
  return CheckChildren(schema, place, depth + 1);
}

}  // namespace

Status CheckJsonSchema(const Value& schema, std::string_view place) {
  const size_t size = json::Dump(schema).size();
  if (size > kMaxSchemaBytes) {
    return InvalidArgument(
        fmt::format("{} may have at most {} bytes, got {}", place, kMaxSchemaBytes, size));
  }
  return SchemaChecker().Check(schema, std::string(place), 0);
}

Status CheckRegex(std::string_view pattern, std::string_view place) {
  return CheckText(pattern, place, kMaxRegexBytes, false);
}

Status CheckEbnf(std::string_view grammar, std::string_view place) {
  return CheckText(grammar, place, kMaxEbnfBytes, true);
}

}  // namespace fathom::text
