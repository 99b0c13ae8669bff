#include "text/tokenizer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "text/test_files.h"
#include "text/unicode.h"

namespace fathom::text {
namespace {

using json::Value;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Ids = std::vector<int32_t>;
using AddedTokens = Tokenizer::AddedTokens;

// GPT-2's character for a byte.
std::string ByteSymbol(int byte) {
  static const std::vector<std::string> symbols = [] {
    std::vector<std::string> all(256);
    char32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD);
      AppendUtf8(printable ? b : next++, &all[b]);
    }
    return all;
  }();
  return symbols[byte];
}

// A tokenizer.json to change: ids 0-255 are the bytes, 256 on the results of `merges`.
class TokenizerJson {
 public:
  explicit TokenizerJson(const std::vector<std::string>& merges = {}) {
    Value vocab = Value::Object();
    for (int byte = 0; byte < 256; ++byte) {
      vocab.Set(ByteSymbol(byte), Value::Number(int64_t{byte}));
    }
    std::vector<Value> merge_list;
    for (size_t i = 0; i < merges.size(); ++i) {
      std::string result = merges[i];
      result.erase(result.find(' '), 1);
      vocab.Set(result, Value::Number(static_cast<int64_t>(256 + i)));
      merge_list.push_back(Value::String(merges[i]));
    }
    Value model = Value::Object();
    model.Set("type", Value::String("BPE"));
    model.Set("vocab", std::move(vocab));
    model.Set("merges", Value::Array(std::move(merge_list)));
    root_ = ParseTestJson(R"({"normalizer":null,"added_tokens":[],
        "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":false},
        "decoder":{"type":"ByteLevel"}})");
    root_.Set("model", std::move(model));
  }

  // Sets the member at a path of keys.
  TokenizerJson& Set(const std::vector<std::string>& path, std::string_view json) {
    Value* at = &root_;
    for (size_t i = 0; i + 1 < path.size(); ++i) at = at->Find(path[i]);
    at->Set(path.back(), ParseTestJson(json));
    return *this;
  }

  TokenizerJson& Add(int id, const std::string& content, const std::string& more = "") {
    const std::string json = fmt::format(R"({{"id":{},"content":{}{}}})", id, json::Quote(content),
                                         more.empty() ? "" : "," + more);
    root_.Find("added_tokens")->items().push_back(ParseTestJson(json));
    return *this;
  }

  Result<std::unique_ptr<Tokenizer>> Load() const {
    return Tokenizer::Parse(json::Dump(root_), "tokenizer.json");
  }

  std::unique_ptr<Tokenizer> MustLoad() const {
    auto loaded = Load();
    EXPECT_TRUE(loaded.ok()) << loaded.status().message();
    return std::move(*loaded);
  }

  std::string Error() const {
    const auto loaded = Load();
    EXPECT_FALSE(loaded.ok());
    if (loaded.ok()) return "";
    EXPECT_EQ(loaded.status().code(), StatusCode::kBadModel);
    return loaded.status().message();
  }

 private:
  Value root_;
};

Ids Encode(const Tokenizer& tokenizer, std::string_view text,
           AddedTokens mode = AddedTokens::kMatch) {
  Ids ids;
  tokenizer.Encode(text, mode, &ids);
  return ids;
}

TEST(Tokenizer, EqualsTheTokenizersLibrary) {
  const auto tiny = Tokenizer::Load(TinyTokenizerPath());
  ASSERT_TRUE(tiny.ok()) << tiny.status().message();
  const Value cases = ReadTestJson("tokenizer_cases.json");
  for (const Value& test_case : cases.items()) {
    Ids expected;
    for (const Value& id : test_case.Find("ids")->items()) expected.push_back(*id.ToInt64());
    const std::string& text = test_case.Find("text")->AsString();
    EXPECT_EQ(Encode(**tiny, text), expected) << json::Dump(test_case);
    EXPECT_EQ((*tiny)->Decode(expected, false), text);
  }
}

TEST(Tokenizer, MergesTheLowestRankFirstAndTheLeftmostOfEquals) {
  // Ranks: "bc" 256, "ab" 257, "aa" 258, "aaa" 259.
  const auto tokenizer = TokenizerJson({"b c", "a b", "a a", "aa a"}).MustLoad();
  EXPECT_THAT(Encode(*tokenizer, "abc"), ElementsAre('a', 256));
  EXPECT_THAT(Encode(*tokenizer, "ab"), ElementsAre(257));
  EXPECT_THAT(Encode(*tokenizer, "aaaaa"), ElementsAre(258, 259));
  EXPECT_THAT(Encode(*tokenizer, "aaab"), ElementsAre(258, 257));
}

TEST(Tokenizer, LongPiecesMergeAsShortOnesDo) {
  const auto tokenizer = TokenizerJson({"b c", "a b", "a a", "aa a", "aa bc"}).MustLoad();
  // The period keeps merges from crossing, so that each part can be encoded alone.
  Ids expected;
  std::string text;
  for (const char* part : {"aabc.", "abcaab.", "aaaaaaa.", "bcbcabab.", "aaabbbccc."}) {
    const Ids ids = Encode(*tokenizer, part);
    for (int i = 0; i < 40; ++i) {
      text += part;
      expected.insert(expected.end(), ids.begin(), ids.end());
    }
  }
  EXPECT_EQ(Encode(*tokenizer, text), expected);
}

TEST(Tokenizer, OfAPairGivenTwiceTheLaterRankCounts) {
  auto file = TokenizerJson({"b c", "a b"});
  file.Set({"model", "merges"}, R"(["b c","a b","b c"])");
  EXPECT_THAT(Encode(*file.MustLoad(), "abc"), ElementsAre(257, 'c'));
}

TEST(Tokenizer, ReadsMergesWrittenAsPairs) {
  auto file = TokenizerJson({"a b"});
  file.Set({"model", "merges"}, R"([["a","b"]])");
  EXPECT_THAT(Encode(*file.MustLoad(), "ab"), ElementsAre(256));
}

TEST(Tokenizer, IgnoreMergesTakesWholePiecesFromTheVocabulary) {
  auto file = TokenizerJson();
  file.Set({"model", "vocab", "abc"}, "256");
  EXPECT_THAT(Encode(*file.MustLoad(), "abc"), ElementsAre('a', 'b', 'c'));
  file.Set({"model", "ignore_merges"}, "true");
  EXPECT_THAT(Encode(*file.MustLoad(), "abc"), ElementsAre(256));
}

TEST(Tokenizer, AddedTokensMatchLeftmostThenLongest) {
  const auto tokenizer =
      TokenizerJson().Add(300, "<a>").Add(301, "<a>b").Add(302, "a>").Add(303, "xy").MustLoad();
  EXPECT_THAT(Encode(*tokenizer, "<a>c"), ElementsAre(300, 'c'));
  EXPECT_THAT(Encode(*tokenizer, "<a>b"), ElementsAre(301));
  EXPECT_THAT(Encode(*tokenizer, "a><a"), ElementsAre(302, '<', 'a'));
  EXPECT_THAT(Encode(*tokenizer, "<<a>xy"), ElementsAre('<', 300, 303));
  EXPECT_THAT(Encode(*tokenizer, ""), IsEmpty());
}

TEST(Tokenizer, NormalizedAddedTokensMatchInWhatTheOthersLeft) {
  const auto tokenizer = TokenizerJson()
                             .Add(300, "ab", R"("normalized":true)")
                             .Add(301, "bc", R"("normalized":false)")
                             .MustLoad();
  EXPECT_THAT(Encode(*tokenizer, "abc"), ElementsAre('a', 301));
  EXPECT_THAT(Encode(*tokenizer, "abab"), ElementsAre(300, 300));
}

TEST(Tokenizer, PlainModeKnowsNoAddedTokens) {
  const auto tokenizer = TokenizerJson().Add(300, "<a>").MustLoad();
  EXPECT_THAT(Encode(*tokenizer, "<a>", AddedTokens::kAsPlain), ElementsAre('<', 'a', '>'));
}

TEST(Tokenizer, DigitsAndGpt2StepsSplitToo) {
  auto file = TokenizerJson({"1 2", "a 1"});
  EXPECT_THAT(Encode(*file.MustLoad(), "a12"), ElementsAre('a', 256));
  file.Set({"pre_tokenizer"}, R"({"type":"Sequence","pretokenizers":[
      {"type":"Digits","individual_digits":true},{"type":"ByteLevel","add_prefix_space":false,
      "use_regex":false}]})");
  EXPECT_THAT(Encode(*file.MustLoad(), "a12"), ElementsAre('a', '1', '2'));
  file.Set({"pre_tokenizer"}, R"({"type":"Sequence","pretokenizers":[
      {"type":"Digits","individual_digits":false},{"type":"ByteLevel","add_prefix_space":false,
      "use_regex":false}]})");
  EXPECT_THAT(Encode(*file.MustLoad(), "a12"), ElementsAre('a', 256));
  file.Set({"pre_tokenizer"}, R"({"type":"ByteLevel","add_prefix_space":false})");
  auto words = TokenizerJson({"a Ġ"});
  EXPECT_THAT(Encode(*words.MustLoad(), "a b"), ElementsAre(256, 'b'));
  words.Set({"pre_tokenizer", "use_regex"}, "true");
  EXPECT_THAT(Encode(*words.MustLoad(), "a b"), ElementsAre('a', ' ', 'b'));
}

TEST(Tokenizer, DecodesBytesAndDropsSpecialTokensWhenAsked) {
  const auto tokenizer =
      TokenizerJson().Add(300, "<s>", R"("special":true)").Add(301, "<u>").MustLoad();
  const Ids ids = {300, 'a', 301, 0xE4, 0xB8, 0xAD, 0xE4, 9999, -1};
  EXPECT_EQ(tokenizer->Decode(ids, false), "<s>a<u>中\uFFFD");
  EXPECT_EQ(tokenizer->Decode(ids, true), "a<u>中\uFFFD");
}

TEST(Tokenizer, KnowsItsTokens) {
  auto file = TokenizerJson({"Ġ a"});
  file.Set({"model", "vocab", "<｜pad｜>"}, "258");
  const auto tokenizer = file.Add(300, "<a>").Add(258, "<｜pad｜>").MustLoad();
  EXPECT_EQ(tokenizer->vocab_size(), 301);
  EXPECT_EQ(tokenizer->TokenBytes(256), " a");
  EXPECT_EQ(tokenizer->TokenBytes(257), "");
  EXPECT_EQ(tokenizer->TokenBytes(258), "<｜pad｜>");
  EXPECT_EQ(tokenizer->TokenBytes(300), "<a>");
  EXPECT_EQ(tokenizer->TokenBytes(301), "");
  EXPECT_EQ(tokenizer->TokenBytes(-1), "");
  EXPECT_EQ(tokenizer->AddedTokenId("<a>"), 300);
  EXPECT_EQ(tokenizer->AddedTokenId("a"), -1);
  EXPECT_TRUE(tokenizer->IsAddedToken(258));
  EXPECT_FALSE(tokenizer->IsAddedToken('a'));
  EXPECT_FALSE(tokenizer->IsAddedToken(-1));
}

TEST(Tokenizer, LongRunsTakeNoQuadraticTime) {
  const auto tiny = Tokenizer::Load(TinyTokenizerPath());
  ASSERT_TRUE(tiny.ok());
  for (const char unit : {'a', ' ', '\n', '1', '!', '<'}) {
    const std::string text(1 << 20, unit);
    const Ids ids = Encode(**tiny, text);  // quadratic time would be hours
    EXPECT_EQ((*tiny)->Decode(ids, false), text);
  }
}

TEST(Tokenizer, RefusesWhatItWouldHaveToDoDifferently) {
  struct Case {
    std::vector<std::string> path;
    const char* json;
    const char* error;
  };
  const Case cases[] = {
      {{"normalizer"}, R"({"type":"NFC"})", "normalizer.type: found \"NFC\""},
      {{"normalizer"}, R"({"type":"Sequence","normalizers":[{"type":"NFC"}]})", "normalizers[0]"},
      {{"decoder"}, R"({"type":"Metaspace"})", "decoder.type: found \"Metaspace\""},
      {{"pre_tokenizer"}, "null", "pre_tokenizer: found null"},
      {{"pre_tokenizer", "type"}, R"("Metaspace")", "pre_tokenizer.type: found \"Metaspace\""},
      {{"pre_tokenizer", "add_prefix_space"}, "true", "add_prefix_space: found true"},
      {{"pre_tokenizer"}, R"({"type":"Sequence"})", "pre_tokenizer.pretokenizers: found nothing"},
      {{"model", "type"}, R"("Unigram")", "model.type: found \"Unigram\", expected \"BPE\""},
      {{"model", "dropout"}, "0.1", "model.dropout: found 0.1"},
      {{"model", "continuing_subword_prefix"}, R"("##")", "continuing_subword_prefix"},
      {{"model", "end_of_word_suffix"}, R"("</w>")", "end_of_word_suffix"},
      {{"model", "ignore_merges"}, "1", "model.ignore_merges: found 1"},
      {{"model", "vocab"}, "[]", "model.vocab: found a list"},
      {{"model", "vocab", "a"}, "-1", "model.vocab[\"a\"]: found -1"},
      {{"model", "vocab", "a"}, "2147483648", "found 2147483648"},
      {{"model", "vocab", "a"}, "98", "id 98 is used twice"},
      {{"model", "vocab", ""}, "400", "an empty token"},
      {{"model", "vocab"}, R"({"a":0})", "no token for byte 0x00"},
      {{"model", "merges"}, "{}", "model.merges: found an object"},
      {{"model", "merges"}, "[1]", "model.merges[0]: found 1"},
      {{"model", "merges"}, R"(["a"])", "expected two tokens and a space"},
      {{"model", "merges"}, R"(["a b c"])", "expected two tokens and a space"},
      {{"model", "merges"}, R"([["a"]])", "expected two tokens"},
      {{"model", "merges"}, R"(["a b"])", "model.merges[0]: \"ab\" is no byte-level token"},
      {{"model", "merges"}, R"(["a "])", "\"\" is no byte-level token"},
      {{"added_tokens"}, "{}", "added_tokens: found an object"},
      {{"added_tokens"}, "[1]", "added_tokens[0].id: found nothing"},
      {{"added_tokens"}, R"([{"id":300,"content":""}])", "added_tokens[0].content: found \"\""},
      {{"added_tokens"}, R"([{"id":2097151,"content":"x"}])", "added_tokens[0].id"},
      {{"added_tokens"}, R"([{"id":97,"content":"x"}])", "\"x\" has id 97 here and 120 in"},
      {{"added_tokens"}, R"([{"id":97,"content":"xx"}])", "id 97 is used twice"},
      {{"added_tokens"}, R"([{"id":300,"content":"xx","lstrip":true}])", "lstrip: found true"},
      {{"added_tokens"}, R"([{"id":300,"content":"x1"},{"id":301,"content":"x1"}])", "added twice"},
  };
  for (const Case& test_case : cases) {
    EXPECT_THAT(TokenizerJson().Set(test_case.path, test_case.json).Error(),
                HasSubstr(test_case.error))
        << test_case.json;
  }
  EXPECT_THAT(TokenizerJson().Add(300, std::string(1025, 'x')).Error(), HasSubstr("1025 bytes"));
}

TEST(Tokenizer, RefusesPreTokenizerStepsThatItDoesNotKnow) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"type":"Whitespace"})", "pretokenizers[0].type: found \"Whitespace\""},
      {R"({"type":"Split","pattern":{"Regex":"a"},"behavior":"Removed"})", "[0].behavior"},
      {R"({"type":"Split","pattern":{"Regex":"a"},"behavior":"Isolated","invert":true})", "invert"},
      {R"({"type":"Split","pattern":{"String":"a"},"behavior":"Isolated"})", "[0].pattern.Regex"},
      {R"({"type":"Split","pattern":{"Regex":"("},"behavior":"Isolated"})",
       "no regular expression"},
      {R"({"type":"Digits","individual_digits":1})", "[0].individual_digits"},
  };
  for (const auto& [step, error] : cases) {
    const std::string steps = fmt::format(
        R"({{"type":"Sequence","pretokenizers":[{},{{"type":"ByteLevel","add_prefix_space":false}}]}})",
        step);
    EXPECT_THAT(TokenizerJson().Set({"pre_tokenizer"}, steps).Error(), HasSubstr(error)) << step;
  }
}

TEST(Tokenizer, NamesTheFileInEveryError) {
  const auto missing = Tokenizer::Load("/no/such/tokenizer.json");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), StatusCode::kBadModel);
  EXPECT_EQ(missing.status().message(),
            "cannot read /no/such/tokenizer.json: No such file or directory");
  const auto broken = Tokenizer::Parse("{\"model\":", "m/tokenizer.json");
  ASSERT_FALSE(broken.ok());
  EXPECT_THAT(broken.status().message(), ::testing::StartsWith("m/tokenizer.json: "));
}

TEST(SpecialTokens, AreFoundInTheTinyModel) {
  const auto tiny = Tokenizer::Load(TinyTokenizerPath());
  ASSERT_TRUE(tiny.ok());
  const auto tokens = SpecialTokens::Find(**tiny);
  ASSERT_TRUE(tokens.ok()) << tokens.status().message();
  EXPECT_EQ((*tiny)->TokenBytes(tokens->bos), "<｜begin▁of▁sentence｜>");
  EXPECT_EQ((*tiny)->TokenBytes(tokens->dsml), "｜DSML｜");
}

TEST(SpecialTokens, NameTheFirstThatIsMissing) {
  const auto tokens = SpecialTokens::Find(*TokenizerJson().MustLoad());
  ASSERT_FALSE(tokens.ok());
  EXPECT_EQ(tokens.status().code(), StatusCode::kBadModel);
  EXPECT_THAT(tokens.status().message(), HasSubstr("<｜begin▁of▁sentence｜>"));
}

}  // namespace
}  // namespace fathom::text
