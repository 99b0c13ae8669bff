// From a checked request to running sequences: what chat and text completions share. On the
// connection's executor.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "api/generation.h"
#include "api/generation_params.h"
#include "api/openai/answer_format.h"
#include "api/output_rules.h"
#include "api/server_context.h"

namespace fathom::api::openai {

// How a chat's answer is read: its tools, and whether the prompt leaves it thinking. Unset for text
// completions.
using AnswerParser = std::optional<text::ToolCallParser::Options>;

// One sequence, ready to submit. `prompt` fits the context; `choice_idx` varies the seed among
// equal prompts; `grammar` holds the answer to its form, unless it is null.
Generation::Choice MakeChoice(const ServerContext& context, const GenerationParams& params,
                              std::vector<int32_t> prompt, int max_tokens, int choice_idx,
                              const AnswerParser& parser, const GrammarPtr& grammar = nullptr);

// Starts the sequences of an answer that is sent whole, and keeps its connection alive until then.
MaybeError StartWhole(const ServerContext& context, std::vector<Generation::Choice> choices,
                      std::shared_ptr<GenerationListener> answer,
                      const std::shared_ptr<http::ResponseWriter>& writer);

Envelope MakeEnvelope(const GenerationParams& params, std::string_view id_prefix,
                      std::string_view object, std::string_view model);

}  // namespace fathom::api::openai
