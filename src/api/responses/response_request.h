// ResponseRequest: the body of POST /v1/responses as a value, and its prompt. Everything that can
// be refused is refused here. Pure but for tokenizer and stores; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "api/conversation.h"
#include "api/generation_params.h"
#include "api/output_rules.h"
#include "api/responses/tools.h"
#include "http/message.h"

namespace fathom::api::responses {

struct ResponseRequest {
  std::string model;
  GenerationParams params;
  Conversation conversation;
  OutputRules rules;
  ToolUse tool_use;
  json::Value input;  // the items that this request adds, references replaced
  std::string previous_id;
  bool is_stored = true;
  bool wants_summary = false;    // reasoning is shown as its summary
  bool wants_encrypted = false;  // reasoning comes sealed, too
  std::string scope;             // of stores and seals
  json::Value echo;              // the request's fields as the response repeats them
};

Parsed<ResponseRequest> ParseResponseRequest(const http::Request& request, const json::Value& body,
                                             const ServerContext& context);

}  // namespace fathom::api::responses
