#include "text/grammar.h"

#include <gtest/gtest.h>

#include "text/grammar_testing.h"
#include "text/output_format.h"

namespace fathom::text {
namespace {

json::Value Json(std::string_view text) { return *json::Parse(text); }

std::string ContentTag(json::Value content, bool in_reasoning = false) {
  return StructuralTag({.in_reasoning = in_reasoning, .content = std::move(content), .calls = {}});
}

std::shared_ptr<const Grammar> Compiled(const std::string& format) {
  const auto grammar = CompileForTest(format);
  EXPECT_TRUE(grammar.ok()) << grammar.status().message();
  return grammar.ok() ? *grammar : nullptr;
}

TEST(Grammar, HoldsAnAnswerToAJsonSchema) {
  const auto grammar = Compiled(ContentTag(JsonSchemaFormat(Json(
      R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"}},
          "required":["name","age"]})"))));
  EXPECT_TRUE(Admits(*grammar, R"({"name": "Ada", "age": 36})"));
  EXPECT_TRUE(Admits(*grammar, "{\"name\":\"a\\n\\\"\",\n  \"age\":-1}"));
  EXPECT_EQ(AllowedPrefix(*grammar, R"({"name": "Ada"})"), 14u);              // age is required
  EXPECT_EQ(AllowedPrefix(*grammar, R"({"name": "Ada", "age": "1"})"), 23u);  // and an integer
  EXPECT_EQ(AllowedPrefix(*grammar, R"({"nome")"), 3u);
  EXPECT_EQ(AllowedPrefix(*grammar, "Sure: {"), 0u);
}

TEST(Grammar, KeepsJsonWhiteSpaceBounded) {
  const auto grammar = Compiled(ContentTag(JsonObjectFormat()));
  EXPECT_TRUE(Admits(*grammar, "{" + std::string(20, ' ') + "}"));
  EXPECT_EQ(AllowedPrefix(*grammar, "{" + std::string(50, ' ')), 21u);
}

TEST(Grammar, CountsTheCharactersOfABoundedString) {
  const auto grammar = Compiled(
      ContentTag(JsonSchemaFormat(Json(R"({"type":"string","minLength":2,"maxLength":4})"))));
  EXPECT_EQ(AllowedPrefix(*grammar, R"("a")"), 2u);
  EXPECT_TRUE(Admits(*grammar, R"("ab")"));
  EXPECT_TRUE(Admits(*grammar, R"("äöüß")"));
  EXPECT_TRUE(Admits(*grammar, R"("a\"b")"));
  EXPECT_EQ(AllowedPrefix(*grammar, R"("abcde")"), 5u);
  EXPECT_EQ(AllowedPrefix(*grammar, "\"ab\t\""), 3u);  // no raw control characters
}

TEST(Grammar, HoldsAnAnswerToARegexAChoiceOrAGrammar) {
  const auto regex = Compiled(ContentTag(RegexFormat(R"([A-Z]{2}-\d{3})")));
  EXPECT_TRUE(Admits(*regex, "AB-123"));
  EXPECT_EQ(AllowedPrefix(*regex, "AB-12x"), 5u);
  const auto choice = Compiled(ContentTag(ChoiceFormat({"yes", "no", "no way"})));
  EXPECT_TRUE(Admits(*choice, "no"));
  EXPECT_TRUE(Admits(*choice, "no way"));
  EXPECT_EQ(AllowedPrefix(*choice, "yeah"), 2u);
  const auto ebnf = Compiled(ContentTag(EbnfFormat("root ::= \"(\" root \")\" | \"x\"")));
  EXPECT_TRUE(Admits(*ebnf, "((x))"));
  EXPECT_EQ(AllowedPrefix(*ebnf, "((x)x"), 4u);
}

TEST(Grammar, LeavesReasoningFreeUntilItEnds) {
  const auto grammar = Compiled(ContentTag(ChoiceFormat({"yes"}), true));
  EXPECT_TRUE(Admits(*grammar, "Hm, {\"a\": <b> no… or</think>yes"));
  EXPECT_EQ(AllowedPrefix(*grammar, "Hm.</think>no"), 11u);
  // It cannot end, nor call, nor begin again before.
  EXPECT_EQ(AllowedPrefix(*grammar, "Hm."), 3u);
  EXPECT_EQ(AllowedPrefix(*grammar, "Hm.<｜DSML｜tool_calls>"), 24u);
  const auto constraint = grammar->NewConstraint();
  EXPECT_FALSE(Allows(*constraint, kTestEnd));
  EXPECT_TRUE(constraint->AcceptToken(259));  // </think>, one token
  EXPECT_FALSE(Allows(*constraint, 'n'));
  EXPECT_TRUE(Allows(*constraint, 'y'));
}

TEST(Grammar, TakesTokensBack) {
  const auto grammar = Compiled(ContentTag(ChoiceFormat({"abc", "abd"})));
  const auto constraint = grammar->NewConstraint();
  for (const char c : {'a', 'b', 'c'}) EXPECT_TRUE(constraint->AcceptToken(c));
  EXPECT_TRUE(constraint->AcceptToken(kTestEnd));
  EXPECT_TRUE(constraint->AcceptToken(kTestEnd));  // ends are ignored after the end
  EXPECT_FALSE(constraint->AcceptToken('c'));
  EXPECT_EQ(constraint->num_accepted(), 5);
  constraint->Rollback(3);
  EXPECT_EQ(constraint->num_accepted(), 2);
  EXPECT_TRUE(Allows(*constraint, 'd'));
  EXPECT_TRUE(constraint->AcceptToken('d'));
  EXPECT_TRUE(Allows(*constraint, kTestEnd));
}

TEST(Grammar, FillsMasksOfALargerVocabulary) {
  const auto constraint = Compiled(ContentTag(ChoiceFormat({"a"})))->NewConstraint();
  std::vector<uint32_t> mask(12, ~0u);  // the model's head has more rows than the tokenizer
  EXPECT_TRUE(constraint->FillNextTokenMask(mask));
  EXPECT_EQ(mask['a' / 32], 1u << ('a' % 32));
  for (size_t word = 9; word < mask.size(); ++word) EXPECT_EQ(mask[word], 0u);
}

TEST(Grammar, RefusesWhatCannotBeRead) {
  for (const std::string& format :
       {ContentTag(RegexFormat("*abc")), ContentTag(RegexFormat("(?<=a)b")),
        ContentTag(RegexFormat("a(")), ContentTag(EbnfFormat("root ::= other")),
        ContentTag(EbnfFormat("")), ContentTag(JsonSchemaFormat(Json(R"({"type":"text"})"))),
        ContentTag(JsonSchemaFormat(Json(R"({"$ref":"#/$defs/none"})"))), std::string("not JSON"),
        std::string("{}")}) {
    const auto grammar = CompileForTest(format);
    EXPECT_FALSE(grammar.ok()) << format;
    EXPECT_EQ(grammar.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(grammar.status().message().find('\n'), std::string::npos);
  }
}

TEST(Grammar, RefusesAFormatThatAllowsNothing) {
  const auto grammar = CompileForTest(ContentTag(JsonSchemaFormat(Json(R"({"$ref":"#"})"))));
  ASSERT_FALSE(grammar.ok());
  EXPECT_EQ(grammar.status().message(), "the output format allows no answer at all");
}

TEST(Grammar, StopsCompilingWhenItsBudgetIsSpent) {
  const std::string costly = ContentTag(RegexFormat("(a|b|c|d)*a.{0,2000}z"));
  const auto grammar = CompileForTest(costly, {.num_steps = 20'000});
  ASSERT_FALSE(grammar.ok());
  EXPECT_EQ(grammar.status().message(), "the output format is too complex to compile: simplify it");
}

}  // namespace
}  // namespace fathom::text
