#include "model/layout_roofline.h"

#include <gtest/gtest.h>

#include "checkpoint/synthetic_checkpoint.h"

namespace fathom::model {
namespace {

using config::ParallelConfig;

LayoutRoofline Flash(const ParallelConfig& parallel) {
  const auto config =
      checkpoint::ParseModelConfig(checkpoint::PresetConfigText("flash").value(), "flash");
  return LayoutRoofline::Make(*config, parallel, kv_cache::IndexKeyDType::kFp4).value();
}

// 6.263 GB at 4.55 TB/s are 1,376 us; 87 exchanges of 1.8 us.
TEST(LayoutRoofline, OfOneStreamOnTwoGpusIsBytesAndExchanges) {
  EXPECT_NEAR(Flash({2, 1, 1, false}).DecodeUs(1, 4096, H200Ceilings()), 1376 + 157, 5);
}

// One stage works while the other waits: the same bytes as one GPU.
TEST(LayoutRoofline, StagesDoNotShortenAStep) {
  const double one = Flash({}).DecodeUs(1, 4096, H200Ceilings());
  const double two = Flash({1, 1, 2, false}).DecodeUs(1, 4096, H200Ceilings());
  EXPECT_NEAR(two, one + 1.8, 0.1);
}

TEST(LayoutRoofline, ALongPromptIsTheSumOfItsSteps) {
  const LayoutRoofline two = Flash({2, 1, 1, false});
  const double once = two.PrefillUs(8192, 8192, H200Ceilings());
  EXPECT_NEAR(two.PrefillUs(8192, 2048, H200Ceilings()), once, 0.02 * once);
  EXPECT_GT(two.PrefillUs(8193, 8192, H200Ceilings()), once + 1000);  // a step of its own
}

TEST(LayoutRoofline, OutputIsBoundByDecodingOrByArithmetic) {
  const LayoutRoofline two = Flash({2, 1, 1, false});
  // Short prompts cost nothing beside the steps' bytes.
  const double step = two.DecodeUs(64, 1536, H200Ceilings());
  EXPECT_NEAR(two.OutputTokensPerSecond({64, 1024, 1024}, H200Ceilings()), 64 / step * 1e6, 20);
  // Long ones cost their own arithmetic.
  const double prompt = two.PrefillUs(65536, 65536, H200Ceilings());
  const double most = two.OutputTokensPerSecond({64, 65536, 16}, H200Ceilings());
  EXPECT_NEAR(most, 16 / prompt * 1e6, 0.1 * most);
}

TEST(LayoutRoofline, DataRanksReadTheirOwnSequencesOnly) {
  const double tensor = Flash({8, 1, 1, false}).DecodeUs(256, 1 << 20, H200Ceilings());
  const double data = Flash({1, 8, 1, true}).DecodeUs(256, 1 << 20, H200Ceilings());
  EXPECT_LT(data, 0.5 * tensor);
  EXPECT_GT(Flash({1, 8, 1, true}).DecodeUs(1, 4096, H200Ceilings()),
            2 * Flash({8, 1, 1, false}).DecodeUs(1, 4096, H200Ceilings()));
}

TEST(LayoutRoofline, CandidatesUseAllGpus) {
  EXPECT_EQ(CandidateLayouts(1).size(), 1U);
  for (const int gpus : {2, 6, 8}) {
    for (const ParallelConfig& layout : CandidateLayouts(gpus)) {
      EXPECT_EQ(layout.world_size(), gpus);
    }
  }
}

}  // namespace
}  // namespace fathom::model
