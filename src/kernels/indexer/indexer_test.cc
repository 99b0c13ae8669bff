#include "kernels/indexer/indexer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/indexer/index_vector.h"
#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

constexpr int kDim = 128, kHeads = 3, kTopk = 8;

class IndexerTest : public testing::Test {
 protected:
  // Selects for one token at `position` among entries with these keys; weights are `projected` * 1.
  std::vector<int32_t> Select(const std::vector<float>& keys, const std::vector<float>& q,
                              const std::vector<float>& projected, int32_t position) {
    const auto device = device::MakeCpuDevice(2);
    const auto stream = std::move(device->MakeStream().value());
    // Pages of 4 entries, in reverse order.
    const int num_entries = static_cast<int>(keys.size()) / kDim, pages = (num_entries + 3) / 4;
    std::vector<std::byte> pool(static_cast<size_t>(pages * 4 * kDim * 4));
    const PagedEntries view{pool.data(), 4 * kDim * 4, 0, 4, kDim * 4, 0};
    std::vector<int32_t> table;
    for (int p = 0; p < pages; ++p) table.push_back(pages - 1 - p);
    for (int j = 0; j < num_entries; ++j) {
      StoreIndexKey(keys.data() + j * kDim, kDim, config::IndexKeyDType::kFp32,
                    view.At(table[static_cast<size_t>(j / 4)], j % 4));
    }
    const std::vector<int32_t> seq{0}, positions{position};
    std::vector<uint64_t> scratch(2 * 512);
    std::vector<int32_t> selected(kTopk), count(1);
    Launch(IndexSelectParams<float>{.batch = {.token_seq = seq,
                                              .positions = positions,
                                              .block_tables = table,
                                              .max_blocks = pages},
                                    .q = q.data(),
                                    .projected = projected.data(),
                                    .weight_scale = 1,
                                    .num_heads = kHeads,
                                    .dim = kDim,
                                    .topk = kTopk,
                                    .keys = view,
                                    .dtype = config::IndexKeyDType::kFp32,
                                    .scratch = scratch.data(),
                                    .max_entries = 512,
                                    .selected = selected.data(),
                                    .counts = count.data()},
           *stream);
    selected.resize(static_cast<size_t>(count[0]));
    return selected;
  }
};

TEST_F(IndexerTest, TakesAllWhenThereAreNoMoreThanTopk) {
  const auto keys = RandomFloats(kTopk * kDim, 1), q = RandomFloats(kHeads * kDim, 2);
  EXPECT_TRUE(Select(keys, q, {1, 1, 1}, 2).empty());
  EXPECT_EQ(Select(keys, q, {1, 1, 1}, 3), (std::vector<int32_t>{0}));
  EXPECT_EQ(Select(keys, q, {1, 1, 1}, 4 * kTopk - 1),
            (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST_F(IndexerTest, TakesTheBestVisibleInAscendingOrder) {
  for (const int visible : {9, 31, 32, 33, 100}) {
    const auto keys = RandomFloats(110 * kDim, 3), q = RandomFloats(kHeads * kDim, 4);
    const std::vector<float> weights{0.5f, -1.0f, 2.0f};
    std::vector<std::pair<double, int32_t>> scores;
    for (int32_t j = 0; j < visible; ++j) {
      double score = 0;
      for (int h = 0; h < kHeads; ++h) {
        double dot = 0;
        for (int i = 0; i < kDim; ++i) dot += double{q[h * kDim + i]} * keys[j * kDim + i];
        score += std::max(dot, 0.0) * weights[h];
      }
      scores.emplace_back(-score, j);
    }
    std::sort(scores.begin(), scores.end());
    std::vector<int32_t> expected;
    for (int i = 0; i < kTopk; ++i) expected.push_back(scores[i].second);
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(Select(keys, q, weights, 4 * visible - 1), expected) << visible;
    EXPECT_EQ(Select(keys, q, weights, 4 * visible + 2), expected)
        << "three tokens complete nothing";
  }
}

TEST_F(IndexerTest, EqualScoresGoToTheLowerIndex) {
  const std::vector<float> keys(40 * kDim, 0.0f), q(kHeads * kDim, 1.0f);
  EXPECT_EQ(Select(keys, q, {1, -1, 1}, 159), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST_F(IndexerTest, NotANumberIsStillAChoiceOfVisibleEntries) {
  auto keys = RandomFloats(40 * kDim, 5);
  std::fill_n(keys.begin() + 7 * kDim, 20 * kDim, NAN);
  const auto selected = Select(keys, RandomFloats(kHeads * kDim, 6), {1, 1, 1}, 159);
  ASSERT_EQ(selected.size(), static_cast<size_t>(kTopk));
  EXPECT_TRUE(std::is_sorted(selected.begin(), selected.end()));
  EXPECT_EQ(std::adjacent_find(selected.begin(), selected.end()), selected.end());
  EXPECT_LT(selected.back(), 40);
}

TEST(IndexVector, TheRotationIsTheHadamardMatrix) {
  for (const int dim : {32, 128}) {
    const auto x = RandomFloats(dim, 7);
    auto y = x;
    RotateIndexVector<BFloat16>(y.data(), dim);
    for (int a = 0; a < dim; ++a) {
      double sum = 0;
      for (int b = 0; b < dim; ++b) sum += __builtin_popcount(a & b) % 2 == 0 ? x[b] : -x[b];
      sum /= std::sqrt(dim);
      EXPECT_NEAR(y[a], sum, std::fabs(sum) * 0x1p-8 + 1e-5);
    }
  }
}

}  // namespace
}  // namespace fathom::kernels
