// Whole models against tests/golden/model: random checkpoints of every layer and routing kind, and
// what the independent implementation (tests/oracle) makes of them.
#include <gtest/gtest.h>

#include <cmath>

#include "model/golden.h"
#include "model/golden_model.h"
#include "model/testing.h"

namespace fathom::model {
namespace {

using config::Numerics;

TEST(GoldenModel, ReadsTheRecipesAsTheReadmeSays) {
  const GoldenModel golden("mtp");
  const auto read = [&](const char* name, size_t bytes) {
    std::vector<uint8_t> out(bytes);
    EXPECT_TRUE(golden.Read(*golden.Find(name), 0, std::as_writable_bytes(std::span(out))).ok());
    return out;
  };
  EXPECT_EQ(read("layers.0.attn.wkv.weight", 4), (std::vector<uint8_t>{163, 64, 171, 55}));
  EXPECT_EQ(read("layers.0.attn.wkv.scale", 4), (std::vector<uint8_t>{122, 121, 122, 122}));
  EXPECT_EQ(read("layers.0.ffn.experts.0.w1.weight", 4),
            (std::vector<uint8_t>{143, 183, 124, 210}));
  // -1.8828125 and -1.796875 in BF16.
  EXPECT_EQ(read("embed.weight", 4), (std::vector<uint8_t>{0xf1, 0xbf, 0xe6, 0xbf}));
  const auto ids = read("layers.0.ffn.gate.tid2eid", 32);
  for (const auto& [at, id] : {std::pair(0, 0), {8, 1}, {16, 3}, {24, 0}}) {
    EXPECT_EQ(ids[static_cast<size_t>(at)], id);
  }
}

class ModelGoldenTest : public testing::TestWithParam<const char*> {
 protected:
  // The rows that the case stores, [positions * vocab].
  std::vector<float> Run(Numerics numerics, int chunk) const {
    const GoldenModel golden(GetParam());
    const GoldenFile expected(std::string("model/") + GetParam());
    TestModel model(golden.config(), numerics, 2, 1, 300, kv_cache::IndexKeyDType::kFp4, &golden);
    TestSequence sequence = model.Add(expected.Ints("tokens"));
    model.RunInChunks(sequence, chunk);
    std::vector<float> rows;
    for (const int32_t position : expected.Ints("positions")) {
      const std::vector<float>& row = sequence.logits[static_cast<size_t>(position)];
      rows.insert(rows.end(), row.begin(), row.end());
    }
    return rows;
  }
};

// Both sides take every sum in the same order and every function in the same way
// (docs/numerics.md), so nothing is left to differ.
TEST_P(ModelGoldenTest, OfficialLogitsAreTheOraclesToTheLastBit) {
  const auto expected = GoldenFile(std::string("model/") + GetParam()).Floats("official.logits");
  EXPECT_EQ(Run(Numerics::kOfficial, 300), expected);
  EXPECT_EQ(Run(Numerics::kOfficial, 7), expected) << "in chunks of 7";
}

TEST_P(ModelGoldenTest, Fp32LogitsAreTheOraclesToATinyShareOfTheirSpread) {
  const auto expected = GoldenFile(std::string("model/") + GetParam()).Floats("fp32.logits");
  const std::vector<float> actual = Run(Numerics::kFp32, 300);
  ASSERT_EQ(actual.size(), expected.size());
  double sum = 0, squares = 0;
  for (const float x : expected) {
    sum += x;
    squares += double{x} * x;
  }
  const auto n = static_cast<double>(expected.size());
  const double deviation = std::sqrt(squares / n - sum / n * (sum / n));
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], 1e-3 * deviation) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ModelGoldenTest,
                         testing::Values("window", "hashed", "sparse", "heavy", "mixed", "mtp",
                                         "dspark"),
                         [](const auto& param_info) { return std::string(param_info.param); });

}  // namespace
}  // namespace fathom::model
