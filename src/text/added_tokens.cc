#include "text/added_tokens.h"

#include <algorithm>

namespace fathom::text {

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedTokenText> tokens)
    : tokens_(std::move(tokens)) {
  // string_view compares bytes as unsigned, so the tokens of one first byte stand together in byte
  // order.
  std::sort(tokens_.begin(), tokens_.end(),
            [](const AddedTokenText& a, const AddedTokenText& b) { return a.text < b.text; });
  by_first_byte_.fill({0, 0});
  for (uint32_t i = 0; i < tokens_.size(); ++i) {
    auto& [begin, end] = by_first_byte_[static_cast<uint8_t>(tokens_[i].text[0])];
    if (begin == end) begin = i;
    end = i + 1;
  }
}

AddedTokenMatcher::Match AddedTokenMatcher::Find(std::string_view text, size_t from) const {
  for (size_t pos = from; pos < text.size(); ++pos) {
    const auto& [begin, end] = by_first_byte_[static_cast<uint8_t>(text[pos])];
    if (begin == end) continue;
    const Match match = LongestAt(text, pos);
    if (match.begin != std::string_view::npos) return match;
  }
  return {};
}

AddedTokenMatcher::Match AddedTokenMatcher::LongestAt(std::string_view text, size_t pos) const {
  const auto range = by_first_byte_[static_cast<uint8_t>(text[pos])];
  auto begin = tokens_.begin() + range.first;
  auto end = tokens_.begin() + range.second;
  Match match;
  // All tokens in [begin, end) share their first `depth` bytes with the text; the shortest sorts
  // first.
  for (size_t depth = 1; begin != end; ++depth) {
    if (begin->text.size() == depth) {
      match = {pos, depth, begin->id};
      if (++begin == end) break;
    }
    if (pos + depth == text.size()) break;
    const uint8_t byte = static_cast<uint8_t>(text[pos + depth]);
    const auto byte_at = [depth](const AddedTokenText& t) {
      return static_cast<uint8_t>(t.text[depth]);
    };
    begin = std::lower_bound(begin, end, byte,
                             [&](const auto& t, uint8_t b) { return byte_at(t) < b; });
    end = std::upper_bound(begin, end, byte,
                           [&](uint8_t b, const auto& t) { return b < byte_at(t); });
  }
  return match;
}

}  // namespace fathom::text
