#include "api/request_body.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "api/field_reader.h"
#include "text/unicode.h"

namespace fathom::api {
namespace {

// "application/json", or a type whose name ends in "+json"; parameters are ignored.
bool IsJson(std::string_view content_type) {
  content_type = content_type.substr(0, content_type.find(';'));
  while (!content_type.empty() && content_type.back() == ' ') content_type.remove_suffix(1);
  const size_t plus = content_type.rfind('+');
  if (plus != std::string_view::npos)
    return http::EqualsIgnoringCase(content_type.substr(plus), "+json");
  return http::EqualsIgnoringCase(content_type, "application/json");
}

// The parser calls any byte that it does not expect a syntax error.
std::string WhyNotJson(std::string_view body, const Status& status) {
  if (!text::IsValidUtf8(body)) return "is not UTF-8, as JSON has to be";
  if (body.starts_with("\xef\xbb\xbf")) {
    return "begins with a byte order mark; send it without one";
  }
  return fmt::format("is {}", status.message());  // invalid JSON at a byte
}

}  // namespace

Parsed<json::Value> ReadJsonObject(const http::Request& request, const json::ParseLimits& limits) {
  const std::string* content_type = request.FindHeader("Content-Type");
  if (content_type != nullptr && !IsJson(*content_type)) {
    return ApiError{
        .status = 415,
        .message = "The body must be JSON: send the header Content-Type: application/json",
        .param = "",
        .code = "unsupported_media_type"};
  }
  if (request.body.empty()) return BadRequest("The body is empty; a JSON object is expected");
  Result<json::Value> value = json::Parse(request.body, limits);
  if (!value.ok()) {
    return BadRequest(fmt::format("The body {}", WhyNotJson(request.body, value.status())), "",
                      "invalid_json");
  }
  if (!value->is_object()) {
    return BadRequest(fmt::format("The body must be a JSON object, got {}", KindName(*value)));
  }
  return *std::move(value);
}

}  // namespace fathom::api
