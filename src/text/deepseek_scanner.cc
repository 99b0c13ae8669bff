#include <cstdint>

#include "text/pre_tokenizer.h"
#include "text/unicode.h"

namespace fathom::text {
namespace {

// A cursor over one text. The three patterns become one pass because the first two cut at
// characters of two classes (numbers, CJK) that the third never sees: for it such a character is
// the end of its piece.
class Scan {
 public:
  explicit Scan(std::string_view text) : table_(CharClassTable::Get()), text_(text) { Load(0); }

  bool done() const { return pos_ == text_.size(); }
  size_t pos() const { return pos_; }

  // Moves past the next piece.
  void NextPiece() {
    switch (class_) {
      case kNumber:
        return SkipNumbers();
      case kCjk:
        return SkipClass(kCjk);
      case kLetter:
      case kMark:
        return SkipWord();
      case kPunctuation:
      case kSymbol:
        return SkipPunctuation();
      case kSpace:
      case kNewline:
        return SkipSpaces();
      case kOther:
        return SkipOther();
    }
  }

 private:
  // Makes pos the current character.
  void Load(size_t pos) {
    pos_ = pos;
    if (pos >= text_.size()) {
      class_ = kCjk;  // like every end of the third pattern's piece
      width_ = 0;
      return;
    }
    const uint8_t byte = static_cast<uint8_t>(text_[pos]);
    if (byte < 0x80) {
      class_ = table_.ascii(byte);
      width_ = 1;
      return;
    }
    const DecodedChar decoded = DecodeUtf8(text_, pos);
    class_ = decoded.valid ? table_.Of(decoded.code_point) : kOther;
    width_ = decoded.num_bytes;
  }

  void Advance() { Load(pos_ + width_); }
  bool AtWord() const { return class_ == kLetter || class_ == kMark; }
  bool AtPieceEnd() const { return class_ == kNumber || class_ == kCjk; }

  static bool IsAsciiLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

  // \p{N}{1,3}
  void SkipNumbers() {
    for (int i = 0; i < 3 && class_ == kNumber; ++i) Advance();
  }

  void SkipClass(CharClass wanted) {
    while (class_ == wanted && !done()) Advance();
  }

  // [\p{L}\p{M}]+
  void SkipWord() {
    while (AtWord()) Advance();
  }

  // [!-/:-@[-`{-~][A-Za-z]+, else [\p{P}\p{S}]+[\r\n]*
  void SkipPunctuation() {
    if (width_ == 1 && pos_ + 1 < text_.size() && IsAsciiLetter(text_[pos_ + 1])) {
      size_t end = pos_ + 2;
      while (end < text_.size() && IsAsciiLetter(text_[end])) ++end;
      return Load(end);
    }
    while (class_ == kPunctuation || class_ == kSymbol) Advance();
    while (class_ == kNewline) Advance();
  }

  // A run of \s. In the order of the alternatives: one character that is no newline before a word
  // or, if it is U+0020, before punctuation; up to the last newline of the run; all but the last
  // character; all of it.
  void SkipSpaces() {
    const bool is_newline = class_ == kNewline;
    const bool is_blank = text_[pos_] == ' ';
    Advance();
    if (!is_newline && AtWord()) return SkipWord();
    if (is_blank && (class_ == kPunctuation || class_ == kSymbol)) {
      while (class_ == kPunctuation || class_ == kSymbol) Advance();
      while (class_ == kNewline) Advance();
      return;
    }
    size_t after_newline = is_newline ? pos_ : 0;
    size_t last = 0;  // where the run's last character starts, if it has more than one
    while (class_ == kSpace || class_ == kNewline) {
      last = pos_;
      const bool newline = class_ == kNewline;
      Advance();
      if (newline) after_newline = pos_;
    }
    if (after_newline != 0) return Load(after_newline);
    if (last != 0 && !AtPieceEnd()) return Load(last);
  }

  // A character of no class joins the word after it; those that no alternative matches stay
  // together.
  void SkipOther() {
    bool alone = true;
    while (class_ == kOther) {
      const size_t start = pos_;
      Advance();
      if (!AtWord()) {
        alone = false;
        continue;
      }
      if (alone) return SkipWord();
      return Load(start);
    }
  }

  const CharClassTable& table_;
  const std::string_view text_;
  size_t pos_ = 0;
  size_t width_ = 0;
  CharClass class_ = kOther;
};

class DeepSeekScanner final : public PreTokenizer {
 public:
  void Split(std::string_view text, const PieceSink& sink) const override {
    Scan scan(text);
    while (!scan.done()) {
      const size_t begin = scan.pos();
      scan.NextPiece();
      sink(text.substr(begin, scan.pos() - begin));
    }
  }
};

}  // namespace

const std::vector<std::string>& DeepSeekPatterns() {
  static const std::vector<std::string> patterns = {
      R"(\p{N}{1,3})",
      "[一-龥぀-ゟ゠-ヿ]+",
      R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+)"
      "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
      "| ?[\\p{P}\\p{S}]+[\r\n]*"
      "|\\s*[\r\n]+"
      R"(|\s+(?!\S)|\s+)",
  };
  return patterns;
}

std::unique_ptr<PreTokenizer> MakeDeepSeekScanner() { return std::make_unique<DeepSeekScanner>(); }

}  // namespace fathom::text
