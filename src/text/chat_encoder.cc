#include "text/chat_encoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "text/chat_format.h"
#include "text/chat_messages.h"

namespace fathom::text {
namespace {

using json::Value;

// Collects the prompt; plain texts that meet become one piece.
class PieceWriter {
 public:
  void Control(std::string_view token) { pieces_.push_back({std::string(token), true}); }

  void Plain(std::string_view text) {
    if (text.empty()) return;
    if (pieces_.empty() || pieces_.back().is_control) pieces_.emplace_back();
    pieces_.back().text += text;
  }

  void Sampled(std::vector<int32_t> ids) {
    if (!ids.empty()) pieces_.push_back({"", true, std::move(ids)});
  }

  // Text of ours in which added tokens stand.
  void Template(std::string_view text) {
    while (!text.empty()) {
      size_t at = text.size();
      std::string_view token;
      for (const std::string_view candidate : {kThinkBeginToken, kThinkEndToken, kDsmlToken}) {
        const size_t found = text.find(candidate);
        if (found < at) {
          at = found;
          token = candidate;
        }
      }
      Plain(text.substr(0, at));
      if (token.empty()) return;
      Control(token);
      text.remove_prefix(at + token.size());
    }
  }

  std::vector<PromptPiece> Take() { return std::move(pieces_); }

 private:
  std::vector<PromptPiece> pieces_;
};

// The schema of one tool: its function object, or the tool itself when it is one.
const Value& FunctionOf(const Value& tool) {
  const Value* function = tool.Find("function");
  return function != nullptr && function->is_object() ? *function : tool;
}

class Renderer {
 public:
  Renderer(std::vector<ChatMessage> messages, ThinkingMode mode, bool drop_thinking)
      : messages_(std::move(messages)),
        is_thinking_(mode == ThinkingMode::kThinking),
        drop_thinking_(drop_thinking),
        last_user_(LastUserIndex(messages_)) {}

  std::vector<PromptPiece> Render(std::string_view effort_prefix) {
    const bool from_start = messages_.empty() || !messages_[0].is_context;
    if (from_start) writer_.Control(kBosToken);
    if (from_start && !messages_.empty()) writer_.Plain(effort_prefix);
    for (int i = 0; i < static_cast<int>(messages_.size()); ++i) {
      if (messages_[i].is_context) continue;
      RenderMessage(i);
      RenderTransition(i);
    }
    return writer_.Take();
  }

 private:
  void RenderMessage(int i);
  void RenderBlocks(const std::vector<ContentBlock>& blocks);
  void RenderTools(const ChatMessage& message);
  void RenderAssistant(int i);
  bool RenderSampled(const ChatMessage& message, bool after_think_begin);
  void RenderToolCall(const ToolCall& call);
  void RenderParameter(std::string_view name, bool is_string, std::string_view value);
  void RenderTransition(int i);
  void RenderTask(std::string_view task);

  const std::vector<ChatMessage> messages_;
  const bool is_thinking_;
  const bool drop_thinking_;
  const int last_user_;
  PieceWriter writer_;
};

void Renderer::RenderMessage(int i) {
  const ChatMessage& message = messages_[i];
  switch (message.role) {
    case Role::kUser:
    case Role::kTool:
      writer_.Control(kUserToken);
      return RenderBlocks(message.blocks);
    case Role::kAssistant:
      return RenderAssistant(i);
    case Role::kLatestReminder:
      writer_.Control(kLatestReminderToken);
      return writer_.Plain(message.content);
    case Role::kDeveloper:
      writer_.Control(kUserToken);
      break;
    case Role::kSystem:
      break;
  }
  writer_.Plain(message.content);
  RenderTools(message);
}

void Renderer::RenderBlocks(const std::vector<ContentBlock>& blocks) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (i > 0) writer_.Plain("\n\n");
    if (blocks[i].is_tool_result) writer_.Plain("<tool_result>");
    writer_.Plain(blocks[i].text);
    if (blocks[i].is_tool_result) writer_.Plain("</tool_result>");
  }
}

// The tools and the response format of a system or developer message.
void Renderer::RenderTools(const ChatMessage& message) {
  if (message.tools != nullptr) {
    writer_.Plain("\n\n");
    writer_.Template(kToolsBeforeSchemas);
    for (size_t i = 0; i < message.tools->items().size(); ++i) {
      if (i > 0) writer_.Plain("\n");
      writer_.Plain(json::DumpPython(FunctionOf(message.tools->items()[i])));
    }
    writer_.Plain(kToolsAfterSchemas);
  }
  if (message.response_format != nullptr) {
    writer_.Plain("\n\n");
    writer_.Plain(kResponseFormat);
    writer_.Plain(json::DumpPython(*message.response_format));
  }
}

// The opening <think> or </think> belongs to the turn before (RenderTransition).
void Renderer::RenderAssistant(int i) {
  const ChatMessage& message = messages_[i];
  const bool after_task = i > 0 && !messages_[i - 1].task.empty();
  const bool has_reasoning = is_thinking_ && !after_task && (!drop_thinking_ || i > last_user_);
  if (message.sampled == nullptr || !RenderSampled(message, has_reasoning)) {
    if (has_reasoning) {
      writer_.Plain(message.reasoning);
      writer_.Control(kThinkEndToken);
    }
    writer_.Plain(message.content);
    if (!message.tool_calls.empty()) {
      writer_.Template("\n\n<｜DSML｜tool_calls>\n");
      for (const ToolCall& call : message.tool_calls) RenderToolCall(call);
      writer_.Template("</｜DSML｜tool_calls>");
    }
  }
  if (!message.without_eos) writer_.Control(kEosToken);
}

// False when the turn's own ids cannot stand here: its reasoning is to be left out and has no end.
bool Renderer::RenderSampled(const ChatMessage& message, bool after_think_begin) {
  const SampledTurn& turn = *message.sampled;
  const std::vector<int32_t>& ids = turn.token_ids;
  if (after_think_begin) {
    if (!turn.in_reasoning) writer_.Control(kThinkEndToken);
    writer_.Sampled(ids);
    // Reasoning that a limit cut short gets its end; calls need none before them.
    if (!turn.answer_begin && message.tool_calls.empty()) writer_.Control(kThinkEndToken);
    return true;
  }
  if (!turn.answer_begin || *turn.answer_begin > ids.size()) return false;
  writer_.Sampled({ids.begin() + static_cast<std::ptrdiff_t>(*turn.answer_begin), ids.end()});
  return true;
}

// One invoke and the line break after it.
void Renderer::RenderToolCall(const ToolCall& call) {
  writer_.Template("<｜DSML｜invoke name=\"");
  writer_.Plain(call.name);
  writer_.Plain("\">\n");
  // Arguments are an object, or the JSON text of one; other texts become one parameter as they are.
  Value parsed;
  const Value* arguments = call.arguments;
  if (arguments != nullptr && arguments->is_string() && !arguments->AsString().empty()) {
    auto result = json::Parse(arguments->AsString());
    if (result.ok() && result->is_object()) {
      parsed = std::move(*result);
      arguments = &parsed;
    }
  }
  if (arguments != nullptr && arguments->is_object()) {
    const auto& members = arguments->members();
    for (size_t i = 0; i < members.size(); ++i) {
      if (i > 0) writer_.Plain("\n");
      const Value& value = members[i].value;
      RenderParameter(members[i].key, value.is_string(),
                      value.is_string() ? value.AsString() : json::DumpPython(value));
    }
  } else if (arguments != nullptr && arguments->is_string() && !arguments->AsString().empty()) {
    RenderParameter("arguments", true, arguments->AsString());
  } else if (arguments != nullptr && !arguments->is_null() && !arguments->is_string()) {
    RenderParameter("arguments", true, json::DumpPython(*arguments));
  }
  writer_.Template("\n</｜DSML｜invoke>\n");
}

void Renderer::RenderParameter(std::string_view name, bool is_string, std::string_view value) {
  writer_.Template("<｜DSML｜parameter name=\"");
  writer_.Plain(name);
  writer_.Plain(is_string ? "\" string=\"true\">" : "\" string=\"false\">");
  writer_.Plain(value);
  writer_.Template("</｜DSML｜parameter>");
}

// What opens the next turn, if an assistant is to speak (or a reminder stands before it).
void Renderer::RenderTransition(int i) {
  if (i + 1 < static_cast<int>(messages_.size())) {
    const Role next = messages_[i + 1].role;
    if (next != Role::kAssistant && next != Role::kLatestReminder) return;
  }
  const ChatMessage& message = messages_[i];
  if (!message.task.empty()) return RenderTask(message.task);
  if (message.role != Role::kUser && message.role != Role::kDeveloper) return;
  writer_.Control(kAssistantToken);
  writer_.Control(is_thinking_ && (!drop_thinking_ || i >= last_user_) ? kThinkBeginToken
                                                                       : kThinkEndToken);
}

void Renderer::RenderTask(std::string_view task) {
  if (task == "action") {
    writer_.Control(kAssistantToken);
    writer_.Control(is_thinking_ ? kThinkBeginToken : kThinkEndToken);
  }
  writer_.Control(fmt::format("<｜{}｜>", task));
}

Result<std::string_view> EffortPrefix(const EncodeOptions& options) {
  const bool is_preview = options.profile == EffortProfile::kPreview;
  if (is_preview && options.effort == Effort::kLow) {
    return InvalidArgument(
        "reasoning effort low: this checkpoint knows high and max only; use high, or chat mode");
  }
  if (options.mode == ThinkingMode::kChat) return std::string_view();
  switch (options.effort) {
    case Effort::kUnset:
    case Effort::kLow:
      return std::string_view();
    case Effort::kHigh:
      return is_preview ? std::string_view() : kAbsoluteMaximumEffort;
    case Effort::kMax:
      return is_preview ? kAbsoluteMaximumEffort : kBeyondMaximumEffort;
  }
  return std::string_view();
}

}  // namespace

Result<std::vector<PromptPiece>> EncodeMessages(const Value& messages,
                                                const EncodeOptions& options) {
  ASSIGN_OR_RETURN(const std::string_view effort_prefix, EffortPrefix(options));
  ASSIGN_OR_RETURN(auto turns, ReadMessages(messages, options.num_context, options.sampled));
  SortToolResults(&turns);
  const bool has_tools =
      std::ranges::any_of(turns, [](const ChatMessage& m) { return m.tools != nullptr; });
  const bool drop_thinking = options.drop_thinking && !has_tools;
  if (options.mode == ThinkingMode::kThinking && drop_thinking) DropOldThinking(&turns);
  return Renderer(std::move(turns), options.mode, drop_thinking).Render(effort_prefix);
}

Status AttachTools(const Value& tools, Value* messages) {
  if (!tools.is_array()) return InvalidArgument("tools: expected a list");
  if (!messages->is_array()) return InvalidArgument("messages: expected a list");
  std::vector<Value>& list = messages->items();
  const Value* role = list.empty() ? nullptr : list[0].Find("role");
  const bool takes_tools = role != nullptr && role->is_string() &&
                           (role->AsString() == "system" || role->AsString() == "developer");
  if (!takes_tools) {
    Value system = Value::Object();
    system.Set("role", Value::String("system"));
    list.insert(list.begin(), std::move(system));
  }
  list[0].Set("tools", tools);
  return OkStatus();
}

Value KeepPromptFields(const Value& tools) {
  std::vector<Value> kept;
  for (const Value& tool : tools.items()) {
    const Value& function = FunctionOf(tool);
    if (!function.is_object()) {
      kept.push_back(tool);
      continue;
    }
    Value shown = Value::Object();
    for (const json::Member& member : function.members()) {
      const bool is_shown = member.key == "name" || member.key == "description" ||
                            member.key == "parameters" || member.key == "strict";
      if (is_shown && !member.value.is_null()) shown.Set(member.key, member.value);
    }
    kept.push_back(std::move(shown));
  }
  return Value::Array(std::move(kept));
}

std::string JoinPieces(const std::vector<PromptPiece>& pieces) {
  std::string prompt;
  for (const PromptPiece& piece : pieces) prompt += piece.text;
  return prompt;
}

std::vector<int32_t> TokenizePieces(const Tokenizer& tokenizer,
                                    const std::vector<PromptPiece>& pieces,
                                    bool raw_special_tokens) {
  std::vector<int32_t> ids;
  std::string raw;  // since the last sampled piece
  for (const PromptPiece& piece : pieces) {
    const bool is_sampled = !piece.sampled_ids.empty();
    if (raw_special_tokens) {
      raw += piece.text;
      if (is_sampled) {
        tokenizer.Encode(std::exchange(raw, ""), Tokenizer::AddedTokens::kMatch, &ids);
      }
    } else {
      tokenizer.Encode(
          piece.text,
          piece.is_control ? Tokenizer::AddedTokens::kMatch : Tokenizer::AddedTokens::kAsPlain,
          &ids);
    }
    ids.insert(ids.end(), piece.sampled_ids.begin(), piece.sampled_ids.end());
  }
  tokenizer.Encode(raw, Tokenizer::AddedTokens::kMatch, &ids);
  return ids;
}

}  // namespace fathom::text
