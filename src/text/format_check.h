// Checks of what requests send as output formats, before anything is compiled: bounds on size and
// nesting, and JSON schema keywords that no grammar holds an answer to. Pure; any thread.
//
// kInvalidArgument says what and where: "…: the keyword 'not' is not supported".
#pragma once

#include <string_view>

#include "base/status.h"
#include "json/json.h"

namespace fathom::text {

// `place` names the schema in messages, such as "response_format.json_schema.schema".
Status CheckJsonSchema(const json::Value& schema, std::string_view place);
Status CheckRegex(std::string_view pattern, std::string_view place);
Status CheckEbnf(std::string_view grammar, std::string_view place);

}  // namespace fathom::text
