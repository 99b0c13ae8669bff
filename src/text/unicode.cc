#include "text/unicode.h"

#include <algorithm>
#include <iterator>

namespace fathom::text {
namespace {

struct ClassRun {
  char32_t first;
  CharClass char_class;
};

constexpr ClassRun kClassRuns[] = {
#include "text/unicode_classes.inc"
};

constexpr char32_t kReplacement = 0xFFFD;

// What a lead byte promises: the sequence's length (0: no lead byte) and the range of its second
// byte, which is where overlong forms, surrogates and values past U+10FFFF are told apart (Unicode,
// table 3-7).
struct LeadByte {
  uint8_t num_bytes;
  uint8_t second_min;
  uint8_t second_max;
};

constexpr LeadByte Lead(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// How many bytes from text[pos] on belong to the sequence that its lead byte starts.
size_t MatchingBytes(std::string_view text, size_t pos, const LeadByte& lead) {
  size_t matched = 1;
  while (matched < lead.num_bytes && pos + matched < text.size()) {
    const uint8_t byte = static_cast<uint8_t>(text[pos + matched]);
    const uint8_t low = matched == 1 ? lead.second_min : 0x80;
    const uint8_t high = matched == 1 ? lead.second_max : 0xBF;
    if (byte < low || byte > high) break;
    ++matched;
  }
  return matched;
}

}  // namespace

DecodedChar DecodeUtf8(std::string_view text, size_t pos) {
  const uint8_t first = static_cast<uint8_t>(text[pos]);
  if (first < 0x80) return {first, 1, true};
  const LeadByte lead = Lead(first);
  if (lead.num_bytes == 0 || MatchingBytes(text, pos, lead) != lead.num_bytes) {
    return {kReplacement, 1, false};
  }
  char32_t code_point = first & (0x7F >> lead.num_bytes);
  for (size_t i = 1; i < lead.num_bytes; ++i) {
    code_point = code_point << 6 | (static_cast<uint8_t>(text[pos + i]) & 0x3F);
  }
  return {code_point, lead.num_bytes, true};
}

size_t MaximalSubpart(std::string_view text, size_t pos, bool* incomplete) {
  const LeadByte lead = Lead(static_cast<uint8_t>(text[pos]));
  if (lead.num_bytes == 0) {
    *incomplete = false;
    return 1;
  }
  const size_t matched = MatchingBytes(text, pos, lead);
  *incomplete = matched < lead.num_bytes && pos + matched == text.size();
  return matched;
}

bool IsValidUtf8(std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const DecodedChar decoded = DecodeUtf8(text, pos);
    if (!decoded.valid) return false;
    pos += decoded.num_bytes;
  }
  return true;
}

void AppendUtf8(char32_t code_point, std::string* out) {
  const auto continuation = [](char32_t bits) { return static_cast<char>(0x80 | (bits & 0x3F)); };
  if (code_point < 0x80) {
    out->push_back(static_cast<char>(code_point));
  } else if (code_point < 0x800) {
    out->push_back(static_cast<char>(0xC0 | code_point >> 6));
    out->push_back(continuation(code_point));
  } else if (code_point < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | code_point >> 12));
    out->push_back(continuation(code_point >> 6));
    out->push_back(continuation(code_point));
  } else {
    out->push_back(static_cast<char>(0xF0 | code_point >> 18));
    out->push_back(continuation(code_point >> 12));
    out->push_back(continuation(code_point >> 6));
    out->push_back(continuation(code_point));
  }
}

const CharClassTable& CharClassTable::Get() {
  static const CharClassTable table;
  return table;
}

CharClassTable::CharClassTable() {
  const ClassRun* run = std::begin(kClassRuns);
  Block block;
  for (char32_t first = 0; first < 0x110000; first += 256) {
    for (char32_t i = 0; i < 256; ++i) {
      while (run + 1 != std::end(kClassRuns) && run[1].first <= first + i) ++run;
      block[i] = run->char_class;
    }
    auto same = std::find(blocks_.begin(), blocks_.end(), block);
    block_of_[first >> 8] = static_cast<uint16_t>(same - blocks_.begin());
    if (same == blocks_.end()) blocks_.push_back(block);
  }
  std::copy_n(blocks_[block_of_[0]].begin(), ascii_.size(), ascii_.begin());
}

}  // namespace fathom::text
