// Unicode as the pre-tokenizer sees it: UTF-8 decoding and one class per character. The classes are
// those of the `tokenizers` library (tools/make_unicode_classes.py). Pure functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fathom::text {

// \p{N}, \p{L}, \p{M}, \p{P}, \p{S}; kNewline is CR or LF, kSpace the rest of \s; kCjk the ranges
// that DeepSeek's pre-tokenizer splits off (U+4E00-9FA5, U+3040-30FF) whatever their general
// category.
enum CharClass : uint8_t {
  kOther,
  kLetter,
  kMark,
  kNumber,
  kPunctuation,
  kSymbol,
  kSpace,
  kNewline,
  kCjk,
};

struct DecodedChar {
  char32_t code_point;  // U+FFFD for an invalid byte
  uint8_t num_bytes;    // 1 for an invalid byte
  bool valid;
};

// The character at text[pos]; pos < text.size(). Strict: no surrogates, overlong forms or values
// past U+10FFFF.
DecodedChar DecodeUtf8(std::string_view text, size_t pos);

// Bytes of the maximal subpart at text[pos], where DecodeUtf8 found no valid character: the longest
// prefix of some valid sequence, at least 1. `*incomplete`: the text ended before the sequence was
// decided.
size_t MaximalSubpart(std::string_view text, size_t pos, bool* incomplete);

bool IsValidUtf8(std::string_view text);

void AppendUtf8(char32_t code_point, std::string* out);

// Two-stage table: blocks of 256 code points, equal blocks shared.
class CharClassTable {
 public:
  static const CharClassTable& Get();

  CharClass ascii(uint8_t byte) const { return ascii_[byte]; }
  CharClass Of(char32_t code_point) const {
    return blocks_[block_of_[code_point >> 8]][code_point & 0xFF];
  }

 private:
  CharClassTable();

  using Block = std::array<CharClass, 256>;
  std::array<CharClass, 128> ascii_;
  std::array<uint16_t, 0x1100> block_of_;
  std::vector<Block> blocks_;
};

}  // namespace fathom::text
