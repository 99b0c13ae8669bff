// Base64 with padding (RFC 4648). Pure; any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace fathom::api {

std::string Base64(std::string_view bytes);

// Nothing if it is no base64, or none at all.
std::optional<std::string> FromBase64(std::string_view text);

}  // namespace fathom::api
