#include "checkpoint/summary.h"

#include <gtest/gtest.h>

#include "checkpoint/test_configs.h"

namespace fathom::checkpoint {
namespace {

// The published figures: 284B parameters of which 13B are active, about 160 GB.
TEST(Summary, OfFlashHasThePublishedSize) {
  const ModelSummary s = Summarize(MustParseConfig(PresetText("flash")));
  EXPECT_NEAR(static_cast<double>(s.num_params - s.num_draft_params) / 1e9, 284, 1);
  EXPECT_NEAR(static_cast<double>(s.num_active_params) / 1e9, 13, 0.5);
  EXPECT_NEAR(static_cast<double>(s.bytes) / 1e9, 160, 1);
}

// 1.6T parameters of which 49B are active, about 865 GB.
TEST(Summary, OfProHasThePublishedSize) {
  const ModelSummary s = Summarize(MustParseConfig(PresetText("pro")));
  EXPECT_NEAR(static_cast<double>(s.num_params - s.num_draft_params) / 1e12, 1.6, 0.05);
  EXPECT_NEAR(static_cast<double>(s.num_active_params) / 1e9, 49, 1);
  EXPECT_NEAR(static_cast<double>(s.bytes) / 1e9, 865, 5);
}

TEST(Summary, OfDSparkIsLargerByItsStages) {
  const ModelSummary s = Summarize(MustParseConfig(DSparkFlashText()));
  EXPECT_NEAR(static_cast<double>(s.bytes) / 1e9, 167, 1);
}

TEST(Summary, IsTheSumOfItsParts) {
  const ModelSummary s = Summarize(MustParseConfig(PresetText("tiny")));
  int64_t tensors = 0;
  int64_t params = 0;
  int64_t bytes = 0;
  for (const PartSummary& part : s.parts) {
    tensors += part.num_tensors;
    params += part.num_params;
    bytes += part.bytes;
    if (part.name == "draft") {
      EXPECT_EQ(part.num_params, s.num_draft_params);
    }
  }
  EXPECT_EQ(tensors, s.num_tensors);
  EXPECT_EQ(params, s.num_params);
  EXPECT_EQ(bytes, s.bytes);
}

}  // namespace
}  // namespace fathom::checkpoint
