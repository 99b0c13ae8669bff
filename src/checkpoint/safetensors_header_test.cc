#include "checkpoint/safetensors_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "checkpoint/tensor_list.h"

namespace fathom::checkpoint {
namespace {

using ::testing::HasSubstr;

std::string ErrorOf(const std::string& json, int64_t data_bytes) {
  const auto places = ParseSafetensorsHeader(json, data_bytes, "a.safetensors");
  EXPECT_FALSE(places.ok()) << json;
  if (places.ok()) return "";
  EXPECT_EQ(places.status().code(), StatusCode::kBadModel);
  EXPECT_THAT(places.status().message(), HasSubstr("a.safetensors"));
  return places.status().message();
}

std::string Tensor(const std::string& name, const std::string& shape, const std::string& offsets,
                   const std::string& dtype = "F32") {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
         offsets + "}";
}

TEST(SafetensorsHeader, GivesTheTensorsInTheOrderOfTheirData) {
  const std::string json = "{" + Tensor("b", "[2,3]", "[8,32]") +
                           ",\"__metadata__\":{\"format\":\"pt\"}," + Tensor("a", "[2]", "[0,8]") +
                           "}";
  const auto places = ParseSafetensorsHeader(json, 32, "a.safetensors");
  ASSERT_TRUE(places.ok()) << places.status().message();
  ASSERT_EQ(places->size(), 2u);
  EXPECT_EQ((*places)[0].info.name, "a");
  EXPECT_EQ((*places)[1].info.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ((*places)[1].info.bytes, 24);
  EXPECT_EQ((*places)[1].offset, 8 + static_cast<int64_t>(json.size()) + 8);
}

TEST(SafetensorsHeader, TakesScalarsAndEmptyTensors) {
  const auto places = ParseSafetensorsHeader(
      "{" + Tensor("scalar", "[]", "[0,4]") + "," + Tensor("none", "[0,5]", "[4,4]") + "}", 4, "a");
  ASSERT_TRUE(places.ok()) << places.status().message();
  EXPECT_EQ((*places)[0].info.bytes, 4);
  EXPECT_EQ((*places)[1].info.bytes, 0);
}

TEST(SafetensorsHeader, ReadsWhatItMakes) {
  const std::vector<TensorInfo> tensors = {MakeTensorInfo("x\"\n", FileDType::kI64, {3}),
                                           MakeTensorInfo("y", FileDType::kF8E4M3, {5, 7})};
  const std::string header = MakeSafetensorsHeader(tensors);
  EXPECT_EQ(header.size() % 8, 0u);
  const auto places = ParseSafetensorsHeader(header.substr(8), 24 + 35, "a");
  ASSERT_TRUE(places.ok()) << places.status().message();
  EXPECT_EQ((*places)[0].info.name, "x\"\n");
  EXPECT_EQ((*places)[1].offset, static_cast<int64_t>(header.size()) + 24);
}

TEST(SafetensorsHeader, RefusesImpossibleLengths) {
  for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{100'000'001}, uint64_t{1} << 63,
                                std::numeric_limits<uint64_t>::max()}) {
    const auto bytes = CheckHeaderLength(length, 1'000'000, "a.safetensors");
    ASSERT_FALSE(bytes.ok()) << length;
    EXPECT_THAT(bytes.status().message(), HasSubstr("header length is " + std::to_string(length)));
  }
  EXPECT_THAT(CheckHeaderLength(993, 1000, "a").status().message(), HasSubstr("truncated"));
  EXPECT_EQ(*CheckHeaderLength(992, 1000, "a"), 992);
}

TEST(SafetensorsHeader, RefusesOffsetsThatAreNoExactCover) {
  EXPECT_THAT(
      ErrorOf("{" + Tensor("a", "[2]", "[0,8]") + "," + Tensor("b", "[2]", "[4,12]") + "}", 12),
      HasSubstr("tensor \"b\": its data begin at byte 4, expected 8: tensors overlap"));
  EXPECT_THAT(
      ErrorOf("{" + Tensor("a", "[2]", "[0,8]") + "," + Tensor("b", "[1]", "[12,16]") + "}", 16),
      HasSubstr("leave a gap"));
  EXPECT_THAT(ErrorOf("{" + Tensor("a", "[2]", "[4,12]") + "}", 12), HasSubstr("leave a gap"));
  EXPECT_THAT(ErrorOf("{" + Tensor("a", "[2]", "[8,0]") + "}", 8),
              HasSubstr("leave the file's 8 bytes"));
  EXPECT_THAT(ErrorOf("{" + Tensor("a", "[2]", "[0,8]") + "}", 4),
              HasSubstr("leave the file's 4 bytes"));
  EXPECT_THAT(ErrorOf("{" + Tensor("a", "[2]", "[0,8]") + "}", 9),
              HasSubstr("the tensors hold 8 bytes, the file has 9"));
  EXPECT_THAT(ErrorOf("{}", 1), HasSubstr("the tensors hold 0 bytes, the file has 1"));
}

TEST(SafetensorsHeader, RefusesOffsetsThatAreNoNumbersOfBytes) {
  for (const char* offsets : {"[-4,4]", "[0]", "[0,4,8]", "[0,18446744073709551615]", "[0.0,4]",
                              "\"0,4\"", "[0,\"4\"]", "[18446744073709551612,0]"}) {
    EXPECT_THAT(ErrorOf("{" + Tensor("a", "[1]", offsets) + "}", 4),
                HasSubstr("tensor \"a\": data_offsets"));
  }
}

TEST(SafetensorsHeader, RefusesShapesThatDoNotFillTheirBytes) {
  EXPECT_THAT(ErrorOf("{" + Tensor("a", "[3]", "[0,8]") + "}", 8),
              HasSubstr("F32 of shape [3] needs 12 bytes, data_offsets hold 8"));
  EXPECT_THAT(ErrorOf("{" + Tensor("a", "[4294967296,4294967296]", "[0,8]") + "}", 8),
              HasSubstr("needs more than 2^63 bytes"));
  EXPECT_THAT(ErrorOf("{" + Tensor("a", "[4611686018427387904]", "[0,0]") + "}", 0),
              HasSubstr("2^63"));
  for (const char* shape : {"[-1]", "[1.5]", "\"2\"", "[[2]]", "[1,1,1,1,1,1,1,1,1]"}) {
    EXPECT_THAT(ErrorOf("{" + Tensor("a", shape, "[0,4]") + "}", 4),
                HasSubstr("tensor \"a\": shape"))
        << shape;
  }
}

TEST(SafetensorsHeader, RefusesUnknownAndMissingFields) {
  EXPECT_THAT(ErrorOf("{" + Tensor("a", "[1]", "[0,8]", "C64") + "}", 8),
              HasSubstr("dtype is \"C64\""));
  EXPECT_THAT(ErrorOf(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("dtype is missing"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4),
              HasSubstr("expected exactly dtype, shape and data_offsets"));
  EXPECT_THAT(ErrorOf(R"({"a":[]})", 0), HasSubstr("dtype is missing"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":{"format":1}})", 0),
              HasSubstr("expected an object of strings"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":"x"})", 0), HasSubstr("expected an object of strings"));
}

TEST(SafetensorsHeader, RefusesNamesThatStandTwice) {
  const std::string a = Tensor("a", "[1]", "[0,4]");
  EXPECT_THAT(ErrorOf("{" + a + "," + a + "}", 4), HasSubstr("stands twice"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("stands twice"));
}

TEST(SafetensorsHeader, RefusesWhatIsNoJsonObject) {
  EXPECT_THAT(ErrorOf("[]", 0), HasSubstr("no JSON object"));
  EXPECT_THAT(ErrorOf("", 0), HasSubstr("no JSON object"));
  EXPECT_THAT(ErrorOf(" {}", 0), HasSubstr("no JSON object"));
  EXPECT_THAT(ErrorOf("{\"a\":\xff}", 0), HasSubstr("invalid JSON"));
  EXPECT_THAT(ErrorOf("{\"\xff\":1}", 0), HasSubstr("invalid JSON"));
  EXPECT_THAT(ErrorOf("{}PK", 0), HasSubstr("invalid JSON"));
  EXPECT_THAT(ErrorOf(std::string("{\"a\":1}\0", 8), 0), HasSubstr("invalid JSON"));
}

TEST(SafetensorsHeader, BoundsTheNumberOfTensors) {
  std::string json = "{";
  for (int i = 0; i < 400'000; ++i) json += "\"" + std::to_string(i) + "\":[0,0,0,0,0],";
  json += "\"x\":0}";
  EXPECT_THAT(ErrorOf(json, 0), HasSubstr("too many values"));
}

}  // namespace
}  // namespace fathom::checkpoint
