// Attention against plain loops in double precision, at the edges of the window, the pages and the
// chunks.
#include "kernels/sparse_attention/sparse_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

constexpr int kDim = 512, kRope = 64, kHeads = 3, kWindow = 128, kPage = 64;

struct Case {
  int num_computed;
  int num_tokens;
  int ratio;
};

class SparseAttentionTest : public testing::TestWithParam<Case> {};

// One sequence of fp32 numerics whose entry at position p is row p of `kv`.
TEST_P(SparseAttentionTest, IsTheFormula) {
  const auto [computed, tokens, ratio] = GetParam();
  const int end = computed + tokens;
  const auto kv = RandomFloats(end * kDim, 1), compressed = RandomFloats((end / 4 + 1) * kDim, 2);
  const auto q = RandomFloats(tokens * kHeads * kDim, 3), sink = RandomFloats(kHeads, 4);
  const int num_pages = end / kPage + 1, blocks = end / 16 + 1;
  std::vector<std::byte> window_pool(static_cast<size_t>(num_pages * kPage * kDim * 4));
  std::vector<std::byte> block_pool(static_cast<size_t>(blocks * 4 * kDim * 4));
  const PagedEntries pages{window_pool.data(), kPage * kDim * 4, 0, kPage, kDim * 4, 0};
  const PagedEntries entries{block_pool.data(), 4 * kDim * 4, 0, 4, kDim * 4, 0};
  const int first_page = std::max(0, computed - kWindow + 1) / kPage;
  std::vector<int32_t> window_table, block_table, cu{0, tokens}, start{computed}, first{first_page};
  for (int p = first_page; p < num_pages; ++p) window_table.push_back(num_pages - 1 - p);
  for (int b = 0; b < blocks; ++b) block_table.push_back(blocks - 1 - b);
  for (int p = first_page * kPage; p < computed; ++p) {
    StoreKvEntry<float>(kv.data() + p * kDim, kDim, kRope,
                        pages.At(window_table[p / kPage - first_page], p % kPage));
  }
  for (int j = 0; j < end / 4; ++j) {
    StoreKvEntry<float>(compressed.data() + j * kDim, kDim, kRope,
                        entries.At(block_table[j / 4], j % 4));
  }
  std::vector<int32_t> seq(tokens, 0), positions, selected(tokens * 8), counts(tokens);
  for (int t = 0; t < tokens; ++t) {
    positions.push_back(computed + t);
    // Every third visible entry, at most 8.
    for (int j = 0; j < (computed + t + 1) / 4 && counts[t] < 8; j += 3)
      selected[t * 8 + counts[t]++] = j;
  }
  const BatchView batch{.cu_seqlens_q = cu,
                        .num_computed = start,
                        .token_seq = seq,
                        .positions = positions,
                        .block_tables = block_table,
                        .max_blocks = blocks,
                        .window_tables = window_table,
                        .max_window_pages = static_cast<int>(window_table.size()),
                        .first_window_page = first};
  const auto device = device::MakeCpuDevice(2);
  const auto stream = std::move(device->MakeStream().value());
  std::vector<float> fresh(kv.begin() + computed * kDim, kv.end()), o = q;
  Launch(WindowStoreParams<float>{.batch = batch,
                                  .kv = fresh.data(),
                                  .head_dim = kDim,
                                  .rope_dim = kRope,
                                  .window = kWindow,
                                  .max_rollback = 8,
                                  .pages = pages},
         *stream);
  const int64_t max_keys = kWindow + end / 4 + 8;
  std::vector<float> scratch(
      static_cast<size_t>(2 * AttentionScratchFloats(kHeads, kDim, max_keys)));
  const float scale = 1 / std::sqrt(512.0f);
  Launch(SparseAttentionParams<float>{.batch = batch,
                                      .q = o.data(),
                                      .num_heads = kHeads,
                                      .head_dim = kDim,
                                      .rope_dim = kRope,
                                      .window = kWindow,
                                      .scale = scale,
                                      .sink = sink.data(),
                                      .fresh = fresh.data(),
                                      .pages = pages,
                                      .ratio = ratio,
                                      .compressed = entries,
                                      .selected = selected.data(),
                                      .counts = counts.data(),
                                      .topk = 8,
                                      .scratch = scratch.data(),
                                      .max_keys = max_keys},
         *stream);
  for (int t = 0; t < tokens; ++t) {
    std::vector<const float*> keys;
    for (int p = std::max(0, computed + t - kWindow + 1); p <= computed + t; ++p) {
      keys.push_back(kv.data() + p * kDim);
    }
    const int all = ratio == 128 ? (computed + t + 1) / 128 : 0;
    for (int j = 0; j < all; ++j) keys.push_back(compressed.data() + j * kDim);
    for (int i = 0; ratio == 4 && i < counts[t]; ++i) {
      keys.push_back(compressed.data() + selected[t * 8 + i] * kDim);
    }
    for (int h = 0; h < kHeads; ++h) {
      const float* query = q.data() + (t * kHeads + h) * kDim;
      std::vector<double> expected(kDim);
      double l = std::exp(double{sink[h]});
      for (const float* key : keys) {
        double s = 0;
        for (int i = 0; i < kDim; ++i) s += double{query[i]} * key[i];
        const double p = std::exp(s * scale);
        l += p;
        for (int i = 0; i < kDim; ++i) expected[i] += p * key[i];
      }
      for (int i = 0; i < kDim; ++i) {
        ASSERT_NEAR(o[(t * kHeads + h) * kDim + i], expected[i] / l, 1e-5)
            << t << ' ' << h << ' ' << i;
      }
    }
  }
  // A later step finds the positions it can reach in the pages.
  for (int p = std::max(computed, end - 8 - kWindow + 1); p < end; ++p) {
    std::vector<float> stored(kDim);
    LoadKvEntry<float>(pages.At(window_table[p / kPage - first_page], p % kPage), kDim, kRope,
                       stored.data());
    ASSERT_TRUE(std::equal(stored.begin(), stored.end(), kv.begin() + p * kDim)) << p;
  }
}

INSTANTIATE_TEST_SUITE_P(Edges, SparseAttentionTest,
                         testing::Values(Case{0, 1, 0}, Case{0, 1, 4}, Case{0, 5, 4},
                                         Case{127, 1, 128}, Case{128, 1, 128}, Case{63, 2, 4},
                                         Case{100, 200, 4}, Case{300, 150, 128}, Case{255, 2, 0},
                                         Case{513, 1, 4}));

}  // namespace
}  // namespace fathom::kernels
