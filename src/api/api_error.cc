#include "api/api_error.h"

#include <fmt/format.h>

#include "base/log.h"
#include "json/json.h"
#include "text/unicode.h"

namespace fathom::api {

ApiError ModelNotFound(const std::string& name, const std::vector<std::string>& served) {
  constexpr size_t kMostBytes = 256;
  const bool is_shown = name.size() <= kMostBytes && text::IsValidUtf8(name);
  return {.status = 404,
          .message = fmt::format("The model '{}' does not exist; this server answers to '{}'.",
                                 is_shown ? json::Escape(name) : "…", fmt::join(served, "', '")),
          .param = "model",
          .code = "model_not_found"};
}

ApiError FromStatus(const Status& status) {
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
      return BadRequest(status.message());
    case StatusCode::kNotFound:
      return {.status = 404, .message = status.message(), .param = "", .code = ""};
    case StatusCode::kUnavailable:
      return {.status = 429, .message = status.message(), .param = "", .code = "server_overloaded"};
    case StatusCode::kCancelled:
      return {.status = 503,
              .message = "The request was cancelled by the server.",
              .param = "",
              .code = "cancelled"};
    default:
      LogError("a request failed: {}", status.message());
      return {.status = 500,
              .message = "The server failed to process the request.",
              .param = "",
              .code = "internal_error"};
  }
}

}  // namespace fathom::api
