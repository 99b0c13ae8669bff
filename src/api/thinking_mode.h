// ThinkingMode of a request: from `thinking`, `reasoning_effort` and `chat_template_kwargs`, over
// the server's default kwargs. Pure; any thread.
//
// Whether to think, the first that says: thinking.type; chat_template_kwargs.thinking or
// .enable_thinking (either true: on); a reasoning effort in the request ("none": off, else on); the
// server's default kwargs; off. An effort of "none" beats thinking turned on. Without an effort the
// checkpoint's own default holds.
#pragma once

#include <optional>
#include <string_view>

#include "api/field_reader.h"
#include "text/chat_encoder.h"

namespace fathom::api {

struct ThinkingChoice {
  text::ThinkingMode mode = text::ThinkingMode::kChat;
  text::Effort effort = text::Effort::kUnset;
  bool drop_thinking = true;
};

// `request`: the whole request object. `defaults`: the server's kwargs, valid as
// ValidateThinkingDefaults says.
ThinkingChoice ReadThinking(FieldReader* request, const json::Value& defaults,
                            text::EffortProfile profile);

MaybeError ValidateThinkingDefaults(const json::Value& defaults, text::EffortProfile profile);

}  // namespace fathom::api
