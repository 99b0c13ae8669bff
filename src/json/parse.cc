// Parse: Boost.JSON's incremental parser drives a builder of our own values, because Boost's values
// keep neither number lexemes nor integers past 64 bits.
#include <fmt/format.h>

#include <boost/json/basic_parser_impl.hpp>
#include <boost/json/src.hpp>
#include <cmath>
#include <unordered_map>

#include "json/json.h"

namespace fathom::json {
namespace {

namespace bj = boost::json;

// Of duplicate keys the first position and the last value stay. Whether there were any.
bool MergeDuplicateKeys(std::vector<Member>* members) {
  std::unordered_map<std::string_view, size_t> first;
  first.reserve(members->size());
  std::vector<size_t> target(members->size());
  bool any = false;
  for (size_t i = 0; i < members->size(); ++i) {
    const auto [it, inserted] = first.emplace((*members)[i].key, i);
    target[i] = it->second;
    any = any || !inserted;
  }
  if (!any) return false;
  std::vector<Member> merged;
  std::vector<size_t> position(members->size());
  for (size_t i = 0; i < members->size(); ++i) {
    if (target[i] == i) {
      position[i] = merged.size();
      merged.push_back(std::move((*members)[i]));
    } else {
      merged[position[target[i]]].value = std::move((*members)[i].value);
    }
  }
  *members = std::move(merged);
  return true;
}

// basic_parser's handler. One frame per open array or object.
class Builder {
 public:
  static constexpr size_t max_object_size = static_cast<size_t>(-1);
  static constexpr size_t max_array_size = static_cast<size_t>(-1);
  static constexpr size_t max_key_size = static_cast<size_t>(-1);
  static constexpr size_t max_string_size = static_cast<size_t>(-1);

  Value TakeRoot() { return std::move(root_); }
  void set_limits(const ParseLimits& limits) {
    nodes_left_ = limits.max_nodes;
    unique_keys_ = limits.unique_keys;
  }
  const char* failure() const { return failure_; }

  bool on_document_begin(bj::error_code&) { return true; }
  bool on_document_end(bj::error_code&) { return true; }
  bool on_object_begin(bj::error_code&) {
    frames_.push_back({Value::Object(), {}});
    return true;
  }
  bool on_object_end(size_t, bj::error_code& error) {
    Value object = std::move(frames_.back().value);
    frames_.pop_back();
    if (object.members().size() > 1 && MergeDuplicateKeys(&object.members()) && unique_keys_) {
      return Fail("a key stands twice in one object", error);
    }
    return Add(std::move(object), error);
  }
  bool on_array_begin(bj::error_code&) {
    frames_.push_back({Value::Array(), {}});
    return true;
  }
  bool on_array_end(size_t, bj::error_code& error) {
    Value array = std::move(frames_.back().value);
    frames_.pop_back();
    return Add(std::move(array), error);
  }
  bool on_key_part(bj::string_view part, size_t, bj::error_code&) { return Append(part); }
  bool on_key(bj::string_view part, size_t, bj::error_code&) {
    Append(part);
    frames_.back().key = std::move(text_);
    text_.clear();
    return true;
  }
  bool on_string_part(bj::string_view part, size_t, bj::error_code&) { return Append(part); }
  bool on_string(bj::string_view part, size_t, bj::error_code& error) {
    Append(part);
    Value value = Value::String(std::move(text_));
    text_.clear();
    return Add(std::move(value), error);
  }
  bool on_number_part(bj::string_view part, bj::error_code&) { return Append(part); }
  bool on_int64(int64_t, bj::string_view part, bj::error_code& error) {
    return Number(part, error);
  }
  bool on_uint64(uint64_t, bj::string_view part, bj::error_code& error) {
    return Number(part, error);
  }
  bool on_double(double value, bj::string_view part, bj::error_code& error) {
    if (!std::isfinite(value)) return Fail("a number is out of range", error);
    return Number(part, error);
  }
  bool on_bool(bool b, bj::error_code& error) { return Add(Value::Bool(b), error); }
  bool on_null(bj::error_code& error) { return Add(Value(), error); }
  bool on_comment_part(bj::string_view, bj::error_code&) { return true; }
  bool on_comment(bj::string_view, bj::error_code&) { return true; }

 private:
  struct Frame {
    Value value;
    std::string key;
  };

  bool Append(bj::string_view part) {
    text_.append(part.data(), part.size());
    return true;
  }
  bool Number(bj::string_view part, bj::error_code& error) {
    Append(part);
    Value value = Value::NumberLexeme(std::move(text_));
    text_.clear();
    return Add(std::move(value), error);
  }
  bool Add(Value value, bj::error_code& error) {
    if (--nodes_left_ < 0) return Fail("too many values", error);
    if (frames_.empty()) {
      root_ = std::move(value);
    } else if (frames_.back().value.is_array()) {
      frames_.back().value.items().push_back(std::move(value));
    } else {
      frames_.back().value.members().push_back({std::move(frames_.back().key), std::move(value)});
    }
    return true;
  }
  bool Fail(const char* why, bj::error_code& error) {
    failure_ = why;
    error = bj::error::exception;
    return false;
  }

  std::vector<Frame> frames_;
  std::string text_;
  Value root_;
  int64_t nodes_left_ = 0;
  bool unique_keys_ = false;
  const char* failure_ = nullptr;
};

}  // namespace

Result<Value> Parse(std::string_view text, const ParseLimits& limits) {
  bj::parse_options options;
  options.max_depth = static_cast<size_t>(limits.max_depth);
  bj::basic_parser<Builder> parser(options);
  parser.handler().set_limits(limits);
  bj::error_code error;
  const size_t consumed = parser.write_some(false, text.data(), text.size(), error);
  if (!error && consumed < text.size()) error = bj::error::extra_data;
  if (error) {
    const char* failure = parser.handler().failure();
    return InvalidArgument(
        fmt::format("invalid JSON at byte {}: {}", consumed,
                    failure != nullptr ? std::string(failure) : error.message()));
  }
  return parser.handler().TakeRoot();
}

}  // namespace fathom::json
