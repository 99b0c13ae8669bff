#include "kv_cache/kv_layout.h"

#include <gtest/gtest.h>

namespace fathom::kv_cache {
namespace {

using config::ModelConfig;
using config::Numerics;

// Flash: two window layers, then C4 and C128 alternating, and one MTP block.
ModelConfig FlashConfig() {
  ModelConfig config;
  config.num_layers = 43;
  config.num_draft_blocks = 1;
  config.compress_ratios = {0, 0};
  for (int i = 0; i < 20; ++i)
    config.compress_ratios.insert(config.compress_ratios.end(), {4, 128});
  config.compress_ratios.insert(config.compress_ratios.end(), {4, 0});
  return config;
}

TEST(KvLayout, FlashTakesTheKnownBytesPerToken) {
  const KvLayout fp4 = MakeKvLayout(FlashConfig(), Numerics::kOfficial, IndexKeyDType::kFp4);
  EXPECT_EQ(fp4.c4.entry_bytes, 584);
  EXPECT_EQ(fp4.index.entry_bytes, 68);
  EXPECT_EQ(fp4.c128.entry_bytes, 584);
  EXPECT_EQ(fp4.c4.num_layers, 21);
  EXPECT_EQ(fp4.c128.num_layers, 20);
  EXPECT_EQ(fp4.window.num_layers, 44);
  // 21 * (146 + 17) + 20 * 4.5625, and at most one alignment gap a kind.
  EXPECT_NEAR(fp4.bytes_per_token(), 3514.25, 3.0);
  const KvLayout fp8 = MakeKvLayout(FlashConfig(), Numerics::kOfficial, IndexKeyDType::kFp8);
  EXPECT_EQ(fp8.index.entry_bytes, 132);
  EXPECT_NEAR(fp8.bytes_per_token(), 3850.25, 3.0);
}

TEST(KvLayout, KindsFollowEachOtherWithoutOverlap) {
  for (const auto numerics : {Numerics::kOfficial, Numerics::kFp32}) {
    const KvLayout l =
        MakeKvLayout(FlashConfig(), numerics,
                     numerics == Numerics::kFp32 ? IndexKeyDType::kFp32 : IndexKeyDType::kFp4);
    EXPECT_EQ(l.c4.offset, 0);
    EXPECT_GE(l.index.offset, l.c4.layer_offset(l.c4.num_layers));
    EXPECT_GE(l.c128.offset, l.index.layer_offset(l.index.num_layers));
    EXPECT_GE(l.block_bytes, l.c128.layer_offset(l.c128.num_layers));
    EXPECT_GE(l.window_page_bytes, l.window.layer_offset(l.window.num_layers));
    EXPECT_EQ(l.block_bytes % 256, 0);
    EXPECT_EQ(l.window_page_bytes % 256, 0);
  }
}

TEST(KvLayout, Fp32RowsAreFloats) {
  const KvLayout l = MakeKvLayout(FlashConfig(), Numerics::kFp32, IndexKeyDType::kFp32);
  EXPECT_EQ(l.c4.entry_bytes, 2048);
  EXPECT_EQ(l.window.entry_bytes, 2048);
  EXPECT_EQ(l.index.entry_bytes, 512);
}

TEST(KvLayout, StateHoldsTheRowsOfEveryCompressedLayer) {
  const StateLayout s = MakeKvLayout(FlashConfig(), Numerics::kOfficial, IndexKeyDType::kFp4).state;
  EXPECT_EQ(s.c4_layer_bytes, 16 * (8192 + 2048));
  EXPECT_EQ(s.c128_layer_bytes, 64 + (3 + 2 * 16) * 512 * 4);
  EXPECT_GE(s.c128_offset, s.c4_layer_offset(21));
  EXPECT_GE(s.slot_bytes, s.c128_layer_offset(20));
}

TEST(KvLayout, FlashStaysInsideItsMemoryPlan) {
  for (const auto index_dtype : {IndexKeyDType::kFp4, IndexKeyDType::kFp8}) {
    const KvLayout l = MakeKvLayout(FlashConfig(), Numerics::kOfficial, index_dtype);
    EXPECT_LE(l.bytes_per_token(), 4000);
    // What a running request has beyond its pages.
    EXPECT_LE(l.state.slot_bytes, 5'000'000);
  }
  // As docs/kv-cache.md says.
  const KvLayout l = MakeKvLayout(FlashConfig(), Numerics::kOfficial, IndexKeyDType::kFp4);
  EXPECT_EQ(l.block_bytes, 899'840);
  EXPECT_EQ(l.state.slot_bytes, 4'875'520);
  EXPECT_EQ(l.window_page_bytes, 1'644'544);
  EXPECT_EQ(l.snapshot.bytes, 860'160);
}

TEST(KvLayout, ASnapshotHasTheLastFourRowsOfEveryC4Compressor) {
  const KvLayout l = MakeKvLayout(FlashConfig(), Numerics::kOfficial, IndexKeyDType::kFp4);
  ASSERT_EQ(l.snapshot.ranges.size(), 42u);
  EXPECT_EQ(l.snapshot.ranges[0].slot_offset, 12 * 8192);
  EXPECT_EQ(l.snapshot.ranges[0].bytes, 4 * 8192);
  EXPECT_EQ(l.snapshot.ranges[1].slot_offset, 16 * 8192 + 12 * 2048);
  EXPECT_EQ(l.snapshot.ranges[1].bytes, 4 * 2048);
  ASSERT_EQ(l.snapshot.merged_ends.size(), 20u);
  EXPECT_EQ(l.snapshot.merged_ends[3], l.state.c128_layer_offset(3));
}

TEST(KvLayout, AConfigWithoutCompressedLayersHasEmptyBlocks) {
  ModelConfig config;
  config.num_layers = 2;
  config.compress_ratios = {0, 0};
  const KvLayout l = MakeKvLayout(config, Numerics::kOfficial, IndexKeyDType::kFp4);
  EXPECT_EQ(l.block_bytes, 0);
  EXPECT_EQ(l.state.slot_bytes, 0);
  EXPECT_GT(l.window_page_bytes, 0);
}

TEST(KvLayout, KindLayerCountsLayersOfTheSameKind) {
  const ModelConfig config = FlashConfig();
  EXPECT_EQ(KindLayer(config, 2), 0);
  EXPECT_EQ(KindLayer(config, 3), 0);
  EXPECT_EQ(KindLayer(config, 42), 20);
  EXPECT_EQ(KindLayer(config, 41), 19);
}

}  // namespace
}  // namespace fathom::kv_cache
