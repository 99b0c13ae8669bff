#include "checkpoint/config_fields.h"

#include <fmt/format.h>

#include <utility>

namespace fathom::checkpoint {
namespace {

constexpr size_t kMaxShownValue = 60;

const json::Value& EmptyObject() {
  static const json::Value empty = json::Value::Object();
  return empty;
}

std::string Shown(const json::Value* value) {
  if (value == nullptr) return "missing";
  std::string text = json::Dump(*value);
  if (text.size() > kMaxShownValue) {
    size_t end = kMaxShownValue;
    while ((static_cast<unsigned char>(text[end]) & 0xc0) == 0x80)
      --end;  // a whole UTF-8 character
    text = text.substr(0, end) + "…";
  }
  return text;
}

}  // namespace

ConfigFields::ConfigFields(const json::Value& object, std::string file, std::string prefix,
                           Status* status)
    : object_(object), file_(std::move(file)), prefix_(std::move(prefix)), status_(status) {}

bool ConfigFields::Has(std::string_view field) const {
  const json::Value* value = Find(field);
  return value != nullptr && !value->is_null();
}

int64_t ConfigFields::Int(std::string_view field, int64_t low, int64_t high) {
  const json::Value* value = Find(field);
  const auto number = value != nullptr ? value->ToInt64() : std::nullopt;
  if (number && *number >= low && *number <= high) return *number;
  Refuse(field,
         low == high ? fmt::format("{}", low) : fmt::format("an integer from {} to {}", low, high));
  return low;
}

int64_t ConfigFields::IntOr(std::string_view field, int64_t low, int64_t high, int64_t fallback) {
  return Has(field) ? Int(field, low, high) : fallback;
}

double ConfigFields::Number(std::string_view field, double low, double high) {
  const json::Value* value = Find(field);
  const auto number = value != nullptr ? value->ToDouble() : std::nullopt;
  if (number && *number >= low && *number <= high) return *number;
  Refuse(field, fmt::format("a number from {} to {}", low, high));
  return low;
}

double ConfigFields::NumberOr(std::string_view field, double low, double high, double fallback) {
  return Has(field) ? Number(field, low, high) : fallback;
}

std::vector<int> ConfigFields::Ints(std::string_view field, int64_t low, int64_t high) {
  const json::Value* value = Find(field);
  if (value == nullptr || !value->is_array()) {
    Refuse(field, "a list of integers");
    return {};
  }
  std::vector<int> numbers;
  numbers.reserve(value->items().size());
  for (const json::Value& item : value->items()) {
    const auto number = item.ToInt64();
    if (!number || *number < low || *number > high) {
      Fail(fmt::format("{}{}[{}] is {}, expected an integer from {} to {}", prefix_, field,
                       numbers.size(), Shown(&item), low, high));
      return {};
    }
    numbers.push_back(static_cast<int>(*number));
  }
  return numbers;
}

size_t ConfigFields::OneOf(std::string_view field, const std::vector<std::string_view>& names) {
  const json::Value* value = Find(field);
  std::string expected;
  for (size_t i = 0; i < names.size(); ++i) {
    if (value != nullptr && value->is_string() && value->AsString() == names[i]) return i;
    expected += fmt::format("{}\"{}\"", i == 0 ? "" : " or ", names[i]);
  }
  Refuse(field, expected);
  return 0;
}

void ConfigFields::ExpectInt(std::string_view field, int64_t value) {
  if (Has(field)) Int(field, value, value);
}

void ConfigFields::ExpectBool(std::string_view field, bool value) {
  if (!Has(field)) return;
  const json::Value& found = *Find(field);
  if (!found.is_bool() || found.AsBool() != value) Refuse(field, value ? "true" : "false");
}

void ConfigFields::ExpectString(std::string_view field, std::string_view value) {
  if (Has(field)) OneOf(field, {value});
}

ConfigFields ConfigFields::Object(std::string_view field) {
  const json::Value* value = Find(field);
  const bool found = value != nullptr && value->is_object();
  if (!found) Refuse(field, "an object");
  return {found ? *value : EmptyObject(), file_, fmt::format("{}{}.", prefix_, field), status_};
}

void ConfigFields::Refuse(std::string_view field, std::string_view expected) {
  Fail(fmt::format("{}{} is {}, expected {}", prefix_, field, Shown(Find(field)), expected));
}

void ConfigFields::Fail(std::string_view what) {
  if (status_->ok()) *status_ = BadModel(fmt::format("{}: {}", file_, what));
}

}  // namespace fathom::checkpoint
