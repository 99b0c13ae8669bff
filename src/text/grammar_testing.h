// For tests of grammars: a vocabulary of all bytes and a few longer tokens, and a way to ask which
// texts a grammar lets through.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/grammar.h"

namespace fathom::text {

inline constexpr int32_t kTestEnd = 256;  // ends an answer

inline std::shared_ptr<const GrammarVocabulary> TestVocabulary() {
  GrammarVocabulary::Tokens tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.bytes.emplace_back(1, static_cast<char>(byte));
  for (const char* text : {"", "true", "\":", "</think>", "｜DSML｜", " \"", "ab"}) {
    tokens.bytes.emplace_back(text);
  }
  tokens.end_token_ids = {kTestEnd};
  return GrammarVocabulary::Make(tokens);
}

inline Result<std::shared_ptr<const Grammar>> CompileForTest(const std::string& format,
                                                             const GrammarBudget& budget = {}) {
  static const auto vocabulary = TestVocabulary();
  const std::atomic<bool> cancelled{false};
  return Grammar::Compile(*vocabulary, format, budget, cancelled);
}

inline bool Allows(request::TokenConstraint& constraint, int32_t id) {
  std::vector<uint32_t> mask(9);
  if (!constraint.FillNextTokenMask(mask)) return true;
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

// How many bytes of `text` the grammar lets through, one by one; text.size() + 1 when the answer
// may end there. What a mask allows must be accepted (not the other way round: counters bound the
// mask only).
inline size_t AllowedPrefix(const Grammar& grammar, std::string_view text) {
  const auto constraint = grammar.NewConstraint();
  for (size_t i = 0; i < text.size(); ++i) {
    const int32_t id = static_cast<unsigned char>(text[i]);
    if (!Allows(*constraint, id)) return i;
    if (!constraint->AcceptToken(id)) return std::string_view::npos;
  }
  return text.size() + (Allows(*constraint, kTestEnd) ? 1 : 0);
}

inline bool Admits(const Grammar& grammar, std::string_view text) {
  return AllowedPrefix(grammar, text) == text.size() + 1;
}

}  // namespace fathom::text
