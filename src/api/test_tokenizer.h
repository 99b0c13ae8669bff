// The built-in model's tokenizer, for tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/check.h"
#include "text/tokenizer.h"

namespace fathom::api {

inline const text::Tokenizer& TestTokenizer() {
  static const auto tokenizer = [] {
    auto loaded = text::Tokenizer::Load(FATHOM_SOURCE_DIR "/models/fathom-tiny/tokenizer.json");
    CHECK(loaded.ok());
    return *std::move(loaded);
  }();
  return *tokenizer;
}

inline text::SpecialTokens TestSpecialTokens() {
  return *text::SpecialTokens::Find(TestTokenizer());
}

// Control tokens' text becomes their ids.
inline std::vector<int32_t> Ids(const std::string& text) {
  std::vector<int32_t> ids;
  TestTokenizer().Encode(text, text::Tokenizer::AddedTokens::kMatch, &ids);
  return ids;
}

}  // namespace fathom::api
