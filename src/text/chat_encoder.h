// V4 chat encoding: messages to the prompt text, byte-equal to DeepSeek's own encoder (rules R1-R29
// of the family's encoding). Pure functions; any thread. Repairs that the public API makes (merging
// assistants, developer -> system) happen in api/ before this.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "json/json.h"
#include "text/tokenizer.h"

namespace fathom::text {

enum class ThinkingMode { kChat, kThinking };
enum class Effort { kUnset, kLow, kHigh, kMax };
// Which effort prefixes the checkpoint was trained with.
enum class EffortProfile { kPreview, kOfficial };

struct EncodeOptions {
  ThinkingMode mode = ThinkingMode::kThinking;
  bool drop_thinking = true;
  Effort effort = Effort::kUnset;
  EffortProfile profile = EffortProfile::kPreview;
};

// A piece of the prompt: control text is ours, the rest came from outside. Concatenated they are
// the prompt; encoded piece by piece (control with added tokens, untrusted without) nothing from
// outside becomes control.
struct PromptPiece {
  std::string text;
  bool is_control = false;
};

// `messages`: an array of message objects in the encoder's own terms: role system, user, assistant,
// tool, developer, latest_reminder; content, reasoning (or reasoning_content), tool_calls,
// tool_call_id, tools, response_format, task, wo_eos, content_blocks. kInvalidArgument for an
// unknown role, a wrong type or an unknown task.
Result<std::vector<PromptPiece>> EncodeMessages(const json::Value& messages,
                                                const EncodeOptions& options);

// `tools` put where request-level tools belong: on messages[0] if system or developer, else a new
// system message in front. `tools` is an array of {type, function} or function objects.
Status AttachTools(const json::Value& tools, json::Value* messages);

std::string JoinPieces(const std::vector<PromptPiece>& pieces);
// raw_special_tokens: untrusted text is matched against added tokens too (the official behaviour).
std::vector<int32_t> TokenizePieces(const Tokenizer& tokenizer,
                                    const std::vector<PromptPiece>& pieces,
                                    bool raw_special_tokens);

}  // namespace fathom::text
