// StopMatcher: finds stop strings in text as it streams. The match that ends first wins, of those
// the longest; held back is only what may still become one. The same result for every way of
// cutting the text. Linear in the text times the number of stop strings. One thread, one stream.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fathom::api {

class StopMatcher {
 public:
  // `include_match`: the matched string stays in the text. Stop strings are not empty.
  StopMatcher(const std::vector<std::string>& stops, bool include_match);

  // The text that is now certain. After a match (see matched()) everything further is dropped.
  std::string Push(std::string_view text);
  // The same, looking for nothing: what is held back is let go.
  std::string PushUnmatched(std::string_view text);
  // What is still held back, at the end of the stream.
  std::string Flush();

  // The stop string that was found.
  const std::optional<std::string>& matched() const { return matched_; }

 private:
  struct Pattern {
    std::string text;
    std::vector<size_t> failure;  // Knuth-Morris-Pratt: longest border of each prefix
    size_t state = 0;             // how much of it the text now ends with
  };
  // Advances every pattern by one byte; the longest that is now complete.
  const Pattern* Advance(char c);

  const bool include_match_;
  std::vector<Pattern> patterns_;
  std::string held_;
  std::optional<std::string> matched_;
};

}  // namespace fathom::api
