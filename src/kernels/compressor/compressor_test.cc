// The compressor's poolings against double precision; entries and state over chunks, for both
// ratios.
#include "kernels/compressor/compressor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernels/compressor/pooling.h"
#include "kernels/testing.h"

namespace fathom::kernels {
namespace {

constexpr int kDim = 64, kRope = 64, kRows = 16;

// One sequence in fp32 numerics.
struct Sequence {
  explicit Sequence(int ratio_in)
      : ratio(ratio_in),
        width(ratio == 4 ? 2 * kDim : kDim),
        pool(static_cast<size_t>(256 * kDim * 4)),
        state(static_cast<size_t>(kC128StateHeaderBytes + (3 + kRows * 4) * kDim * 4),
              std::byte{0x77}) {}

  // Computes tokens [from, to) of c and z.
  void Run(const std::vector<float>& c, const std::vector<float>& z, const std::vector<float>& ape,
           int from, int to) {
    const auto device = device::MakeCpuDevice(2);
    const auto stream = std::move(device->MakeStream().value());
    const std::vector<int32_t> cu{0, to - from}, computed{from}, zero{0};
    const std::vector<BFloat16> norm(kDim, BFloat16(1.0f));
    const std::vector<float> no_rope(kRope / 2, 0.0f);
    const BatchView batch{.cu_seqlens_q = cu,
                          .num_computed = computed,
                          .block_tables = zero,
                          .max_blocks = 1,
                          .state_slots = zero};
    std::vector<CompressedEntry> entries(static_cast<size_t>((to - from) / ratio + 1));
    entries.resize(static_cast<size_t>(PlanCompressedEntries(batch, ratio, entries)));
    Launch(CompressorParams<float>{.batch = batch,
                                   .entries = entries,
                                   .ratio = ratio,
                                   .dim = kDim,
                                   .rope_dim = kRope,
                                   .c = c.data() + from * width,
                                   .z = z.data() + from * width,
                                   .ape = ape.data(),
                                   .norm_weight = norm.data(),
                                   .norm_eps = 0,
                                   .frequencies = no_rope,
                                   .cache = {pool.data(), 0, 0, 256, kDim * 4, 0},
                                   .state = state.data(),
                                   .ring_rows = kRows,
                                   .max_rollback = 8},
           *stream);
  }

  int ratio, width;
  std::vector<std::byte> pool, state;
};

class CompressorTest : public testing::TestWithParam<int> {
 protected:
  static constexpr int kTokens = 400;
  CompressorTest()
      : width_(GetParam() == 4 ? 2 * kDim : kDim),
        c_(RandomFloats(kTokens * width_, 1)),
        z_(RandomFloats(kTokens * width_, 2)),
        ape_(RandomFloats(GetParam() * width_, 3)) {}

  int width_;
  std::vector<float> c_, z_, ape_;
};

TEST_P(CompressorTest, EntriesAreTheNormedSoftmaxPools) {
  const int ratio = GetParam();
  Sequence sequence(ratio);
  sequence.Run(c_, z_, ape_, 0, kTokens);
  for (int j = 0; j < kTokens / ratio; ++j) {
    std::vector<double> pooled(kDim);
    double squares = 0;
    for (int i = 0; i < kDim; ++i) {
      double sum = 0, l = 0;
      for (int p = ratio == 4 ? std::max(0, 4 * j - 4) : 128 * j; p < ratio * (j + 1); ++p) {
        const int column = p * width_ + i + (ratio == 4 && p >= 4 * j ? kDim : 0);
        const double e = std::exp(double{z_[column]} + ape_[column % (ratio * width_)]);
        l += e;
        sum += e * c_[column];
      }
      pooled[i] = sum / l;
      squares += pooled[i] * pooled[i];
    }
    float entry[kDim];
    std::memcpy(entry, sequence.pool.data() + j * kDim * 4, sizeof(entry));
    for (int i = 0; i < kDim; ++i) {
      EXPECT_NEAR(entry[i], pooled[i] / std::sqrt(squares / kDim), 1e-4) << j << ' ' << i;
    }
  }
}

TEST_P(CompressorTest, ChunksGiveTheSameEntriesAndState) {
  Sequence whole(GetParam());
  whole.Run(c_, z_, ape_, 0, kTokens);
  for (const int chunk : {1, 3, 7, 64, 129}) {
    Sequence chunked(GetParam());
    for (int from = 0; from < kTokens; from += chunk) {
      chunked.Run(c_, z_, ape_, from, std::min(from + chunk, kTokens));
    }
    EXPECT_EQ(chunked.pool, whole.pool) << chunk;
    if (chunk < kRows && GetParam() == 128) continue;  // older rows of the ring differ, unused
    EXPECT_EQ(chunked.state, whole.state) << chunk;
  }
}

TEST_P(CompressorTest, RolledBackTokensAreForgotten) {
  Sequence expected(GetParam()), drafted(GetParam());
  expected.Run(c_, z_, ape_, 0, kTokens - 8);
  const std::vector<float> wrong(c_.size(), 9.0f);
  for (int n = 0; n < kTokens - 8; ++n) {
    drafted.Run(wrong, wrong, ape_, n, n + 8);  // then taken back
    drafted.Run(c_, z_, ape_, n, n + 1);
  }
  const size_t bytes = static_cast<size_t>((kTokens - 8) / GetParam() * kDim * 4);
  EXPECT_EQ(std::memcmp(drafted.pool.data(), expected.pool.data(), bytes), 0);
}

INSTANTIATE_TEST_SUITE_P(Ratios, CompressorTest, testing::Values(4, 128));

TEST(OnlineSoftmax, LargeScoresDoNotOverflow) {
  float m[1], l[1], acc[1];
  OnlineSoftmax sum{m, l, acc};
  sum.Clear(1);
  const float c[] = {1, 2, 4}, z[] = {-1e30f, 1e30f, 1e30f};
  for (int i = 0; i < 3; ++i) sum.Merge({c + i, z + i}, 1);
  EXPECT_EQ(acc[0] / l[0], 3.0f);
}

}  // namespace
}  // namespace fathom::kernels
