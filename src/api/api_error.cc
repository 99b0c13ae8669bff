#include "api/api_error.h"

#include "base/log.h"

namespace fathom::api {

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
