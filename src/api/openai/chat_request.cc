#include "api/openai/chat_request.h"

#include <fmt/format.h>

#include <utility>

#include "api/conversation.h"

namespace fathom::api::openai {
namespace {

void ReadLogprobs(FieldReader* fields, int max_logprobs, request::SamplingParams* sampling) {
  const bool logprobs = fields->Bool("logprobs").value_or(false);
  const int64_t top = fields->Integer("top_logprobs", 0, max_logprobs).value_or(0);
  if (top > 0 && !logprobs) fields->Fail("top_logprobs", "top_logprobs needs logprobs: true");
  if (logprobs) sampling->num_logprobs = static_cast<int>(top);
}

bool ReadContinuation(FieldReader* fields) {
  const bool continues = fields->Bool("continue_final_message").value_or(false);
  const std::optional<bool> add_prompt = fields->Bool("add_generation_prompt");
  if (continues && add_prompt.value_or(false)) {
    fields->Fail("continue_final_message",
                 "continue_final_message and add_generation_prompt cannot both be true");
  }
  if (!continues && !add_prompt.value_or(true)) {
    fields->Fail("add_generation_prompt",
                 "add_generation_prompt: false needs continue_final_message: true");
  }
  return continues;
}

}  // namespace

Parsed<ChatRequest> ParseChatRequest(const json::Value& body, const ServerContext& context) {
  FieldReader fields(body);
  ChatRequest request;
  Parsed<std::string> model = ReadModelName(&fields, context);
  if (!model.ok()) return model.error();
  request.model = std::move(*model);
  const bool continues = ReadContinuation(&fields);
  Parsed<ChatMessages> conversation =
      ReadMessages(fields.Find("messages"), continues, context.options.limits);
  if (!conversation.ok()) return conversation.error();
  request.conversation = std::move(*conversation);
  request.params = ReadGenerationParams(&fields, context);
  ReadLogprobs(&fields, context.options.limits.max_logprobs, &request.params.sampling);
  request.thinking = ReadThinking(&fields, context.options.default_chat_template_kwargs,
                                  context.options.effort_profile);
  request.tool_use = ReadTools(&fields, context.options.limits);
  request.explain_cache = fields.Bool("explain_cache").value_or(false);
  request.include_reasoning = fields.Bool("include_reasoning").value_or(true);
  ReadContentRules(&fields, &request.rules);
  if (const MaybeError error =
          ReadCallRules(request.tool_use.tools, request.tool_use.choice, &request.rules)) {
    fields.Fail(*error);
  }
  RefuseUnsupportedFields(&fields);
  if (!fields.ok()) return *fields.error();

  // An answer that goes on with given content has no reasoning to come.
  const ChatMessages& messages = request.conversation;
  if (messages.continues_last && !messages.last_has_reasoning) {
    request.thinking.mode = text::ThinkingMode::kChat;
  }
  // A model that begins another turn by itself has ended its own.
  const text::SpecialTokens& special = context.model.special_tokens;
  for (const int32_t id : {special.user, special.assistant}) {
    request.params.sampling.stop_token_ids.push_back(id);
  }
  return request;
}

Parsed<std::vector<int32_t>> EncodePrompt(const ChatRequest& request, const ServerContext& context,
                                          std::string_view replay_scope) {
  return EncodeConversation({.messages = request.conversation.messages,
                             .tools = request.tool_use.tools,
                             .thinking = request.thinking},
                            context, replay_scope);
}

}  // namespace fathom::api::openai
