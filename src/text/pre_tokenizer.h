// PreTokenizer: cuts text into the pieces that byte-pair encoding works on alone. Immutable; any
// thread. The V3/V4 pattern is scanned by hand (deepseek_scanner.cc); other patterns run in PCRE2
// (regex_splitter.cc).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace fathom::text {

// Receives the pieces in order; concatenated they are the text. Valid during the call only.
using PieceSink = std::function<void(std::string_view)>;

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual void Split(std::string_view text, const PieceSink& sink) const = 0;
};

// The regular expressions of the family's tokenizer.json, in their order: each cuts ("Isolated")
// what the ones before it left whole.
const std::vector<std::string>& DeepSeekPatterns();

// Equal to splitting by DeepSeekPatterns() one after the other, in one pass.
std::unique_ptr<PreTokenizer> MakeDeepSeekScanner();

// Splits by each pattern in turn: matches and what lies between them become pieces of the next.
// kBadModel for a pattern that PCRE2 refuses. Matching effort is bounded; where the bound is
// reached, the rest stays whole.
Result<std::unique_ptr<PreTokenizer>> MakeRegexSplitter(const std::vector<std::string>& patterns);

// The scanner when the patterns are DeepSeek's, else the splitter.
Result<std::unique_ptr<PreTokenizer>> MakePreTokenizer(const std::vector<std::string>& patterns);

}  // namespace fathom::text
