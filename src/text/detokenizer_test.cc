#include "text/detokenizer.h"

#include <gtest/gtest.h>

#include <map>

namespace fathom::text {
namespace {

// Token i is the i-th text given.
class ListTokenizer final : public Tokenizer {
 public:
  explicit ListTokenizer(std::vector<std::string> tokens) : tokens_(std::move(tokens)) {}
  void Encode(std::string_view, AddedTokens, std::vector<int32_t>*) const override {}
  std::string_view TokenBytes(int32_t id) const override {
    return id >= 0 && id < vocab_size() ? std::string_view(tokens_[id]) : std::string_view();
  }
  int32_t AddedTokenId(std::string_view) const override { return -1; }
  bool IsAddedToken(int32_t) const override { return false; }
  int32_t vocab_size() const override { return static_cast<int32_t>(tokens_.size()); }
  std::string Decode(const std::vector<int32_t>&, bool) const override { return ""; }

 private:
  std::vector<std::string> tokens_;
};

// The text of each push, then that of the flush.
std::vector<std::string> Stream(std::vector<std::string> tokens) {
  const ListTokenizer tokenizer(std::move(tokens));
  IncrementalDetokenizer detokenizer(tokenizer);
  std::vector<std::string> texts;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) texts.push_back(detokenizer.Push(id));
  texts.push_back(detokenizer.Flush());
  return texts;
}

using Texts = std::vector<std::string>;

TEST(Detokenizer, GivesWholeCharactersWithTheTokenThatCompletesThem) {
  EXPECT_EQ(Stream({"a", "\xF0\x9F", "\x98", "\x80z"}), (Texts{"a", "", "", "😀z", ""}));
}

TEST(Detokenizer, HoldsBackThreeBytesAtMost) {
  EXPECT_EQ(Stream({"x\xF0\x9F\x98", "y"}), (Texts{"x", "\uFFFDy", ""}));
}

TEST(Detokenizer, FlushesAnIncompleteCharacterAsOneReplacement) {
  EXPECT_EQ(Stream({"x\xE4\xB8"}), (Texts{"x", "\uFFFD"}));
  EXPECT_EQ(Stream({"x"}), (Texts{"x", ""}));
}

TEST(Detokenizer, UnknownIdsHaveNoText) {
  const ListTokenizer tokenizer({"a"});
  IncrementalDetokenizer detokenizer(tokenizer);
  EXPECT_EQ(detokenizer.Push(7), "");
  EXPECT_EQ(detokenizer.Push(-1), "");
}

TEST(SanitizeUtf8, ReplacesEachMaximalSubpart) {
  // The examples of Unicode, tables 3-8 to 3-11.
  const std::map<std::string, std::string> cases = {
      {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA"},
      {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA"},
      {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA\uFFFD\uFFFDB"},
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", "\uFFFD\uFFFD\uFFFD\uFFFDA"},
  };
  for (const auto& [bytes, expected] : cases) EXPECT_EQ(SanitizeUtf8(bytes, nullptr), expected);
}

TEST(SanitizeUtf8, KeepsValidTextOfEveryLength) {
  const std::string text = "a\u007F\u0080\u07FF\u0800\uD7FF\uE000\uFFFF\U00010000\U0010FFFF";
  EXPECT_EQ(SanitizeUtf8(text, nullptr), text);
}

TEST(SanitizeUtf8, TheSameForEverySplit) {
  const std::string bytes = "a\xF0\x9F\x98\x80\xE4\xB8\xAD\xC3(\xF0\x9F\xFFz\xE0\x80\xC3";
  const std::string whole = SanitizeUtf8(bytes, nullptr);
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    std::string rest;
    std::string text = SanitizeUtf8(bytes.substr(0, cut), &rest);
    text += SanitizeUtf8(rest + bytes.substr(cut), nullptr);
    EXPECT_EQ(text, whole) << cut;
  }
}

}  // namespace
}  // namespace fathom::text
