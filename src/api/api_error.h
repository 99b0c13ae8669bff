// ApiError: why a request is refused or failed, as the client is told. The dialects render it.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace fathom::api {

struct ApiError {
  int status = 400;
  std::string message;
  std::string param;  // the field at fault; empty: none
  std::string code;   // machine-readable, such as context_length_exceeded; empty: none
};

// The error of a function that gives nothing else.
using MaybeError = std::optional<ApiError>;

// A value or the error.
template <typename T>
class Parsed {
 public:
  Parsed(T value) : value_(std::move(value)) {}         // NOLINT: implicit by design
  Parsed(ApiError error) : error_(std::move(error)) {}  // NOLINT
  bool ok() const { return value_.has_value(); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  const ApiError& error() const { return *error_; }

 private:
  std::optional<T> value_;
  std::optional<ApiError> error_;
};

inline ApiError BadRequest(std::string message, std::string param = "", std::string code = "") {
  return {.status = 400,
          .message = std::move(message),
          .param = std::move(param),
          .code = std::move(code)};
}

// `served`: the names that the API answers to.
ApiError ModelNotFound(const std::string& name, const std::vector<std::string>& served);

// What the engine or the text layer says, for the client. An internal message stays inside (it is
// logged).
ApiError FromStatus(const Status& status);

}  // namespace fathom::api
