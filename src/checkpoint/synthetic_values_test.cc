#include "checkpoint/synthetic_values.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/float_types.h"
#include "checkpoint/tensor_list.h"
#include "checkpoint/test_configs.h"

namespace fathom::checkpoint {
namespace {

std::vector<std::byte> ReadAll(const TensorSource& source, const std::string& name) {
  const TensorInfo* tensor = source.Find(name);
  EXPECT_NE(tensor, nullptr) << name;
  std::vector<std::byte> bytes(static_cast<size_t>(tensor->bytes));
  EXPECT_TRUE(source.Read(*tensor, 0, bytes).ok());
  return bytes;
}

struct Moments {
  double mean = 0;
  double std = 0;
};

Moments MomentsOf(const std::vector<float>& values) {
  double sum = 0;
  double squares = 0;
  for (const float v : values) {
    sum += v;
    squares += double{v} * v;
  }
  const auto n = static_cast<double>(values.size());
  return {sum / n, std::sqrt(squares / n - sum / n * sum / n)};
}

// The dequantized values of X.weight and X.scale, and plain values of any other tensor.
std::vector<float> Values(const TensorSource& source, const std::string& name) {
  const TensorInfo& tensor = *source.Find(name);
  const std::vector<std::byte> bytes = ReadAll(source, name);
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  std::vector<float> values;
  if (tensor.dtype == FileDType::kF32) {
    values.resize(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  if (tensor.dtype == FileDType::kBF16) {
    for (size_t i = 0; i < bytes.size(); i += 2) {
      values.push_back(
          std::bit_cast<float>((uint32_t{byte(i + 1)} << 24) | (uint32_t{byte(i)} << 16)));
    }
    return values;
  }
  const bool fp4 = tensor.dtype == FileDType::kI8;
  const std::string scale_name = name.substr(0, name.size() - 6) + "scale";
  const std::vector<std::byte> scales = ReadAll(source, scale_name);
  const auto columns = static_cast<size_t>(tensor.shape[1]) * (fp4 ? 2 : 1);
  const auto scale_columns = static_cast<size_t>(source.Find(scale_name)->shape[1]);
  for (size_t r = 0; r < static_cast<size_t>(tensor.shape[0]); ++r) {
    for (size_t c = 0; c < columns; ++c) {
      const size_t scale_at = fp4 ? r * scale_columns + c / 32 : r / 128 * scale_columns + c / 128;
      const size_t at = r * columns + c;
      const float value =
          fp4 ? Float4ToFloat(byte(at / 2) >> (at % 2 * 4) & 15) : Float8ToFloat(byte(at));
      values.push_back(value * Ue8m0ToFloat(static_cast<uint8_t>(scales[scale_at])));
    }
  }
  return values;
}

class SyntheticValuesTest : public ::testing::Test {
 protected:
  std::unique_ptr<TensorSource> source_ =
      MakeSyntheticSource(MustParseConfig(PresetText("tiny")), 1);
};

TEST_F(SyntheticValuesTest, AreTheSameForEveryReadRange) {
  for (const char* name : {"embed.weight", "layers.0.attn.wq_b.weight", "layers.0.attn.wq_b.scale",
                           "layers.0.hc_attn_base", "layers.0.ffn.experts.3.w2.weight",
                           "layers.0.ffn.experts.3.w2.scale", "layers.1.ffn.gate.tid2eid",
                           "hc_head_scale", "layers.2.attn.compressor.ape"}) {
    const std::vector<std::byte> whole = ReadAll(*source_, name);
    const TensorInfo& tensor = *source_->Find(name);
    size_t piece = 1;
    for (size_t at = 0; at < whole.size(); at += piece, piece = piece % 4999 + 7) {
      piece = std::min(piece, whole.size() - at);
      std::vector<std::byte> part(piece);
      ASSERT_TRUE(source_->Read(tensor, static_cast<int64_t>(at), part).ok());
      ASSERT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + static_cast<int64_t>(at)))
          << name << " at " << at;
    }
  }
}

// Pinned: files made with one release can be compared with those of another.
TEST_F(SyntheticValuesTest, DoNotChangeBetweenReleases) {
  const auto first_word = [&](const char* name) {
    uint64_t word = 0;
    const std::vector<std::byte> bytes = ReadAll(*source_, name);
    std::memcpy(&word, bytes.data(), 8);
    return word;
  };
  EXPECT_EQ(first_word("embed.weight"), 13785588595081985861u);
  EXPECT_EQ(first_word("layers.0.hc_attn_base"), 13808787474419267972u);
  EXPECT_EQ(first_word("layers.0.attn.wkv.weight"), 8173040400083220594u);
  EXPECT_EQ(first_word("layers.0.ffn.experts.0.w1.weight"), 4952325415497179532u);
  EXPECT_EQ(first_word("layers.0.ffn.experts.0.w1.scale"), 8825501086245354106u);
  EXPECT_EQ(first_word("layers.0.ffn.gate.tid2eid"), 2u);
}

TEST_F(SyntheticValuesTest, DifferBetweenSeedsAndTensors) {
  const auto other = MakeSyntheticSource(MustParseConfig(PresetText("tiny")), 2);
  EXPECT_NE(ReadAll(*source_, "embed.weight"), ReadAll(*other, "embed.weight"));
  EXPECT_NE(ReadAll(*source_, "layers.0.ffn.experts.0.w1.weight"),
            ReadAll(*source_, "layers.0.ffn.experts.1.w1.weight"));
}

TEST_F(SyntheticValuesTest, HaveTheStandardDeviationOfTheirFanIn) {
  const std::map<std::string, double> expected = {
      {"embed.weight", 1.0},
      {"head.weight", 1 / std::sqrt(256.0)},
      {"layers.0.attn.wq_b.weight", 1 / std::sqrt(128.0)},
      {"layers.0.attn.wo_a.weight", 2 / std::sqrt(1024.0)},
      {"layers.0.ffn.experts.0.w1.weight", 1 / std::sqrt(256.0)},
      {"layers.0.ffn.experts.0.w2.weight", 2 / std::sqrt(128.0)},
      {"layers.0.hc_attn_fn", 1 / std::sqrt(1024.0)},
  };
  for (const auto& [name, std] : expected) {
    const std::vector<float> values = Values(*source_, name);
    const Moments found = MomentsOf(values);
    // Scales are shared by blocks, so the tensor's own deviation varies with the few that were
    // drawn.
    const double tolerance = name.find("attn.w") != std::string::npos ? 0.25 : 0.02;
    EXPECT_NEAR(found.std / std, 1, tolerance) << name;
    EXPECT_NEAR(found.mean / std, 0, 5 / std::sqrt(static_cast<double>(values.size()))) << name;
    for (const float v : values) ASSERT_TRUE(std::isfinite(v)) << name;
  }
}

TEST_F(SyntheticValuesTest, MixHyperConnectionsNearTheIdentity) {
  const std::vector<float> base = Values(*source_, "layers.0.hc_attn_base");
  for (size_t i = 0; i < 24; ++i) {
    const double expected = i < 4 ? -std::log(3.0) : i >= 8 && (i - 8) % 5 == 0 ? 3 : 0;
    EXPECT_NEAR(base[i], expected, 0.4) << i;
  }
}

TEST_F(SyntheticValuesTest, UseEveryFp4CodeAndNoNanFp8Code) {
  std::map<int, int> fp4;
  for (const std::byte b : ReadAll(*source_, "layers.0.ffn.experts.0.w1.weight")) {
    fp4[static_cast<int>(b) & 15] += 1;
    fp4[static_cast<int>(b) >> 4] += 1;
  }
  EXPECT_EQ(fp4.size(), 16u);
  std::set<int> fp8;
  for (const std::byte b : ReadAll(*source_, "layers.0.attn.wq_b.weight"))
    fp8.insert(static_cast<int>(b));
  EXPECT_GT(fp8.size(), 100u);
  EXPECT_FALSE(fp8.contains(0x7f) || fp8.contains(0xff));
}

TEST_F(SyntheticValuesTest, RouteHashedTokensToDistinctExpertsUniformly) {
  const auto config = MustParseConfig(
      WithFields("tiny", {{"n_routed_experts", "11"}, {"num_experts_per_tok", "3"}}));
  const auto source = MakeSyntheticSource(config, 5);
  const std::vector<std::byte> bytes = ReadAll(*source, "layers.0.ffn.gate.tid2eid");
  std::vector<int64_t> ids(bytes.size() / 8);
  std::memcpy(ids.data(), bytes.data(), bytes.size());
  std::vector<int> counts(11);
  for (size_t row = 0; row < ids.size(); row += 3) {
    EXPECT_EQ((std::set<int64_t>{ids[row], ids[row + 1], ids[row + 2]}.size()), 3u);
    for (size_t i = row; i < row + 3; ++i) {
      ASSERT_GE(ids[i], 0);
      ASSERT_LT(ids[i], 11);
      counts[static_cast<size_t>(ids[i])] += 1;
    }
  }
  const double mean = static_cast<double>(ids.size()) / 11;
  for (const int count : counts) EXPECT_NEAR(count, mean, 5 * std::sqrt(mean));
}

}  // namespace
}  // namespace fathom::checkpoint
