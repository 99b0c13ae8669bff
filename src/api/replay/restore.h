// RestoreSampledTurns: finds the assistant turns of a conversation that this server sampled, so
// that the encoder renders them token by token as they were. Pure but for the store; any thread.
//
// A turn is found by the ids of its tool calls, or by the keys in its field `replay_keys` (an array
// of strings). If its content and calls are still what the model wrote, but for white space and the
// order of arguments, it is restored whole, whatever the client did to its reasoning. If they were
// changed, the client's text holds, and only reasoning that it left out is put back.
#pragma once

#include <string_view>

#include "api/replay/replay_store.h"
#include "json/json.h"
#include "text/sampled_turn.h"

namespace fathom::api {

// `messages`: as text::EncodeMessages takes them. Sets the field `sampled` of the turns found to
// their index in the result, which is that function's EncodeOptions::sampled.
text::SampledTurns RestoreSampledTurns(ReplayStore& store, std::string_view scope,
                                       json::Value* messages);

}  // namespace fathom::api
