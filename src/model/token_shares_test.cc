// Which tokens are whose, and that what ranks gather of them puts every byte in its place. Needs no
// GPU: the copies are those of collective/gather_cuda.cu, made by the host.
#include "model/token_shares.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/collective/gather_cuda.h"
#include "kernels/gemm/gemm_cuda.h"

namespace fathom::model {
namespace {

constexpr int64_t kSizes[] = {256, 257, 300, 384, 511, 512, 640, 700, 1000, 2048, 8191, 8192};

TEST(TokenShares, AreUnitsThatFollowEachOtherAndAllHaveSome) {
  for (const int ranks : {2, 3, 4, 8}) {
    for (const int64_t tokens : kSizes) {
      EXPECT_EQ(SharesTokens(tokens, ranks), tokens >= 128 * ranks);
      if (!SharesTokens(tokens, ranks)) continue;
      const kernels::RankParts shares = TokenShares(tokens, ranks);
      EXPECT_EQ(shares.begin[0], 0);
      EXPECT_EQ(shares.begin[ranks], tokens);
      EXPECT_GT(shares.least(ranks), 0) << tokens << " tokens, " << ranks << " ranks";
      EXPECT_LE(shares.most(ranks), LargestShare(tokens, ranks));
      for (int r = 0; r < ranks; ++r) EXPECT_EQ(shares.begin[r] % kShareUnit, 0);
    }
  }
  EXPECT_FALSE(SharesTokens(8192, 1));
}

TEST(TokenShares, NoStepHasALargerShareThanTheLargest) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (int64_t tokens = 1; tokens < 4000; ++tokens) {
      EXPECT_LE(TokenShares(tokens, ranks).most(ranks), LargestShare(4000, ranks));
    }
  }
}

// What a rank's products read of its share is within the rows of all tokens.
TEST(TokenShares, PaddingOfAShareIsWithinTheStepsTiles) {
  for (const int ranks : {2, 3, 4, 8}) {
    for (const int64_t tokens : kSizes) {
      if (!SharesTokens(tokens, ranks)) continue;
      const int64_t rows = kernels::PaddedTokens(tokens, /*prefill=*/true);
      const kernels::RankParts shares = TokenShares(tokens, ranks);
      for (int r = 0; r < ranks; ++r) {
        const int64_t padded = kernels::PaddedTokens(shares.count(r), /*prefill=*/true);
        EXPECT_LE(shares.begin[r] + padded, rows) << tokens << " tokens, rank " << r;
      }
      const kernels::RankParts groups = RowGroupShares(tokens, rows / 8, ranks);
      for (int r = 0; r < ranks; ++r) EXPECT_EQ(groups.begin[r] * 8, shares.begin[r]);
      EXPECT_EQ(groups.begin[ranks] * 8, rows);
    }
  }
}

// Each rank's part of the matrix to all others.
void GatherOnHost(std::vector<std::vector<uint8_t>>& memories, const kernels::GatheredMatrix& m) {
  for (size_t from = 0; from < memories.size(); ++from) {
    const kernels::GatheredMatrix::Part& part = m.of[from];
    ASSERT_EQ((part.offset | part.width | m.pitch) % 16, 0);
    for (int64_t row = 0; row < part.height; ++row) {
      const int64_t at = part.offset + row * m.pitch;
      for (size_t to = 0; to < memories.size(); ++to) {
        ASSERT_LE(static_cast<size_t>(at + part.width), memories[to].size());
        if (to == from) continue;
        std::memcpy(memories[to].data() + at, memories[from].data() + at,
                    static_cast<size_t>(part.width));
      }
    }
  }
}

uint8_t ValueOf(int64_t token, int64_t i) { return static_cast<uint8_t>(token * 37 + i * 11 + 1); }

TEST(TokenShares, RowsOfAllTokensMeet) {
  constexpr int64_t kRowBytes = 6 * 4;  // experts of a token
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t tokens : {int64_t{512}, int64_t{700}, int64_t{1001}}) {
      const int64_t rows = kernels::PaddedTokens(tokens, /*prefill=*/true);
      const kernels::RankParts shares = TokenShares(tokens, ranks);
      std::vector<std::vector<uint8_t>> memories;
      for (int r = 0; r < ranks; ++r) {
        std::vector<uint8_t>& memory = memories.emplace_back(rows * kRowBytes, uint8_t{0});
        for (int64_t t = shares.begin[r]; t < shares.begin[r + 1]; ++t) {
          for (int64_t i = 0; i < kRowBytes; ++i) memory[t * kRowBytes + i] = ValueOf(t, i);
        }
      }
      GatherOnHost(memories, kernels::GatheredRows(nullptr, 8 * kRowBytes, 8 * kRowBytes,
                                                   RowGroupShares(tokens, rows / 8, ranks), ranks));
      for (const std::vector<uint8_t>& memory : memories) {
        for (int64_t at = 0; at < tokens * kRowBytes; ++at) {
          ASSERT_EQ(memory[at], ValueOf(at / kRowBytes, at % kRowBytes)) << at;
        }
      }
    }
  }
}

TEST(TokenShares, TilesOfAllTokensMeet) {
  constexpr int64_t kColumns = 256;
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t tokens : {int64_t{512}, int64_t{700}, int64_t{1001}}) {
      const int64_t groups = kernels::PaddedTokens(tokens, /*prefill=*/true) / 8;
      const kernels::RankParts shares = TokenShares(tokens, ranks);
      std::vector<std::vector<uint8_t>> memories;
      for (int r = 0; r < ranks; ++r) {
        std::vector<uint8_t>& memory = memories.emplace_back(groups * 8 * kColumns, uint8_t{0});
        for (int64_t t = shares.begin[r]; t < shares.begin[r + 1]; ++t) {
          for (int64_t k = 0; k < kColumns; ++k) {
            memory[kernels::Fp8TileOffset(t, k, groups)] = ValueOf(t, k);
          }
        }
      }
      GatherOnHost(memories,
                   kernels::GatheredColumns(nullptr, kColumns / 128, kernels::kTileBytes,
                                            RowGroupShares(tokens, groups, ranks), ranks));
      for (const std::vector<uint8_t>& memory : memories) {
        for (int64_t t = 0; t < tokens; ++t) {
          for (int64_t k = 0; k < kColumns; ++k) {
            ASSERT_EQ(memory[kernels::Fp8TileOffset(t, k, groups)], ValueOf(t, k));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fathom::model
