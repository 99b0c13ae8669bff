// Anthropic's messages and system prompt to turns: content blocks read one by one, tool results
// matched with their calls, thinking given back by its signature. Pure; any thread.
//
// Unknown fields (cache_control, citations, …) are ignored. What a client adds to every request and
// no model should see is left out: the billing header of Claude Code, whose text changes from
// request to request and would spoil every prefix.
#pragma once

#include <string_view>

#include "api/api_error.h"
#include "api/api_options.h"
#include "api/conversation.h"
#include "api/replay/reasoning_seal.h"
#include "json/json.h"

namespace fathom::api::anthropic {

// `system` (text, blocks or null) and `messages` in order. A conversation that ends with an
// assistant's turn is marked to be continued.
Parsed<TurnList> ReadTurns(const json::Value* system, const json::Value* messages,
                           const RequestLimits& limits, const ReasoningSeal& seal,
                           std::string_view scope);

}  // namespace fathom::api::anthropic
