// MessagesRequest: the body of POST /v1/messages (or of count_tokens) as a value, and its prompt.
// Everything that can be refused is refused here. Pure but for tokenizer and replay; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "api/anthropic/tools.h"
#include "api/conversation.h"
#include "api/generation_params.h"
#include "api/output_rules.h"
#include "http/message.h"

namespace fathom::api::anthropic {

struct MessagesRequest {
  std::string model;  // as asked, to be echoed
  GenerationParams params;
  Conversation conversation;
  ToolUse tool_use;
  OutputRules rules;
  bool continues_last = false;  // the answer goes on with a given text
  bool omits_thinking = false;  // thinking blocks come without their text
  std::string replay_scope;
};

// `needs_max_tokens`: false for count_tokens.
Parsed<MessagesRequest> ParseMessagesRequest(const http::Request& request, const json::Value& body,
                                             const ServerContext& context, bool needs_max_tokens);

Parsed<std::vector<int32_t>> EncodePrompt(const MessagesRequest& request,
                                          const ServerContext& context);

}  // namespace fathom::api::anthropic
