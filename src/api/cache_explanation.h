// Why a prompt's beginning was not found in the prefix cache, on request (explain_cache: true): how
// far it equals an earlier prompt of the same caller, the first token that differs, its text, and
// the message it stands in. Pure but for the history; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api/server_context.h"
#include "json/json.h"

namespace fathom::api {

struct CacheExplanation {
  std::string line;  // the same as one line of printable ASCII, for a header and the log
  json::Value json;
};

// `messages`: the request's, as text::EncodeMessages takes them; null for a text completion.
CacheExplanation ExplainCache(const ServerContext& context, std::string_view scope,
                              const std::vector<int32_t>& prompt, const json::Value* messages);

}  // namespace fathom::api
