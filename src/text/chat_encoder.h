// V4 chat encoding: messages to the prompt text, byte-equal to DeepSeek's own encoder. Pure
// functions; any thread. Repairs that the public API makes (merging assistants, developer ->
// system) happen in api/ before this.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "json/json.h"
#include "text/sampled_turn.h"
#include "text/tokenizer.h"

namespace fathom::text {

enum class ThinkingMode { kChat, kThinking };
enum class Effort { kUnset, kLow, kHigh, kMax };
// Which effort prefixes the checkpoint was trained with: high and max, or low, high and max.
enum class EffortProfile { kPreview, kOfficial };

struct EncodeOptions {
  ThinkingMode mode = ThinkingMode::kThinking;
  // Forget the reasoning before the last user turn. Any message that carries tools keeps all of it.
  bool drop_thinking = true;
  Effort effort = Effort::kUnset;
  EffortProfile profile = EffortProfile::kPreview;
  // So many messages were rendered before: only what follows them is, without BOS.
  size_t num_context = 0;
  // Turns that are rendered as they were sampled: assistant messages whose field `sampled` is an
  // index into this (null: there are none).
  const SampledTurns* sampled = nullptr;
};

// A piece of the prompt. Control pieces are each the text of one added token, written by us; the
// others are all text between, ours and others', uncut so that it tokenizes as in the whole, or
// tokens as they were sampled. Concatenated they are the prompt.
struct PromptPiece {
  std::string text;
  bool is_control = false;
  std::vector<int32_t> sampled_ids = {};  // not empty: the piece is these and has no text
};

// `messages`: an array of objects in the encoder's own terms: role (system, user, assistant, tool,
// developer, latest_reminder), content (text, or a list of parts), reasoning or reasoning_content,
// tool_calls, tool_call_id, tools, response_format, task, wo_eos; other fields are ignored.
// kInvalidArgument names the message and field.
Result<std::vector<PromptPiece>> EncodeMessages(const json::Value& messages,
                                                const EncodeOptions& options);

// `tools` put where request-level tools belong: on messages[0] if system or developer, else on a
// new system message in front. `tools` is an array of {type, function} or function objects.
Status AttachTools(const json::Value& tools, json::Value* messages);

// Request-level tools as the public API shows them to the model: of each function name,
// description, parameters and strict, in the client's order, without nulls. Other items stay as
// they are.
json::Value KeepPromptFields(const json::Value& tools);

// The prompt's text, but for sampled pieces.
std::string JoinPieces(const std::vector<PromptPiece>& pieces);

// Text from outside never becomes an added token, unless raw_special_tokens: then the prompt is
// encoded in one go, as the official code does (but for sampled pieces). Both give the same ids
// when no outside text contains an added token.
std::vector<int32_t> TokenizePieces(const Tokenizer& tokenizer,
                                    const std::vector<PromptPiece>& pieces,
                                    bool raw_special_tokens);

}  // namespace fathom::text
