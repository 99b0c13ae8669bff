// The JSON body of a request. Pure; any thread.
#pragma once

#include "api/api_error.h"
#include "http/message.h"
#include "json/json.h"

namespace fathom::api {

// The body as a JSON object: 415 for another content type, 400 for anything else.
Parsed<json::Value> ReadJsonObject(const http::Request& request, const json::ParseLimits& limits);

}  // namespace fathom::api
