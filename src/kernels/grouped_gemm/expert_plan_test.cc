// How an expert's tokens are split into tiles, and that a plan has room for all of them.
#include "kernels/grouped_gemm/expert_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

namespace fathom::kernels {
namespace {

TEST(ExpertTileSplit, TilesHoldAllTokens) {
  const ExpertTileSplit splits[] = {{.rows = 8},
                                    {.rows = kWideTileRows},
                                    {.has_narrow = true},
                                    {.rows = kWideTileRows, .has_narrow = true}};
  for (const ExpertTileSplit& split : splits) {
    for (int n = 0; n <= 1000; ++n) {
      const int wide = split.NumWide(n), narrow = split.NumNarrow(n);
      const int in_wide = std::min(n, wide * split.rows), left = n - in_wide;
      EXPECT_TRUE(wide == 0 || in_wide > (wide - 1) * split.rows) << n;  // none is empty
      EXPECT_LE(left, narrow * kNarrowTileRows) << n;
      EXPECT_TRUE(narrow == 0 || left > (narrow - 1) * kNarrowTileRows) << n;
    }
  }
}

TEST(ExpertTileSplit, WhatIsLeftGoesInANarrowTile) {
  const ExpertTileSplit split{.rows = kWideTileRows, .has_narrow = true};
  const auto tiles = [&](int n) { return std::pair(split.NumWide(n), split.NumNarrow(n)); };
  EXPECT_EQ(tiles(1), std::pair(0, 1));
  EXPECT_EQ(tiles(64), std::pair(0, 1));
  EXPECT_EQ(tiles(65), std::pair(1, 0));
  EXPECT_EQ(tiles(224), std::pair(1, 0));
  EXPECT_EQ(tiles(225), std::pair(1, 1));
  EXPECT_EQ(tiles(288), std::pair(1, 1));
  EXPECT_EQ(tiles(289), std::pair(2, 0));
}

// Whoever gets how many of them: all experts the same, one nearly all, or each one more than fills
// its tiles.
TEST(ExpertPlan, HasRoomForAllTiles) {
  constexpr int kExperts = 256, kChosen = 6;
  for (const bool has_narrow : {false, true}) {
    const ExpertPlan plan{.is_large = true, .has_narrow = has_narrow};
    const int first = has_narrow ? kLargeFp4Tokens : kLargeFp8Tokens;
    for (int tokens = first; tokens <= 8192; tokens += 61) {
      const ExpertTileSplit split = SplitOfTiles(plan, tokens, kExperts, kChosen);
      const auto tiles = [&](int n) { return split.NumWide(n) + split.NumNarrow(n); };
      const int pairs = tokens * kChosen;
      const int64_t room = MaxExpertTiles(tokens, kExperts, kChosen);
      EXPECT_LE(kExperts * tiles(pairs / kExperts), room) << tokens;
      EXPECT_LE((kExperts - 1) * tiles(1) + tiles(std::min(tokens, pairs - kExperts + 1)), room)
          << tokens;
      for (const int each : {1, 9, 65, 129, 225, 289, 353}) {
        EXPECT_LE(std::min(kExperts, pairs / each) * tiles(each), room) << tokens << " " << each;
      }
    }
  }
}

}  // namespace
}  // namespace fathom::kernels
