#include "json/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fathom::json {
namespace {

using testing::HasSubstr;

Value MustParse(std::string_view text) {
  auto result = Parse(text);
  EXPECT_TRUE(result.ok()) << text << ": " << result.status().message();
  return result.ok() ? *std::move(result) : Value();
}

TEST(Json, KeepsKeyOrderAndNumberLexemes) {
  const std::string text =
      R"({"z":1,"a":1.0,"m":123456789012345678901234567890,"e":1E5,"n":[null,true]})";
  EXPECT_EQ(Dump(MustParse(text)), text);
}

TEST(Json, PrintsNumbersAsPythonDoes) {
  EXPECT_EQ(
      DumpPython(MustParse(
          R"([1.0,1e10,1,1e-7,1E16,-0,-0.0,0.0001,123456.789,5e-324,1.7976931348623157e308,30000000000000000000])")),
      "[1.0, 10000000000.0, 1, 1e-07, 1e+16, 0, -0.0, 0.0001, 123456.789, 5e-324, "
      "1.7976931348623157e+308, 30000000000000000000]");
}

TEST(Json, PrintsStringsRawButForQuotesBackslashAndControls) {
  EXPECT_EQ(DumpPython(MustParse(R"({"k":"é😀\/\u2028\u007f\u0001\n\"\\"})")),
            "{\"k\": \"é😀/\u2028\x7f\\u0001\\n\\\"\\\\\"}");
}

// A number's exponent ends with the number, whatever a longer one left in memory before.
TEST(Json, PrintsAShortExponentAfterALongNumber) {
  EXPECT_EQ(DumpPython(MustParse("[1.7976931348623157e308,1e-06,-1.25e-300,1e20]")),
            "[1.7976931348623157e+308, 1e-06, -1.25e-300, 1e+20]");
}

TEST(Json, OfDuplicateKeysTheFirstPlaceAndTheLastValueStay) {
  EXPECT_EQ(Dump(MustParse(R"({"a":1,"b":2,"a":3,"c":4,"b":5})")), R"({"a":3,"b":5,"c":4})");
}

TEST(Json, RefusesDuplicateKeysWhereTheCallerAsksForUniqueOnes) {
  EXPECT_FALSE(Parse(R"({"a":1,"b":{"c":1,"c":1}})", {.unique_keys = true}).ok());
  EXPECT_TRUE(Parse(R"({"a":1,"b":{"a":1}})", {.unique_keys = true}).ok());
}

TEST(Json, RefusesWhatIsNotJson) {
  for (const char* text :
       {"", "{", "[1,]", "{\"a\":}", "nul", "1 2", "NaN", "Infinity", "\"\\ud83d\"", "\"\\udc00\"",
        "\"\xff\"", "01", "'a'", "[1] x", "// c\n1", "1e99999"}) {
    EXPECT_FALSE(Parse(text).ok()) << text;
  }
}

TEST(Json, NamesTheByteThatIsWrong) {
  EXPECT_THAT(Parse("{\"a\": bad}").status().message(), HasSubstr("at byte 6"));
}

TEST(Json, BoundsDepthAndNodes) {
  const std::string deep = std::string(10000, '[') + std::string(10000, ']');
  EXPECT_FALSE(Parse(deep).ok());
  EXPECT_TRUE(Parse(std::string(128, '[') + std::string(128, ']')).ok());
  EXPECT_THAT(Parse("[1,2,3,4]", {.max_nodes = 4}).status().message(),
              HasSubstr("too many values"));
  EXPECT_TRUE(Parse("[1,2,3,4]", {.max_nodes = 5}).ok());
}

TEST(Json, ReadsNumbersExactlyOrNotAtAll) {
  EXPECT_EQ(MustParse("-9223372036854775808").ToInt64(), INT64_MIN);
  EXPECT_EQ(MustParse("9223372036854775808").ToInt64(), std::nullopt);
  EXPECT_EQ(MustParse("1.0").ToInt64(), std::nullopt);
  EXPECT_EQ(MustParse("0.1").ToDouble(), 0.1);
  EXPECT_EQ(MustParse("1e-400").ToDouble(), 0.0);
}

}  // namespace
}  // namespace fathom::json
