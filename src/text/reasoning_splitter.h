// ReasoningSplitter: splits generated text at <think> and </think> as it streams. Tags are
// swallowed, wherever they stand: </think> goes to content, <think> to reasoning. Holds back only
// what may still become a tag; the same result for every way of cutting the input. One thread, one
// response.
#pragma once

#include <string>
#include <string_view>

namespace fathom::text {

struct SplitText {
  std::string reasoning;
  std::string content;
};

class ReasoningSplitter {
 public:
  // Starts in reasoning when the prompt ended with <think>.
  explicit ReasoningSplitter(bool in_reasoning) : in_reasoning_(in_reasoning) {}
  SplitText Push(std::string_view text);
  // What was held back, as the text that it turned out to be.
  SplitText Flush();
  bool in_reasoning() const { return in_reasoning_; }

 private:
  void Emit(std::string_view text, SplitText* out) const {
    (in_reasoning_ ? out->reasoning : out->content) += text;
  }

  bool in_reasoning_;
  std::string held_;  // a proper prefix of a tag
};

}  // namespace fathom::text
