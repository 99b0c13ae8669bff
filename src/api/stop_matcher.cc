#include "api/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace fathom::api {
namespace {

std::vector<size_t> FailureFunction(const std::string& text) {
  std::vector<size_t> failure(text.size(), 0);
  size_t border = 0;
  for (size_t i = 1; i < text.size(); ++i) {
    while (border > 0 && text[i] != text[border]) border = failure[border - 1];
    if (text[i] == text[border]) ++border;
    failure[i] = border;
  }
  return failure;
}

}  // namespace

StopMatcher::StopMatcher(const std::vector<std::string>& stops, bool include_match)
    : include_match_(include_match) {
  for (const std::string& stop : stops) patterns_.push_back({stop, FailureFunction(stop), 0});
}

const StopMatcher::Pattern* StopMatcher::Advance(char c) {
  const Pattern* complete = nullptr;
  for (Pattern& pattern : patterns_) {
    while (pattern.state > 0 && pattern.text[pattern.state] != c) {
      pattern.state = pattern.failure[pattern.state - 1];
    }
    if (pattern.text[pattern.state] == c) ++pattern.state;
    const bool longer = complete == nullptr || pattern.text.size() > complete->text.size();
    if (pattern.state == pattern.text.size() && longer) complete = &pattern;
  }
  return complete;
}

std::string StopMatcher::Push(std::string_view text) {
  if (matched_) return "";
  if (patterns_.empty()) return std::string(text);
  std::string buffer = std::exchange(held_, "");
  for (const char c : text) {
    buffer += c;
    if (const Pattern* complete = Advance(c)) {
      matched_ = complete->text;
      if (!include_match_) buffer.resize(buffer.size() - complete->text.size());
      return buffer;
    }
  }
  size_t held = 0;
  for (const Pattern& pattern : patterns_) held = std::max(held, pattern.state);
  held_ = buffer.substr(buffer.size() - held);
  buffer.resize(buffer.size() - held);
  return buffer;
}

std::string StopMatcher::PushUnmatched(std::string_view text) {
  if (matched_) return "";
  return Flush() += text;
}

std::string StopMatcher::Flush() {
  for (Pattern& pattern : patterns_) pattern.state = 0;
  return std::exchange(held_, "");
}

}  // namespace fathom::api
