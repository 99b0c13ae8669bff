// Chat messages as the encoder renders them: read from JSON, tool results merged into user turns
// and sorted, reasoning that the model no longer sees dropped. Views into the JSON; one call's
// scratch.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "json/json.h"
#include "text/sampled_turn.h"

namespace fathom::text {

enum class Role { kSystem, kUser, kAssistant, kTool, kDeveloper, kLatestReminder };

struct ContentBlock {
  bool is_tool_result = false;
  bool is_null = false;  // the message had null for content
  std::string text;
  std::string tool_call_id;
};

struct ToolCall {
  std::string id;
  std::string name;
  const json::Value* arguments = nullptr;  // null when absent
};

struct ChatMessage {
  Role role = Role::kUser;
  std::string content;               // of all roles but user
  std::vector<ContentBlock> blocks;  // of a user turn
  std::string reasoning;
  std::vector<ToolCall> tool_calls;
  const SampledTurn* sampled = nullptr;          // null: rendered from its text
  const json::Value* tools = nullptr;            // null when absent or empty
  const json::Value* response_format = nullptr;  // likewise
  std::string task;                              // empty: none
  bool without_eos = false;
  bool is_context = false;  // rendered by an earlier call
};

// The messages in their order, checked. The first `num_context` of them are marked. Tool messages
// and consecutive users become one user turn (within context and within the rest, not across).
// `sampled`: what an assistant's field of that name is an index of; outlives the result.
Result<std::vector<ChatMessage>> ReadMessages(const json::Value& messages, size_t num_context,
                                              const SampledTurns* sampled = nullptr);

// Puts the tool results of each user turn into the order of the calls they answer.
void SortToolResults(std::vector<ChatMessage>* messages);

// The last user or developer turn, or -1.
int LastUserIndex(const std::vector<ChatMessage>& messages);

// What thinking mode forgets before the last user turn: the assistants' reasoning, and developer
// turns whole.
void DropOldThinking(std::vector<ChatMessage>* messages);

}  // namespace fathom::text
