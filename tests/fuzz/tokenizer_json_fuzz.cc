// Any bytes as tokenizer.json: refused, or a tokenizer whose plain encoding decodes to the text.
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fathom::text::Tokenizer;
  constexpr std::string_view kText =
      "<｜User｜>Hello,  world 12345\r\n\t中文 カタカナ é e\u0301 👩‍👧 "
      "\u00a0x\u2028 "
      "don't "
      "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
      "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa                                      "
      "</think>";
  const auto tokenizer =
      Tokenizer::Parse({reinterpret_cast<const char*>(data), size}, "tokenizer.json");
  if (!tokenizer.ok()) {
    CHECK(tokenizer.status().code() == fathom::StatusCode::kBadModel);
    return 0;
  }
  std::vector<int32_t> ids;
  (*tokenizer)->Encode(kText, Tokenizer::AddedTokens::kMatch, &ids);
  (*tokenizer)->Decode(ids, true);
  ids.clear();
  (*tokenizer)->Encode(kText, Tokenizer::AddedTokens::kAsPlain, &ids);
  CHECK_EQ((*tokenizer)->Decode(ids, false), kText);
  return 0;
}
