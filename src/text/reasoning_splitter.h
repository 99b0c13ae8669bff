// ReasoningSplitter: splits generated text at </think> as it streams. Holds back only what may
// still become a tag; the same result for every way of cutting the input. One thread, one response.
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
  SplitText Flush();
  bool in_reasoning() const { return in_reasoning_; }

 private:
  bool in_reasoning_;
  std::string held_;
};

}  // namespace fathom::text
