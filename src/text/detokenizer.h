// IncrementalDetokenizer: the text of a growing list of tokens, one valid UTF-8 piece at a time.
// Incomplete trailing bytes (3 at most) are held back; invalid ones become U+FFFD per maximal
// subpart. One thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "text/tokenizer.h"

namespace fathom::text {

class IncrementalDetokenizer {
 public:
  explicit IncrementalDetokenizer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // The text that this token completes; may be empty.
  std::string Push(int32_t token_id);
  // What is still held back, as U+FFFD.
  std::string Flush();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
};

// `bytes` with every invalid sequence replaced (per maximal subpart). An incomplete but so far
// valid tail is moved to `*incomplete` when that is given, else replaced by one U+FFFD.
std::string SanitizeUtf8(std::string_view bytes, std::string* incomplete);

}  // namespace fathom::text
