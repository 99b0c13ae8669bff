// ConfigFields: typed, range-checked fields of one JSON object of config.json. The first error
// sticks and later reads return their lower bound, so that a parser reads straight on and asks for
// status() at the end. Messages: "config.json: num_hidden_layers is -1, expected an integer from 1
// to 512". One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "json/json.h"

namespace fathom::checkpoint {

class ConfigFields {
 public:
  // `object` and `status` outlive this. `prefix` stands before field names ("rope_scaling.").
  ConfigFields(const json::Value& object, std::string file, std::string prefix, Status* status);

  bool Has(std::string_view field) const;  // present and not null
  int64_t Int(std::string_view field, int64_t low, int64_t high);
  int64_t IntOr(std::string_view field, int64_t low, int64_t high, int64_t fallback);
  double Number(std::string_view field, double low, double high);
  double NumberOr(std::string_view field, double low, double high, double fallback);
  std::vector<int> Ints(std::string_view field, int64_t low, int64_t high);
  // The field has to be one of these strings; the index of the one it is.
  size_t OneOf(std::string_view field, const std::vector<std::string_view>& names);
  // The one value of a field that the model's mathematics fixes; absent is fine.
  void ExpectInt(std::string_view field, int64_t value);
  void ExpectBool(std::string_view field, bool value);
  void ExpectString(std::string_view field, std::string_view value);
  // An object field as fields of its own; an empty object after an error.
  ConfigFields Object(std::string_view field);
  const json::Value* Find(std::string_view field) const { return object_.Find(field); }

  bool ok() const { return status_->ok(); }
  // kBadModel: "config.json: FIELD is FOUND, expected EXPECTED".
  void Refuse(std::string_view field, std::string_view expected);
  // kBadModel: "config.json: WHAT".
  void Fail(std::string_view what);

 private:
  const json::Value& object_;
  std::string file_;
  std::string prefix_;
  Status* status_;
};

}  // namespace fathom::checkpoint
