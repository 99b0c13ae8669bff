#include "api/field_reader.h"

#include <fmt/format.h>

#include <limits>
#include <utility>

namespace fathom::api {

std::string_view KindName(const json::Value& value) {
  switch (value.kind()) {
    case json::Value::Kind::kNull:
      return "null";
    case json::Value::Kind::kBool:
      return "a boolean";
    case json::Value::Kind::kNumber:
      return "a number";
    case json::Value::Kind::kString:
      return "a string";
    case json::Value::Kind::kArray:
      return "an array";
    case json::Value::Kind::kObject:
      return "an object";
  }
  return "";
}

std::string ShortDump(const json::Value& value) {
  if (!value.is_number() && !value.is_bool() &&
      !(value.is_string() && value.AsString().size() <= 40)) {
    return std::string(KindName(value));
  }
  const std::string text = json::Dump(value);
  return text.size() <= 100 ? text : std::string(KindName(value));
}

void FieldReader::Fail(ApiError error) {
  if (!error_) error_ = std::move(error);
}

void FieldReader::Fail(std::string_view name, std::string message) {
  Fail(BadRequest(std::move(message), std::string(name)));
}

const json::Value* FieldReader::Find(std::string_view name) const {
  const json::Value* value = object_.Find(name);
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::optional<bool> FieldReader::Bool(std::string_view name) {
  const json::Value* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_bool()) return value->AsBool();
  Fail(name, fmt::format("{} must be true or false, got {}", name, ShortDump(*value)));
  return std::nullopt;
}

std::optional<int64_t> FieldReader::Integer(std::string_view name, int64_t min, int64_t max) {
  const json::Value* value = Find(name);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> number = value->is_number() ? value->ToInt64() : std::nullopt;
  if (!number) {
    Fail(name, fmt::format("{} must be an integer, got {}", name, ShortDump(*value)));
  } else if (*number < min) {
    Fail(name, fmt::format("{} must be at least {}, got {}", name, min, *number));
  } else if (*number > max) {
    Fail(name, fmt::format("{} must be at most {}, got {}", name, max, *number));
  } else {
    return number;
  }
  return std::nullopt;
}

std::optional<double> FieldReader::Number(std::string_view name, double min, double max) {
  const json::Value* value = Find(name);
  if (value == nullptr) return std::nullopt;
  const std::optional<double> number = value->is_number() ? value->ToDouble() : std::nullopt;
  if (number && *number >= min && *number <= max) return number;
  Fail(name, number ? fmt::format("{} must be between {} and {}, got {}", name, min, max,
                                  ShortDump(*value))
                    : fmt::format("{} must be a number, got {}", name, ShortDump(*value)));
  return std::nullopt;
}

std::optional<std::string> FieldReader::String(std::string_view name) {
  const json::Value* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return value->AsString();
  Fail(name, fmt::format("{} must be a string, got {}", name, ShortDump(*value)));
  return std::nullopt;
}

const json::Value* FieldReader::Object(std::string_view name) {
  const json::Value* value = Find(name);
  if (value == nullptr || value->is_object()) return value;
  Fail(name, fmt::format("{} must be an object, got {}", name, ShortDump(*value)));
  return nullptr;
}

const json::Value* FieldReader::Array(std::string_view name) {
  const json::Value* value = Find(name);
  if (value == nullptr || value->is_array()) return value;
  Fail(name, fmt::format("{} must be an array, got {}", name, ShortDump(*value)));
  return nullptr;
}

std::vector<int32_t> FieldReader::TokenIds(std::string_view name, int32_t vocab_size,
                                           size_t max_items) {
  const json::Value* array = Array(name);
  if (array == nullptr) return {};
  if (array->items().size() > max_items) {
    Fail(name, fmt::format("{} may have at most {} items, got {}", name, max_items,
                           array->items().size()));
    return {};
  }
  Parsed<std::vector<int32_t>> ids = ReadTokenIds(*array, name, vocab_size);
  if (ids.ok()) return std::move(*ids);
  Fail(ids.error());
  return {};
}

Parsed<std::vector<int32_t>> ReadTokenIds(const json::Value& array, std::string_view name,
                                          int32_t vocab_size) {
  std::vector<int32_t> ids;
  ids.reserve(array.items().size());
  for (const json::Value& item : array.items()) {
    const std::optional<int64_t> id = item.is_number() ? item.ToInt64() : std::nullopt;
    if (!id || *id < 0 || *id >= vocab_size) {
      return BadRequest(fmt::format("{}: {} is no token id; token ids are integers from 0 to {}",
                                    name, ShortDump(item), vocab_size - 1),
                        std::string(name));
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

}  // namespace fathom::api
