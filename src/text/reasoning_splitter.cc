#include "text/reasoning_splitter.h"

#include <algorithm>

#include "text/chat_format.h"

namespace fathom::text {
namespace {

bool StartsTag(std::string_view text) {
  return kThinkBeginToken.starts_with(text) || kThinkEndToken.starts_with(text);
}

}  // namespace

SplitText ReasoningSplitter::Push(std::string_view text) {
  SplitText out;
  held_ += text;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const size_t tag = rest.find('<');
    Emit(rest.substr(0, tag), &out);
    rest.remove_prefix(std::min(tag, rest.size()));
    if (rest.starts_with(kThinkBeginToken)) {
      in_reasoning_ = true;
      rest.remove_prefix(kThinkBeginToken.size());
    } else if (rest.starts_with(kThinkEndToken)) {
      in_reasoning_ = false;
      rest.remove_prefix(kThinkEndToken.size());
    } else if (StartsTag(rest)) {
      break;
    } else {
      Emit(rest.substr(0, 1), &out);
      rest.remove_prefix(1);
    }
  }
  held_ = std::string(rest);
  return out;
}

SplitText ReasoningSplitter::Flush() {
  SplitText out;
  Emit(held_, &out);
  held_.clear();
  return out;
}

}  // namespace fathom::text
