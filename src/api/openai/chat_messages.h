// OpenAI chat messages to the encoder's own: roles, content parts and tool calls checked, developer
// read as system, assistant turns in a row merged, a last assistant turn marked for continuation.
// Pure; any thread.
#pragma once

#include "api/api_error.h"
#include "api/api_options.h"
#include "json/json.h"

namespace fathom::api::openai {

struct ChatMessages {
  json::Value messages;             // for text::EncodeMessages
  bool continues_last = false;      // the answer goes on with the last assistant message
  bool last_has_reasoning = false;  // that message's
  std::string last_content;
};

// `continue_final_message`: the last assistant message is to be continued, as if it had prefix:
// true.
Parsed<ChatMessages> ReadMessages(const json::Value* messages, bool continue_final_message,
                                  const RequestLimits& limits);

}  // namespace fathom::api::openai
