#include "json/json.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "base/check.h"

namespace fathom::json {

Value Value::Bool(bool b) {
  Value v;
  v.kind_ = Kind::kBool;
  v.bool_ = b;
  return v;
}

Value Value::Number(int64_t n) { return NumberLexeme(std::to_string(n)); }

Value Value::Number(double n) {
  CHECK(std::isfinite(n));
  return NumberLexeme(PythonFloat(n));
}

Value Value::NumberLexeme(std::string lexeme) {
  Value v;
  v.kind_ = Kind::kNumber;
  v.text_ = std::move(lexeme);
  return v;
}

Value Value::String(std::string s) {
  Value v;
  v.kind_ = Kind::kString;
  v.text_ = std::move(s);
  return v;
}

Value Value::Array() { return Array(std::vector<Value>()); }

Value Value::Array(std::vector<Value> items) {
  Value v;
  v.kind_ = Kind::kArray;
  v.items_ = std::move(items);
  return v;
}

Value Value::Object() { return Object(std::vector<Member>()); }

Value Value::Object(std::vector<Member> members) {
  Value v;
  v.kind_ = Kind::kObject;
  v.members_ = std::move(members);
  return v;
}

bool Value::AsBool() const {
  CHECK(is_bool());
  return bool_;
}

const std::string& Value::AsString() const {
  CHECK(is_string());
  return text_;
}

const std::vector<Value>& Value::items() const {
  CHECK(is_array());
  return items_;
}

std::vector<Value>& Value::items() {
  CHECK(is_array());
  return items_;
}

const std::vector<Member>& Value::members() const {
  CHECK(is_object());
  return members_;
}

std::vector<Member>& Value::members() {
  CHECK(is_object());
  return members_;
}

const std::string& Value::lexeme() const {
  CHECK(is_number());
  return text_;
}

std::optional<int64_t> Value::ToInt64() const {
  if (!is_number()) return std::nullopt;
  int64_t out = 0;
  const char* end = text_.data() + text_.size();
  const auto [stopped, error] = std::from_chars(text_.data(), end, out);
  if (error != std::errc() || stopped != end) return std::nullopt;
  return out;
}

std::optional<double> Value::ToDouble() const {
  if (!is_number()) return std::nullopt;
  double out = 0;
  const char* end = text_.data() + text_.size();
  const auto [stopped, error] = std::from_chars(text_.data(), end, out);
  // An underflow is reported as out of range too; its value is zero or the nearest subnormal.
  if (error == std::errc::result_out_of_range && std::fabs(out) < 1) return out;
  if (error != std::errc() || stopped != end || !std::isfinite(out)) return std::nullopt;
  return out;
}

const Value* Value::Find(std::string_view key) const {
  for (const Member& member : members_) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}

Value* Value::Find(std::string_view key) {
  return const_cast<Value*>(static_cast<const Value*>(this)->Find(key));
}

void Value::Set(std::string_view key, Value value) {
  CHECK(is_object());
  if (Value* existing = Find(key)) {
    *existing = std::move(value);
  } else {
    members_.push_back({std::string(key), std::move(value)});
  }
}

std::string PythonFloat(double value) {
  char buffer[32];
  const auto [end, error] =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  CHECK(error == std::errc());
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const size_t e = text.find('e');
  const char* exponent_text = buffer + e + 1;  // "+10", "-06"; no terminator follows
  int exponent = 0;
  std::from_chars(exponent_text + (*exponent_text == '+' ? 1 : 0), end, exponent);
  const bool negative = text.front() == '-';
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits += c;
  }
  std::string out = negative ? "-" : "";
  const int num_digits = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (num_digits > 1) out += "." + digits.substr(1);
    return out + fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0)
    return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (num_digits <= exponent + 1) {
    return out + digits + std::string(static_cast<size_t>(exponent + 1 - num_digits), '0') + ".0";
  }
  const auto point = static_cast<size_t>(exponent + 1);
  return out + digits.substr(0, point) + "." + digits.substr(point);
}

std::string Escape(std::string_view text) {
  std::string out;
  out.reserve(text.size() + text.size() / 16 + 2);
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          out += c;
        }
    }
  }
  return out;
}

std::string Quote(std::string_view text) { return '"' + Escape(text) + '"'; }

namespace {

// The two ways of writing differ in separators and in how numbers are shown.
struct Style {
  std::string_view comma;
  std::string_view colon;
  bool python_numbers;
};

// A number as Python prints it after reading it: integers exact, the rest as a float's repr.
std::string PythonNumber(const std::string& lexeme) {
  if (lexeme == "-0") return "0";
  if (lexeme.find_first_of(".eE") == std::string::npos) return lexeme;
  return PythonFloat(Value::NumberLexeme(lexeme).ToDouble().value_or(0));
}

void Write(const Value& value, const Style& style, std::string* out);

void WriteArray(const std::vector<Value>& items, const Style& style, std::string* out) {
  *out += '[';
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) *out += style.comma;
    Write(items[i], style, out);
  }
  *out += ']';
}

void WriteObject(const std::vector<Member>& members, const Style& style, std::string* out) {
  *out += '{';
  for (size_t i = 0; i < members.size(); ++i) {
    if (i > 0) *out += style.comma;
    *out += Quote(members[i].key);
    *out += style.colon;
    Write(members[i].value, style, out);
  }
  *out += '}';
}

void Write(const Value& value, const Style& style, std::string* out) {
  switch (value.kind()) {
    case Value::Kind::kNull:
      *out += "null";
      return;
    case Value::Kind::kBool:
      *out += value.AsBool() ? "true" : "false";
      return;
    case Value::Kind::kNumber:
      *out += style.python_numbers ? PythonNumber(value.lexeme()) : value.lexeme();
      return;
    case Value::Kind::kString:
      *out += Quote(value.AsString());
      return;
    case Value::Kind::kArray:
      WriteArray(value.items(), style, out);
      return;
    case Value::Kind::kObject:
      WriteObject(value.members(), style, out);
      return;
  }
}

}  // namespace

std::string Dump(const Value& value) {
  std::string out;
  Write(value, {",", ":", false}, &out);
  return out;
}

std::string DumpPython(const Value& value) {
  std::string out;
  Write(value, {", ", ": ", true}, &out);
  return out;
}

}  // namespace fathom::json
