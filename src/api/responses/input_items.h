// The input of a response to turns: messages, reasoning, function calls and their outputs; items
// that the store keeps by reference; what earlier responses said. Pure but for the store; any
// thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "api/api_error.h"
#include "api/api_options.h"
#include "api/conversation.h"
#include "api/replay/reasoning_seal.h"
#include "api/responses/response_store.h"
#include "json/json.h"

namespace fathom::api::responses {

// `input` as a list of items: a text is a message of the user. References are replaced by what they
// name.
Parsed<json::Value> ReadInput(const json::Value* input, ResponseStore& store,
                              std::string_view scope, const RequestLimits& limits);

// The items of every response up to `id`, oldest first.
Parsed<std::vector<json::Value>> EarlierItems(const std::string& id, ResponseStore& store,
                                              std::string_view scope, const RequestLimits& limits);

// `instructions` (may be empty) and items in order.
Parsed<TurnList> ReadTurns(const std::string& instructions, const std::vector<json::Value>& earlier,
                           const json::Value& input, const ReasoningSeal& seal,
                           std::string_view scope);

}  // namespace fathom::api::responses
