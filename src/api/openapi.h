// The OpenAPI document of GET /openapi.json, as openapi.json holds it; @VERSION@ stands for the
// server's version.
#pragma once

#include <string_view>

namespace fathom::api {

extern const std::string_view kOpenApiText;

}  // namespace fathom::api
