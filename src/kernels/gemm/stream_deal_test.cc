// That clusters have all rows of all products, each once, none has much more than its share, and no
// part of the columns is empty.
#include "kernels/gemm/stream_deal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>
#include <vector>

namespace fathom::kernels {
namespace {

CudaGemmParams OneProduct(int64_t rows, int64_t cols, int64_t num_tokens) {
  CudaGemmParams params{.num_problems = 1, .num_tokens = num_tokens};
  params.problems[0].w = {.rows = rows, .cols = cols};
  return params;
}
CudaGemmParams RandomProducts(std::mt19937& random, int64_t num_tokens) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  CudaGemmParams params{.num_problems = 1 + below(kMaxGemmProblems), .num_tokens = num_tokens};
  const int64_t cols = 128 * (1 + below(130));
  for (int i = 0; i < params.num_problems; ++i) {
    GemmProblem& p = params.problems[i];
    p.w = {.rows = 1 + below(9000), .cols = cols};
    if (below(4) == 0) p.w.rows = (p.w.rows + 127) / 128 * 128, p.output = GemmOutput::kFp8Tiles;
  }
  params.few_rows = below(4) == 0;
  return params;
}

// How often each half of a product's items is dealt out: [product][half].
using Times = std::vector<std::vector<int>>;
Times TimesDealt(const CudaGemmParams& params, const StreamDeal& deal) {
  std::vector<int> times(static_cast<size_t>(2 * deal.first_item[params.num_problems]));
  for (int c = 0; c < deal.num_clusters; ++c) {
    const int first = 2 * c * deal.ahead_each;
    const int end = std::min(first + 2 * deal.ahead_each, 2 * deal.first_item[1]);
    for (int half = first; half < end; ++half) ++times[static_cast<size_t>(half)];
    for (int half = deal.begin[c]; half < deal.begin[c + 1]; ++half) {
      ++times[static_cast<size_t>(half)];
    }
  }
  Times of(static_cast<size_t>(params.num_problems));
  for (size_t i = 0; i < of.size(); ++i) {
    of[i] = {times.begin() + 2 * deal.first_item[i], times.begin() + 2 * deal.first_item[i + 1]};
  }
  return of;
}

void ExpectAllOnce(const CudaGemmParams& params, const StreamDeal& deal) {
  const Times times = TimesDealt(params, deal);
  for (size_t i = 0; i < times.size(); ++i) {
    const int64_t pairs = (params.problems[i].w.row_tiles() + 1) / 2;
    ASSERT_EQ(times[i].size(), static_cast<size_t>(2 * pairs * deal.token_tiles));
    for (const int n : times[i]) ASSERT_EQ(n, 1);
  }
}

TEST(StreamDeal, ClustersHaveAllRowsOnce) {
  std::mt19937 random(1);
  for (int n = 0; n < 300; ++n) {
    const int tokens = 1 + static_cast<int>(random() % 500),
              most = 1 + static_cast<int>(random() % 132);
    const CudaGemmParams params = RandomProducts(random, tokens);
    const StreamDeal deal = DealOut(params, 128, 1, most, /*slim=*/false);
    EXPECT_LE(deal.num_clusters, most);
    ExpectAllOnce(params, deal);
  }
}

TEST(StreamDeal, TheFirstOfNumberedProductsComesAhead) {
  std::mt19937 random(2);
  uint32_t step = 0;
  for (int n = 0; n < 100; ++n) {
    CudaGemmParams params = RandomProducts(random, 8);
    params.number.of_step = &step;
    const StreamDeal deal = DealOut(params, 8, 2, 66, /*slim=*/false);
    EXPECT_GE(deal.ahead_each * deal.num_clusters, deal.first_item[1]);
    EXPECT_EQ(deal.begin[0], 2 * deal.first_item[1]);
    ExpectAllOnce(params, deal);
  }
}

// Of FP8 output 128 columns have one scale.
TEST(StreamDeal, HalvesOfFp8OutputsStayTogether) {
  std::mt19937 random(3);
  for (int n = 0; n < 100; ++n) {
    const CudaGemmParams params = RandomProducts(random, 8);
    const StreamDeal deal = DealOut(params, 8, 1, 132, /*slim=*/false);
    for (int i = 0; i < params.num_problems; ++i) {
      if (params.problems[i].output != GemmOutput::kFp8Tiles) continue;
      for (int c = 0; c <= deal.num_clusters; ++c) {
        const int begin = deal.begin[c];
        const bool here = begin / 2 >= deal.first_item[i] && begin / 2 < deal.first_item[i + 1];
        EXPECT_TRUE(!here || begin % 2 == 0);
      }
    }
  }
}

// A cluster has at most its share and a row tile.
TEST(StreamDeal, NobodyHasMuchMoreThanItsShare) {
  for (const int64_t rows : {1024, 4096, 7168, 16384, 32768}) {
    const CudaGemmParams params = OneProduct(rows, 4096, 8);
    const StreamDeal deal = DealOut(params, 8, 1, 132, /*slim=*/false);
    const auto tiles = static_cast<int>(rows / kTileMatrixRows);
    for (int c = 0; c < deal.num_clusters; ++c) {
      EXPECT_LE(deal.begin[c + 1] - deal.begin[c], tiles / 132 + 1) << rows;
    }
  }
}

TEST(StreamDeal, SlimProductsHaveEachRowTileOnce) {
  for (const int64_t rows : {64, 64 * 65, 4096, 7168}) {
    const CudaGemmParams params = OneProduct(rows, 8192, 1);
    ASSERT_TRUE(IsSlim(params));
    const int split = SlimSplit(params);
    const StreamDeal deal = DealOut(params, 8, split, 132 / split, /*slim=*/true);
    EXPECT_EQ(deal.begin[0], 0);
    EXPECT_EQ(deal.begin[deal.num_clusters], rows / kTileMatrixRows);
    EXPECT_TRUE(std::is_sorted(deal.begin, deal.begin + deal.num_clusters + 1));
  }
}

TEST(ColumnParts, AreAPowerOfTwoAndNoneIsEmpty) {
  std::mt19937 random(4);
  for (int n = 0; n < 1000; ++n) {
    const CudaGemmParams params = RandomProducts(random, 1 + static_cast<int64_t>(random() % 64));
    const int parts = ColumnParts(params);
    EXPECT_TRUE(std::has_single_bit(static_cast<unsigned>(parts)));
    for (int i = 0; i < params.num_problems; ++i) {
      const int64_t blocks = params.problems[i].w.col_blocks();
      EXPECT_LT((parts - 1) * ((blocks + parts - 1) / parts), blocks);
    }
  }
}

// A rank's part of the columns gives sums of which the whole matrix's are the sum (gemm_cuda.h).
TEST(ColumnParts, OfHalfOfTheColumnsAreHalfAsMany) {
  CudaGemmParams params = OneProduct(4096, 8192, 8);
  const int all = ColumnParts(params);
  EXPECT_EQ(OwnParts(params), all);
  params.problems[0].w.cols = 4096, params.problems[0].w.matrix_cols = 8192;
  EXPECT_EQ(ColumnParts(params), all);
  EXPECT_EQ(OwnParts(params), all / 2);
}

}  // namespace
}  // namespace fathom::kernels
