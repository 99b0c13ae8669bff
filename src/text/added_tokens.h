// AddedTokenMatcher: finds the tokens that stand in text as they are, leftmost first, of those the
// longest. Immutable; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace fathom::text {

struct AddedTokenText {
  std::string_view text;  // not empty; outlives the matcher
  int32_t id = -1;
};

class AddedTokenMatcher {
 public:
  struct Match {
    size_t begin = std::string_view::npos;  // npos: none
    size_t size = 0;
    int32_t id = -1;
  };

  explicit AddedTokenMatcher(std::vector<AddedTokenText> tokens);

  // The first match at or after `from`. Time O(bytes passed + depth of the partial matches on the
  // way).
  Match Find(std::string_view text, size_t from) const;

 private:
  Match LongestAt(std::string_view text, size_t pos) const;

  std::vector<AddedTokenText> tokens_;                            // sorted by text
  std::array<std::pair<uint32_t, uint32_t>, 256> by_first_byte_;  // [begin, end) in tokens_
};

}  // namespace fathom::text
