// PCRE2 with UTF and Unicode properties, as tokenizer.json patterns expect. Differences from the
// `tokenizers` library's engine that matter to no known vocabulary: PCRE2 10.42 knows Unicode 14,
// and its \s has U+180E.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <memory>
#include <string>

#include "base/log.h"
#include "text/pre_tokenizer.h"
#include "text/unicode.h"

namespace fathom::text {
namespace {

constexpr uint32_t kMatchLimit = 10'000'000;  // calls of the matcher's inner function for one match
constexpr uint32_t kHeapLimitKib = 64 * 1024;
constexpr size_t kMaxPatternBytes = 64 * 1024;

struct FreePcre2 {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};
using Code = std::unique_ptr<pcre2_code, FreePcre2>;
using MatchData = std::unique_ptr<pcre2_match_data, FreePcre2>;
using MatchContext = std::unique_ptr<pcre2_match_context, FreePcre2>;

class RegexSplitter final : public PreTokenizer {
 public:
  RegexSplitter(std::vector<Code> codes, MatchContext context)
      : codes_(std::move(codes)), context_(std::move(context)) {}

  void Split(std::string_view text, const PieceSink& sink) const override {
    // Checked once here, because PCRE2 would check the whole text again for every match.
    IsValidUtf8(text) ? SplitBy(0, text, sink) : sink(text);
  }

 private:
  void SplitBy(size_t pattern_idx, std::string_view text, const PieceSink& sink) const {
    if (text.empty()) return;
    if (pattern_idx == codes_.size()) return sink(text);
    const pcre2_code* code = codes_[pattern_idx].get();
    const MatchData match(pcre2_match_data_create_from_pattern(code, nullptr));
    size_t done = 0;
    while (match != nullptr && done < text.size()) {
      size_t begin = 0;
      size_t end = 0;
      if (!FindMatch(code, text, done, match.get(), &begin, &end)) break;
      SplitBy(pattern_idx + 1, text.substr(done, begin - done), sink);
      SplitBy(pattern_idx + 1, text.substr(begin, end - begin), sink);
      done = end;
    }
    SplitBy(pattern_idx + 1, text.substr(done), sink);
  }

  // The next match that is not empty.
  bool FindMatch(const pcre2_code* code, std::string_view text, size_t from,
                 pcre2_match_data* match, size_t* begin, size_t* end) const {
    const int rc = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                               PCRE2_NOTEMPTY | PCRE2_NO_UTF_CHECK, match, context_.get());
    if (rc == PCRE2_ERROR_NOMATCH) return false;
    if (rc < 0) {
      LogMatchFailure(rc);
      return false;
    }
    const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(match);
    *begin = offsets[0];
    *end = offsets[1];
    return *begin >= from && *begin < *end;  // \K can put the start anywhere
  }

  static void LogMatchFailure(int rc);

  std::vector<Code> codes_;
  MatchContext context_;
};

std::string ErrorText(int rc) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(rc, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

void RegexSplitter::LogMatchFailure(int rc) {
  LogWarning("tokenizer: a pre-tokenizer pattern gave up: {}", ErrorText(rc));
}

}  // namespace

Result<std::unique_ptr<PreTokenizer>> MakeRegexSplitter(const std::vector<std::string>& patterns) {
  MatchContext context(pcre2_match_context_create(nullptr));
  if (context == nullptr) return OutOfMemory("no memory for the pre-tokenizer");
  pcre2_set_match_limit(context.get(), kMatchLimit);
  pcre2_set_heap_limit(context.get(), kHeapLimitKib);
  std::vector<Code> codes;
  for (const std::string& pattern : patterns) {
    if (pattern.size() > kMaxPatternBytes) {
      return BadModel("pattern of " + std::to_string(pattern.size()) + " bytes, expected at most " +
                      std::to_string(kMaxPatternBytes));
    }
    int error = 0;
    PCRE2_SIZE offset = 0;
    Code code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                            PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset,
                            nullptr));
    if (code == nullptr) {
      return BadModel("pattern is no regular expression: " + ErrorText(error) + " at byte " +
                      std::to_string(offset));
    }
    codes.push_back(std::move(code));
  }
  return std::unique_ptr<PreTokenizer>(
      std::make_unique<RegexSplitter>(std::move(codes), std::move(context)));
}

Result<std::unique_ptr<PreTokenizer>> MakePreTokenizer(const std::vector<std::string>& patterns) {
  if (patterns == DeepSeekPatterns()) return MakeDeepSeekScanner();
  return MakeRegexSplitter(patterns);
}

}  // namespace fathom::text
