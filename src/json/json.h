// The one JSON adapter: a document model that keeps what re-rendering needs (key order, number
// lexemes) and a strict bounded parser. Values, no exceptions; any thread. Boost.JSON's parser
// works behind it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace fathom::json {

struct ParseLimits {
  int max_depth = 128;
  int64_t max_nodes = 50'000'000;
  bool unique_keys = false;  // refuse duplicate keys instead of taking the last
};

class Value;
struct Member;  // {std::string key; Value value;}

// null, bool, number, string, array or object. A number keeps its source lexeme, so that integers
// of any size and 1 against 1.0 survive. An object keeps insertion order; of duplicate keys the
// first position and the last value stay.
class Value {
 public:
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };

  Value() = default;
  static Value Bool(bool b);
  static Value Number(int64_t n);
  static Value Number(double n);                  // finite; rendered as Python's repr
  static Value NumberLexeme(std::string lexeme);  // a valid JSON number
  static Value String(std::string s);             // valid UTF-8
  static Value Array();
  static Value Array(std::vector<Value> items);
  static Value Object();
  static Value Object(std::vector<Member> members);

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::kNull; }
  bool is_bool() const { return kind_ == Kind::kBool; }
  bool is_number() const { return kind_ == Kind::kNumber; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_array() const { return kind_ == Kind::kArray; }
  bool is_object() const { return kind_ == Kind::kObject; }

  bool AsBool() const;  // CHECKs the kind, as the next three do
  const std::string& AsString() const;
  const std::vector<Value>& items() const;
  const std::vector<Member>& members() const;
  std::vector<Value>& items();
  std::vector<Member>& members();
  const std::string& lexeme() const;  // of a number
  std::optional<int64_t> ToInt64()
      const;  // a number that is an integer in range ("1", "-3"; not "1.0")
  std::optional<double> ToDouble() const;  // a finite number

  // Member lookup of an object; null when absent (or when this is no object).
  const Value* Find(std::string_view key) const;
  Value* Find(std::string_view key);
  // Appends, or replaces the value of an existing key in its place.
  void Set(std::string_view key, Value value);

 private:
  Kind kind_ = Kind::kNull;
  bool bool_ = false;
  std::string text_;  // string, or the number's lexeme
  std::vector<Value> items_;
  std::vector<Member> members_;
};

struct Member {
  std::string key;
  Value value;
};

// One whole JSON text, strict: UTF-8 checked, no trailing bytes, no NaN or infinity, lone
// surrogates refused. The message names the byte offset.
Result<Value> Parse(std::string_view text, const ParseLimits& limits = {});

// Compact: {"a":1,"b":[true,null]}. Non-ASCII stays raw; numbers keep their lexeme.
std::string Dump(const Value& value);
// As Python's json.dumps(ensure_ascii=False): ", " and ": " between, numbers as Python would print
// them after reading them (1e10 -> 10000000000.0; integers exact), non-ASCII raw, C0 escapes \u00xx
// in lowercase.
std::string DumpPython(const Value& value);
// A finite double as Python's repr: shortest round trip, 1.0, 1e-07, 10000000000.0.
std::string PythonFloat(double value);
// The quoted, escaped form of a string, and that form without its quotes (for streamed fragments).
std::string Quote(std::string_view text);
std::string Escape(std::string_view text);

}  // namespace fathom::json
