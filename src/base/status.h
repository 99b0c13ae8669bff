// Status and Result<T>: how anything that can be expected to fail says so. Values, no exceptions.
// A message is one line: what was wrong, what was expected, what to do. Thread-safe as any value.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/check.h"

namespace fathom {

// The codes are the ones whose handling differs: the process exit code (ExitCode) and the HTTP
// status.
enum class StatusCode {
  kOk,
  kInternal,         // our bug or an unexpected system failure: exit 1, HTTP 500
  kInvalidArgument,  // the caller's input: exit 2, HTTP 400
  kNotFound,         // a named thing does not exist: exit 2, HTTP 404
  kOutOfMemory,      // host or device memory: exit 3
  kBadModel,         // model folder, config or checkpoint: exit 4
  kDevice,           // GPU or driver: exit 5
  kPeer,             // another rank or server: exit 6
  kUnavailable,      // full, draining or not loaded; try again later: HTTP 429 or 503
  kCancelled,        // the client left
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status OkStatus() { return {}; }
inline Status InternalError(std::string m) { return {StatusCode::kInternal, std::move(m)}; }
inline Status InvalidArgument(std::string m) {
  return {StatusCode::kInvalidArgument, std::move(m)};
}
inline Status NotFound(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
inline Status OutOfMemory(std::string m) { return {StatusCode::kOutOfMemory, std::move(m)}; }
inline Status BadModel(std::string m) { return {StatusCode::kBadModel, std::move(m)}; }
inline Status DeviceError(std::string m) { return {StatusCode::kDevice, std::move(m)}; }
inline Status PeerError(std::string m) { return {StatusCode::kPeer, std::move(m)}; }
inline Status Unavailable(std::string m) { return {StatusCode::kUnavailable, std::move(m)}; }

// The process exit code of a status: 0 done, 1 unexpected, 2 usage, 3 memory, 4 model, 5 device, 6
// peer.
int ExitCode(const Status& status);

// A value or the reason why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value)
      : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT: implicit by design
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {  // NOLINT
    CHECK(!std::get<1>(state_).ok());
  }

  bool ok() const { return state_.index() == 0; }
  Status status() const { return ok() ? OkStatus() : std::get<1>(state_); }

  T& value() & {
    CHECK(ok());
    return std::get<0>(state_);
  }
  const T& value() const& {
    CHECK(ok());
    return std::get<0>(state_);
  }
  T&& value() && {
    CHECK(ok());
    return std::get<0>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace fathom

// Returns the status to the caller when it is not OK.
#define RETURN_IF_ERROR(expr)                   \
  do {                                          \
    if (auto status_ = (expr); !status_.ok()) { \
      return status_;                           \
    }                                           \
  } while (false)

#define FATHOM_CONCAT_INNER(a, b) a##b
#define FATHOM_CONCAT(a, b) FATHOM_CONCAT_INNER(a, b)

// ASSIGN_OR_RETURN(auto x, MakeX()): x is the value, or the status is returned to the caller.
#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_INNER(FATHOM_CONCAT(result_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_INNER(result, lhs, expr) \
  auto result = (expr);                           \
  if (!result.ok()) return result.status();       \
  lhs = std::move(result).value()
