// Conversation: what a dialect has read of a request's messages, in the encoder's terms, and its
// way to a prompt. Pure but for tokenizer and replay store; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "api/api_error.h"
#include "api/server_context.h"
#include "api/thinking_mode.h"
#include "json/json.h"

namespace fathom::api {

struct Conversation {
  json::Value messages = json::Value::Array();  // as text::EncodeMessages takes them
  json::Value tools = json::Value::Array();     // request-level; {type, function}
  ThinkingChoice thinking;
};

// The token ids of the prompt. Text that came from outside never becomes control tokens, unless the
// server says so. Assistant turns that were sampled within `replay_scope` stand as they were.
Parsed<std::vector<int32_t>> EncodeConversation(const Conversation& conversation,
                                                const ServerContext& context,
                                                std::string_view replay_scope);

// Builds a conversation turn by turn. What an assistant says in a row (reasoning, text, calls,
// however its client cut it up) becomes one turn.
class TurnList {
 public:
  void AddSystem(const std::string& text);  // several in a row are one, with an empty line between
  void AddUser(std::string text) { Add("user", std::move(text)); }
  void AddToolResult(const std::string& call_id, std::string text);

  // Parts of an assistant's turn. Texts are put together with `separator`.
  void AddEmptyAssistant() { Assistant(); }
  void AddReasoning(const std::string& text);
  void AddContent(const std::string& text, std::string_view separator = "");
  void AddToolCall(const std::string& id, const std::string& name, const std::string& arguments);
  // Something that replay may know the turn by.
  void AddReplayKey(std::string key);

  bool ends_with_assistant() const { return IsAssistant(); }
  // The last assistant's turn is to be continued, not followed. False: it has calls.
  bool ContinueLast();
  bool continues_last() const { return continues_last_; }
  bool last_has_reasoning() const;

  // The messages. One that ends with an instruction gets an empty user turn to be answered.
  json::Value Take();

 private:
  bool LastIs(std::string_view role) const;
  bool IsAssistant() const { return LastIs("assistant"); }
  void Add(std::string_view role, std::string text);
  json::Value& Assistant();

  std::vector<json::Value> messages_;
  bool continues_last_ = false;
};

}  // namespace fathom::api
