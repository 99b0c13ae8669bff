// The content of a chat message: a string, null, or a list of parts, to text. Pure; any thread.
#pragma once

#include <optional>
#include <string>

#include "api/api_error.h"
#include "json/json.h"

namespace fathom::api::openai {

// Nothing for null or absent content. Text parts are joined by an empty line; parts that this model
// cannot read (images, audio, files) refuse the request. `param` names the field in the message.
Parsed<std::optional<std::string>> ReadContent(const json::Value* content,
                                               const std::string& param);

}  // namespace fathom::api::openai
