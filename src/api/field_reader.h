// FieldReader: typed fields of one JSON object, with the checks and texts that every endpoint
// shares. Keeps the first error and goes on, so that a parser reads as a list of its fields. null
// is the same as absent. One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api/api_error.h"
#include "json/json.h"

namespace fathom::api {

class FieldReader {
 public:
  // `object` must be a JSON object and outlive the reader.
  explicit FieldReader(const json::Value& object) : object_(object) {}

  // The field, or null when it is absent or JSON null.
  const json::Value* Find(std::string_view name) const;

  std::optional<bool> Bool(std::string_view name);
  std::optional<int64_t> Integer(std::string_view name, int64_t min, int64_t max);
  // min and max are allowed values.
  std::optional<double> Number(std::string_view name, double min, double max);
  std::optional<std::string> String(std::string_view name);
  const json::Value* Object(std::string_view name);
  const json::Value* Array(std::string_view name);
  // Token ids in [0, vocab_size); at most max_items.
  std::vector<int32_t> TokenIds(std::string_view name, int32_t vocab_size, size_t max_items);

  void Fail(std::string_view name, std::string message);
  void Fail(ApiError error);
  bool ok() const { return !error_.has_value(); }
  const MaybeError& error() const { return error_; }

 private:
  const json::Value& object_;
  MaybeError error_;
};

// "null", "a boolean", "a number", "a string", "an array", "an object"
std::string_view KindName(const json::Value& value);
// The value as it may stand in a message: short, one line.
std::string ShortDump(const json::Value& value);
inline std::string Shown(std::string_view text) {
  return ShortDump(json::Value::String(std::string(text)));
}

// `array` as token ids in [0, vocab_size). The message names the first that is none.
Parsed<std::vector<int32_t>> ReadTokenIds(const json::Value& array, std::string_view name,
                                          int32_t vocab_size);

}  // namespace fathom::api
