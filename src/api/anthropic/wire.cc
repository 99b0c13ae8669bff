#include "api/anthropic/wire.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "api/field_reader.h"

namespace fathom::api::anthropic {

using json::Value;

namespace {

struct Kind {
  int status;
  std::string_view type;
};

Kind KindOf(const ApiError& error) {
  switch (error.status) {
    case 401:
      return {401, "authentication_error"};
    case 403:
      return {403, "permission_error"};
    case 404:
      return {404, "not_found_error"};
    case 408:
    case 504:
      return {error.status, "timeout_error"};
    case 413:
      return {413, "request_too_large"};
    case 429:
      if (error.code == "server_overloaded") return {529, "overloaded_error"};
      return {429, "rate_limit_error"};
    case 503:
      return {529, "overloaded_error"};
    default:
      return error.status >= 500 ? Kind{500, "api_error"}
                                 : Kind{error.status, "invalid_request_error"};
  }
}

}  // namespace

Value ErrorEvent(const ApiError& error) {
  return Value::Object(
      {{"type", Value::String("error")},
       {"error", Value::Object({{"type", Value::String(std::string(KindOf(error).type))},
                                {"message", Value::String(error.message)}})}});
}

http::Response ErrorResponse(const ApiError& error, std::string_view request_id) {
  Value body = ErrorEvent(error);
  body.Set("request_id", Value::String(std::string(request_id)));
  http::Response response{.status = KindOf(error).status, .headers = {}, .body = json::Dump(body)};
  if (response.status == 429 || response.status == 529)
    response.headers.push_back({"Retry-After", "1"});
  if (response.status == 401) response.headers.push_back({"WWW-Authenticate", "Bearer"});
  return response;
}

bool IsAnthropicPath(std::string_view path) {
  return path == "/v1/messages" || path.starts_with("/v1/messages/") ||
         path.starts_with("/anthropic/");
}

MaybeError CheckModelName(std::string_view name, const ServerContext& context) {
  const std::vector<std::string>& served = context.options.served_model_names;
  const auto is_served = [&](std::string_view candidate) {
    return std::find(served.begin(), served.end(), candidate) != served.end();
  };
  std::string_view base = name;
  if (base.ends_with(']')) base = base.substr(0, base.rfind('['));
  if (is_served(name) || is_served(base) || base.starts_with("claude-")) return std::nullopt;
  return ApiError{.status = 404,
                  .message = fmt::format("model: {}", Shown(name)),
                  .param = "model",
                  .code = "model_not_found"};
}

}  // namespace fathom::api::anthropic
