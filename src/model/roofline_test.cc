// Held to totals that were counted by hand from the published Flash sizes.
#include "model/roofline.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fathom::model {
namespace {

config::ModelConfig Flash() {
  config::ModelConfig c;
  c.vocab_size = 129280;
  c.hidden_size = 4096;
  c.num_layers = 43;
  c.num_heads = 64;
  c.q_lora_rank = 1024;
  c.o_lora_rank = 1024;
  c.o_groups = 8;
  c.compress_ratios = {0, 0};
  for (int i = 0; i < 20; ++i) c.compress_ratios.insert(c.compress_ratios.end(), {4, 128});
  c.compress_ratios.insert(c.compress_ratios.end(), {4, 0});
  c.index_num_heads = 64;
  c.index_topk = 512;
  c.num_experts = 256;
  c.num_experts_per_token = 6;
  c.moe_intermediate_size = 2048;
  c.num_hash_layers = 3;
  return c;
}

double TotalBytes(const std::vector<ProductCost>& costs) {
  double sum = 0;
  for (const ProductCost& cost : costs) sum += cost.weight_bytes + cost.kv_bytes;
  return sum;
}

TEST(Roofline, ADecodeStepOfFlashReadsElevenGigabytes) {
  const auto layout =
      kv_cache::MakeKvLayout(Flash(), config::Numerics::kOfficial, kv_cache::IndexKeyDType::kFp8);
  const auto costs = StepCosts(Flash(), layout, {.context_tokens = 4096});
  EXPECT_NEAR(TotalBytes(costs), 11.22e9, 0.03e9);
  const auto million = StepCosts(Flash(), layout, {.context_tokens = 1 << 20});
  EXPECT_NEAR(TotalBytes(million) - TotalBytes(costs), 0.819e9, 0.01e9);
}

TEST(Roofline, ExpertsOfABatchOverlap) {
  const auto layout =
      kv_cache::MakeKvLayout(Flash(), config::Numerics::kOfficial, kv_cache::IndexKeyDType::kFp8);
  const auto costs =
      StepCosts(Flash(), layout, {.num_seqs = 32, .context_tokens = 4096, .logits_rows = 32});
  EXPECT_NEAR(TotalBytes(costs), 86.4e9, 0.2e9);
}

TEST(Roofline, ExpertsThatWereCountedTakeThePlaceOfUniformRouting) {
  const auto layout =
      kv_cache::MakeKvLayout(Flash(), config::Numerics::kOfficial, kv_cache::IndexKeyDType::kFp4);
  const auto bytes = [&](double distinct) {
    return TotalBytes(StepCosts(
        Flash(), layout,
        {.num_seqs = 32, .context_tokens = 4096, .logits_rows = 32, .distinct_experts = distinct}));
  };
  const double expert_bytes = 3 * 2048 * 4096 * (0.5 + 1.0 / 32);
  EXPECT_NEAR(bytes(100) - bytes(60), 43 * 40 * expert_bytes, 1);
  const double uniform = 256 * (1 - std::pow(1 - 6.0 / 256, 32));
  EXPECT_NEAR(bytes(0), bytes(uniform), 1);
}

TEST(Roofline, SumsOfBf16ValuesArePricedAsBf16) {
  const auto layout =
      kv_cache::MakeKvLayout(Flash(), config::Numerics::kOfficial, kv_cache::IndexKeyDType::kFp4);
  for (const ProductCost& cost : StepCosts(Flash(), layout, {.tokens_per_seq = 8192})) {
    const bool mixes = cost.name == "hyper-connection mixes";
    EXPECT_EQ(cost.type == ProductType::kFp32, mixes) << cost.name;
  }
}

TEST(Roofline, APrefillTokenOfFlashCosts25GigaflopsInItsLinearLayers) {
  const auto layout =
      kv_cache::MakeKvLayout(Flash(), config::Numerics::kOfficial, kv_cache::IndexKeyDType::kFp4);
  double linear = 0;
  for (const ProductCost& cost : StepCosts(Flash(), layout, {.tokens_per_seq = 8192})) {
    if (cost.weight_bytes > 0 && cost.name != "head") linear += cost.flops;
  }
  EXPECT_NEAR(linear / 8192, 25.48e9, 0.3e9);
}

TEST(Roofline, TheIndexerCostsNothingWhileEverythingIsSelected) {
  const auto layout =
      kv_cache::MakeKvLayout(Flash(), config::Numerics::kOfficial, kv_cache::IndexKeyDType::kFp4);
  for (const ProductCost& cost : StepCosts(Flash(), layout, {.context_tokens = 2047})) {
    EXPECT_EQ(cost.name.find("indexer"), std::string::npos);
  }
}

}  // namespace
}  // namespace fathom::model
