#include "text/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "json/json.h"
#include "text/test_files.h"
#include "text/unicode.h"

namespace fathom::text {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> Split(const PreTokenizer& pre_tokenizer, std::string_view text) {
  std::vector<std::string> pieces;
  pre_tokenizer.Split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

std::vector<std::string> Scan(std::string_view text) { return Split(*MakeDeepSeekScanner(), text); }

std::vector<std::string> SplitBy(const std::vector<std::string>& patterns, std::string_view text) {
  auto splitter = MakeRegexSplitter(patterns);
  EXPECT_TRUE(splitter.ok()) << splitter.status().message();
  return Split(**splitter, text);
}

TEST(DeepSeekScanner, SplitsDigitsInThreesFromTheLeft) {
  EXPECT_THAT(Scan("12345 67"), ElementsAre("123", "45", " ", "67"));
  EXPECT_THAT(Scan("٠١٢٣"), ElementsAre("٠١٢", "٣"));
}

TEST(DeepSeekScanner, LeavesOneSpaceToTheWordAfterARun) {
  EXPECT_THAT(Scan("a   b"), ElementsAre("a", "  ", " b"));
  EXPECT_THAT(Scan("a   "), ElementsAre("a", "   "));
}

TEST(DeepSeekScanner, TakesARunOfSpacesWholeBeforeDigitsAndCjk) {
  EXPECT_THAT(Scan("  12"), ElementsAre("  ", "12"));
  EXPECT_THAT(Scan("  中文"), ElementsAre("  ", "中文"));
}

TEST(DeepSeekScanner, EndsARunOfBlankLinesAtItsLastNewline) {
  EXPECT_THAT(Scan(" \r\n \n  x"), ElementsAre(" \r\n \n", " ", " x"));
  EXPECT_THAT(Scan("!\r\n\r\n x"), ElementsAre("!\r\n\r\n", " x"));
}

TEST(DeepSeekScanner, OnePunctuationMarkJoinsTheAsciiWordAfterIt) {
  EXPECT_THAT(Scan("don't"), ElementsAre("don", "'t"));
  EXPECT_THAT(Scan("..x"), ElementsAre("..", "x"));
  EXPECT_THAT(Scan(".é"), ElementsAre(".", "é"));
  EXPECT_THAT(Scan("。x"), ElementsAre("。", "x"));
}

TEST(DeepSeekScanner, KeepsUnmatchedCharactersTogether) {
  EXPECT_THAT(Scan("\u200d\u200d a"), ElementsAre("\u200d\u200d", " a"));
  EXPECT_THAT(Scan("\u200d\u200da"), ElementsAre("\u200d", "\u200da"));
}

TEST(DeepSeekScanner, EqualsTheTokenizersLibrary) {
  const json::Value cases = ReadTestJson("tokenizer_cases.json");
  for (const json::Value& test_case : cases.items()) {
    std::vector<std::string> expected;
    for (const json::Value& piece : test_case.Find("pieces")->items()) {
      expected.push_back(piece.AsString());
    }
    EXPECT_EQ(Scan(test_case.Find("text")->AsString()), expected) << json::Dump(test_case);
  }
}

TEST(DeepSeekScanner, EqualsItsPatternsRunByPcre2) {
  auto splitter = MakeRegexSplitter(DeepSeekPatterns());
  ASSERT_TRUE(splitter.ok()) << splitter.status().message();
  const json::Value cases = ReadTestJson("tokenizer_cases.json");
  for (const json::Value& test_case : cases.items()) {
    const std::string& text = test_case.Find("text")->AsString();
    EXPECT_EQ(Split(**splitter, text), Scan(text)) << json::Dump(test_case);
  }
}

TEST(DeepSeekScanner, SurvivesInvalidUtf8) {
  const std::string bytes = "a\xFF\xE4\xB8 \xF0\x9F";
  std::string joined;
  for (const std::string& piece : Scan(bytes)) joined += piece;
  EXPECT_EQ(joined, bytes);
}

TEST(MakePreTokenizer, KnowsThePatternsOfTheFamily) {
  auto known = MakePreTokenizer(DeepSeekPatterns());
  ASSERT_TRUE(known.ok());
  const auto scanner = MakeDeepSeekScanner();
  EXPECT_EQ(typeid(**known), typeid(*scanner));
}

TEST(RegexSplitter, EachPatternSplitsWhatTheOnesBeforeLeft) {
  EXPECT_THAT(SplitBy({R"(\p{N})", "[a-z]+"}, "ab12-c"), ElementsAre("ab", "1", "2", "-", "c"));
  EXPECT_THAT(SplitBy({}, "ab"), ElementsAre("ab"));
  EXPECT_THAT(SplitBy({"x*"}, "axxb"), ElementsAre("a", "xx", "b"));
}

TEST(RegexSplitter, RefusesWhatIsNoPattern) {
  const auto bad = MakeRegexSplitter({"(a"});
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().code(), StatusCode::kBadModel);
  EXPECT_THAT(bad.status().message(), HasSubstr("at byte 2"));
  EXPECT_FALSE(MakeRegexSplitter({std::string(70'000, 'a')}).ok());
}

TEST(RegexSplitter, ExponentialPatternsGiveUp) {
  const std::string text = std::string(60, 'a') + "b";
  std::string joined;
  for (const std::string& piece : SplitBy({"(a|aa)+$"}, text)) joined += piece;
  EXPECT_EQ(joined, text);
}

TEST(Unicode, ClassesAreThoseOfThePatterns) {
  const CharClassTable& table = CharClassTable::Get();
  EXPECT_EQ(table.Of('a'), kLetter);
  EXPECT_EQ(table.Of(0x301), kMark);
  EXPECT_EQ(table.Of(0xBD), kNumber);
  EXPECT_EQ(table.Of(0x3002), kPunctuation);
  EXPECT_EQ(table.Of(0x20AC), kSymbol);
  EXPECT_EQ(table.Of(0x85), kSpace);
  EXPECT_EQ(table.Of(0xD), kNewline);
  EXPECT_EQ(table.Of(0x3040), kCjk);
  EXPECT_EQ(table.Of(0x9FA6), kLetter);
  EXPECT_EQ(table.Of(0x200D), kOther);
  EXPECT_EQ(table.Of(0x10FFFF), kOther);
  EXPECT_EQ(table.Of(0x1C89), kLetter);  // of Unicode 16
}

}  // namespace
}  // namespace fathom::text
