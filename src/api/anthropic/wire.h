// What Anthropic's answers have in common: errors and model names. Pure; any thread.
#pragma once

#include <string>
#include <string_view>

#include "api/api_error.h"
#include "api/server_context.h"
#include "http/message.h"
#include "json/json.h"

namespace fathom::api::anthropic {

// {"type":"error","error":{"type","message"},"request_id"}, with the status that Anthropic gives
// such an error: 529 where the server is too busy, and Retry-After where trying again helps.
http::Response ErrorResponse(const ApiError& error, std::string_view request_id);
// The same as the data of an `error` event.
json::Value ErrorEvent(const ApiError& error);

// Is this a path of Anthropic's API? Errors before a handler runs are told in its form.
bool IsAnthropicPath(std::string_view path);

// 404 unless `name` is a served model, with or without a suffix in brackets ("[1m]"), or a name of
// Anthropic's own (claude-…), which is answered by the default model.
MaybeError CheckModelName(std::string_view name, const ServerContext& context);

}  // namespace fathom::api::anthropic
