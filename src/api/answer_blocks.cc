#include "api/answer_blocks.h"

#include <utility>

namespace fathom::api {

using Kind = AnswerBlock::Kind;

void AnswerBlocks::Add(const std::vector<text::OutputEvent>& events) {
  using Event = text::OutputEvent::Kind;
  for (const text::OutputEvent& event : events) {
    switch (event.kind) {
      case Event::kReasoning:
        if (with_reasoning_) AddText(Kind::kReasoning, event.text);
        break;
      case Event::kContent:
        AddText(Kind::kText, event.text);
        break;
      case Event::kToolCallBegin:
        End(true);
        Begin({.kind = Kind::kToolCall, .text = "", .name = event.text});
        break;
      case Event::kArguments:
        Append(event.text);
        break;
      case Event::kToolCallEnd:
        End(true);
        break;
    }
  }
}

void AnswerBlocks::Finish() {
  End(!open_ || blocks_.back().kind != Kind::kToolCall);  // a call that is still open was cut
  if (blocks_.empty()) {
    Begin({.kind = Kind::kText, .text = "", .name = ""});
    End(true);
  }
}

void AnswerBlocks::AddText(Kind kind, const std::string& text) {
  if (open_ && blocks_.back().kind == kind) return Append(text);
  space_ = kind == Kind::kText ? space_ + text : text;
  if (kind == Kind::kText && space_.find_first_not_of(" \t\r\n") == std::string::npos) return;
  const std::string all = std::exchange(space_, "");
  End(true);
  Begin({.kind = kind, .text = "", .name = ""});
  Append(all);
}

void AnswerBlocks::Begin(AnswerBlock block) {
  blocks_.push_back(std::move(block));
  open_ = true;
  listener_->OnBlockBegin(blocks_.size() - 1, blocks_.back());
}

void AnswerBlocks::Append(const std::string& text) {
  if (text.empty()) return;
  blocks_.back().text += text;
  listener_->OnBlockText(blocks_.size() - 1, blocks_.back(), text);
}

void AnswerBlocks::End(bool is_complete) {
  space_.clear();
  if (!std::exchange(open_, false)) return;
  blocks_.back().is_complete = is_complete;
  listener_->OnBlockEnd(blocks_.size() - 1, blocks_.back());
}

}  // namespace fathom::api
