// AnswerBlocks: an answer's events as blocks that follow one another and never interleave: a
// stretch of reasoning, a stretch of text, a tool call. Text that is only white space makes no
// block. One thread, one answer.
#pragma once

#include <string>
#include <vector>

#include "text/tool_call_parser.h"

namespace fathom::api {

struct AnswerBlock {
  enum class Kind { kReasoning, kText, kToolCall };
  Kind kind = Kind::kText;
  std::string text;  // a call's: its arguments
  std::string name;  // of a call
  bool is_complete = false;
};

class AnswerBlocks {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void OnBlockBegin(size_t idx, const AnswerBlock& block) = 0;  // no text yet
    virtual void OnBlockText(size_t idx, const AnswerBlock& block, const std::string& piece) = 0;
    virtual void OnBlockEnd(size_t idx, const AnswerBlock& block) = 0;
  };

  // `with_reasoning`: false leaves reasoning out.
  AnswerBlocks(Listener* listener, bool with_reasoning)
      : listener_(listener), with_reasoning_(with_reasoning) {}

  void Add(const std::vector<text::OutputEvent>& events);
  // Ends the block at hand; an answer without any gets one with no text.
  void Finish();

  const std::vector<AnswerBlock>& blocks() const { return blocks_; }

 private:
  void AddText(AnswerBlock::Kind kind, const std::string& text);
  void Begin(AnswerBlock block);
  void Append(const std::string& text);
  void End(bool is_complete);

  Listener* const listener_;
  const bool with_reasoning_;
  std::vector<AnswerBlock> blocks_;
  bool open_ = false;
  std::string space_;  // that may still begin a block
};

}  // namespace fathom::api
