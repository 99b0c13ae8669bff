// Identifiers that a server gives out: unpredictable enough to be unique across restarts and
// servers. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fathom::api {

// `prefix` and 32 hexadecimal digits.
std::string NewId(std::string_view prefix);
// "call_" and 24 hexadecimal digits, as clients expect.
std::string NewToolCallId();
uint64_t RandomSeed();

// A client's own id as it may be echoed: at most 128 characters of [A-Za-z0-9._:-], or "".
std::string SanitizeClientId(std::string_view id);

}  // namespace fathom::api
