#include "apps/fathom/bench/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fathom::app {
namespace {

using testing::HasSubstr;

TEST(Report, PercentilesLieBetweenTheValues) {
  EXPECT_EQ(Percentile({}, 0.5), 0);
  EXPECT_EQ(Percentile({7}, 0.9), 7);
  EXPECT_EQ(Percentile({3, 1, 2}, 0.5), 2);
  EXPECT_DOUBLE_EQ(Percentile({4, 1, 3, 2}, 0.9), 3.7);
  EXPECT_EQ(json::Dump(Percentiles({1, 1})),
            R"({"10":1.0,"25":1.0,"50":1.0,"75":1.0,"90":1.0,"99":1.0})");
}

TEST(Report, AShareNeedsAFloor) {
  EXPECT_EQ(FormatShare(3, 4), "75.0%");
  EXPECT_EQ(FormatShare(0, 4), "-");
  EXPECT_EQ(FormatShare(3, 0), "-");
}

TEST(Report, OperatorsHaveARowEachAndASum) {
  const std::vector<OperatorTime> operators = {
      {.name = "experts", .count = 2, .us = 100, .floor_us = 60, .bytes = 2e8, .flops = 1e9},
      {.name = "routing", .count = 2, .us = 20}};
  const std::string table = FormatOperators(operators);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 4);
  EXPECT_THAT(table, HasSubstr("60.0%"));
  EXPECT_THAT(table, HasSubstr("50.0%"));  // of the sum
  EXPECT_THAT(table, HasSubstr("2000"));   // GB/s
  const json::Value rows = OperatorsToJson(operators);
  EXPECT_EQ(rows.items().size(), 2u);
  EXPECT_EQ(rows.items()[0].Find("floor_us")->ToDouble(), 60);
}

TEST(Report, AFileThatCannotBeWrittenIsNamed) {
  EXPECT_TRUE(WriteJson("", json::Value::Object()).ok());
  const Status status = WriteJson("/nonexistent/x.json", json::Value::Object());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("/nonexistent/x.json"));
}

TEST(OperatorProfile, KindsOfLayersAddUp) {
  const auto merged =
      MergeLayerKinds({{.name = "attention", .layer_kind = "window", .count = 1, .us = 5},
                       {.name = "experts", .layer_kind = "window", .count = 1, .us = 9},
                       {.name = "attention", .layer_kind = "ratio 4", .count = 3, .us = 30}});
  ASSERT_EQ(merged.size(), 2u);
  EXPECT_EQ(merged[0].name, "attention");
  EXPECT_EQ(merged[0].count, 4);
  EXPECT_EQ(merged[0].us, 35);
  EXPECT_EQ(merged[0].layer_kind, "");
}

}  // namespace
}  // namespace fathom::app
