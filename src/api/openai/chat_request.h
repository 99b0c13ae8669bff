// ChatRequest: the body of POST /v1/chat/completions as a value, and its prompt. Everything that
// can be refused is refused here. Pure but for the tokenizer; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "api/generation_params.h"
#include "api/openai/chat_messages.h"
#include "api/openai/tools.h"
#include "api/output_rules.h"
#include "api/thinking_mode.h"

namespace fathom::api::openai {

struct ChatRequest {
  std::string model;
  GenerationParams params;
  ThinkingChoice thinking;
  ChatMessages conversation;
  ToolUse tool_use;
  OutputRules rules;
  bool include_reasoning = true;
  bool explain_cache = false;
};

// `body` is a JSON object.
Parsed<ChatRequest> ParseChatRequest(const json::Value& body, const ServerContext& context);

// The token ids of the prompt. Text that came from outside never becomes control tokens, unless the
// server says so. Assistant turns that were sampled within `replay_scope` stand as they were.
Parsed<std::vector<int32_t>> EncodePrompt(const ChatRequest& request, const ServerContext& context,
                                          std::string_view replay_scope);

}  // namespace fathom::api::openai
