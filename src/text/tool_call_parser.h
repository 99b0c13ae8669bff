// ToolCallParser: generated text to reasoning, content and tool calls as it streams. Linear time;
// joined, the events are the same for every way of cutting the input. Holds back only what may
// still become markup. Anything that a model writes gives a result: arguments of a complete call
// are always a JSON object. One thread, one response.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "text/tool_schema.h"

namespace fathom::text {

struct OutputEvent {
  enum class Kind {
    kReasoning,      // text: more of the reasoning
    kContent,        // text: more of the content
    kToolCallBegin,  // text: the function's name
    kArguments,      // text: more of the arguments' JSON
    kToolCallEnd,    // the arguments are complete
  };
  Kind kind = Kind::kContent;
  std::string text;
  int tool_call_idx = -1;  // of the last three kinds: 0, 1, …
};

// All that a response's events say.
struct OutputMessage {
  struct ToolCall {
    std::string name;
    std::string arguments;
    bool is_complete = false;
  };
  std::string reasoning;
  std::string content;
  std::vector<ToolCall> tool_calls;

  void Add(const std::vector<OutputEvent>& events);
};

class ToolCallParser {
 public:
  struct Options {
    bool in_reasoning = false;     // the prompt ended with <think>
    bool parse_tool_calls = true;  // false: their markup is content
    bool parallel = true;          // false: only the first call counts
    std::vector<ToolSchema> tools;
  };

  explicit ToolCallParser(Options options);

  // Appends what `text` (valid UTF-8) completes; earlier events stay as they are.
  void Push(std::string_view text, std::vector<OutputEvent>* events);
  // The text ended. `is_natural`: the model stopped by itself, so that an open call is closed; else
  // (a length limit) its arguments stay as far as they came and no kToolCallEnd follows.
  void Finish(bool is_natural, std::vector<OutputEvent>* events);

  bool in_reasoning() const { return state_ == State::kText && in_reasoning_; }
  int num_tool_calls() const { return num_calls_; }
  // A call was left out, since only the first one counts.
  bool dropped_calls() const { return dropped_calls_; }

 private:
  enum class State {
    kText,     // reasoning or content
    kBlock,    // inside <｜DSML｜tool_calls>, between invokes
    kInvoke,   // inside an invoke, between parameters
    kString,   // inside a parameter whose characters go out as they come
    kValue,    // inside a parameter that is needed whole
    kIgnored,  // inside a parameter that came before
  };
  enum class Tag : int;  // what the markup of a state means; see the source
  struct TagMatch;
  struct Header;
  struct Parameter {
    std::string name;
    bool is_string = false;  // the attribute string="true"
    std::string text;
  };

  bool Step();
  TagMatch MatchTag(std::string_view rest) const;
  static Header ReadHeader(std::string_view rest, size_t tag_size);
  void TakePlain(std::string_view text);
  bool TakeTag(Tag tag, size_t size);
  bool OpenInvoke(size_t tag_size);
  bool OpenParameter(size_t tag_size);
  void CloseParameter();
  void BeginCall(const std::string& name);
  void EndCall();
  void CloseBlock();

  void WriteKey(const std::string& name);
  void WriteParameter(const Parameter& parameter);
  std::string ValueJson(const Parameter& parameter) const;
  std::optional<std::string> Unwrapped(const Parameter& parameter) const;
  bool MayBeWrapper(const std::string& name) const;

  void Emit(OutputEvent::Kind kind, std::string_view text);
  void Consume(size_t size);
  std::string_view Rest() const { return std::string_view(buffer_).substr(pos_); }

  const Options options_;
  State state_ = State::kText;
  bool in_reasoning_;
  std::string buffer_;  // what is not decided yet, from pos_ on
  size_t pos_ = 0;
  std::vector<OutputEvent>* events_ = nullptr;  // during Push and Finish
  size_t first_event_ = 0;                      // of that call

  bool block_has_call_ = false;
  std::string block_text_;  // of a block that has no call so far: then it was content

  int num_calls_ = 0;
  bool in_ignored_call_ = false;
  bool dropped_calls_ = false;
  const ToolSchema* schema_ = nullptr;  // of the call at hand, if known
  bool wrote_parameter_ = false;
  std::unordered_set<std::string> seen_;  // names of the call's parameters
  Parameter parameter_;                   // the one at hand
  std::optional<Parameter> wrapper_;      // complete, and maybe all the arguments in one
};

}  // namespace fathom::text
