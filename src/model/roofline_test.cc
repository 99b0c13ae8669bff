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

RankShare LastRank(const config::ModelConfig& config, const config::ParallelConfig& parallel,
                   int stage = 0) {
  return MakeRankShare(config, parallel,
                       {parallel.tensor_parallel_size - 1, parallel.data_parallel_size - 1, stage})
      .value();
}

kv_cache::KvLayout LayoutOf(const RankShare& share) {
  return kv_cache::MakeKvLayout(share.shard.config, config::Numerics::kOfficial,
                                kv_cache::IndexKeyDType::kFp4);
}

double RankBytes(const RankShare& share, const StepShape& shape) {
  return TotalBytes(StepCosts(share, LayoutOf(share), shape));
}

const ProductCost& Find(const std::vector<ProductCost>& costs, const std::string& name) {
  for (const ProductCost& cost : costs) {
    if (cost.name == name) return cost;
  }
  ADD_FAILURE() << name;
  return costs[0];
}

// By hand, in GB: split 4.329 + 1.082 + 1.059 + 3.449; replicated 0.271 + 0.608 + 0.187 + 0.090 +
// 0.135, and 0.012 of the KV cache.
TEST(Roofline, ATensorRankReadsItsPartAndAllThatIsReplicated) {
  const StepShape shape{.context_tokens = 4096};
  EXPECT_NEAR(RankBytes(LastRank(Flash(), {2, 1, 1, false}), shape), 6.263e9, 0.01e9);
  EXPECT_NEAR(RankBytes(LastRank(Flash(), {4, 1, 1, false}), shape), 3.783e9, 0.01e9);
}

TEST(Roofline, StagesTogetherAreTheModel) {
  const StepShape shape{.num_seqs = 3, .context_tokens = 9000, .logits_rows = 3};
  double bytes = 0;
  for (int stage = 0; stage < 3; ++stage) {
    bytes += RankBytes(LastRank(Flash(), {1, 1, 3, false}, stage), shape);
  }
  EXPECT_NEAR(bytes, RankBytes(LastRank(Flash(), {}), shape), 1);
}

TEST(Roofline, OfRanksWithWholeExpertsTheBusiestCounts) {
  EXPECT_NEAR(ExpectedLargest(1), 0, 1e-9);
  EXPECT_NEAR(ExpectedLargest(2), 0.56419, 1e-4);
  EXPECT_NEAR(ExpectedLargest(4), 1.02938, 1e-4);
  EXPECT_NEAR(ExpectedLargest(8), 1.42360, 1e-4);
  // Six experts over two ranks: 3 and 3 in 31% of cases, so the busier has 3.97 in the mean.
  const RankShare share = LastRank(Flash(), {2, 1, 1, true});
  const ProductCost experts = Find(StepCosts(share, LayoutOf(share), {}), "routed experts");
  const double expert_bytes = 3 * 2048 * 4096 * (0.5 + 1.0 / 32);
  EXPECT_NEAR(experts.weight_bytes / (43 * expert_bytes), 3.97, 0.02);
  // Cut experts are shared out evenly.
  const RankShare cut = LastRank(Flash(), {2, 1, 1, false});
  EXPECT_NEAR(Find(StepCosts(cut, LayoutOf(cut), {}), "routed experts").weight_bytes,
              43 * 3 * expert_bytes, 1);
}

TEST(Roofline, ExpertsOfADataRankSeeTheTokensOfAll) {
  const RankShare share = LastRank(Flash(), {1, 4, 1, false});
  const auto alone = StepCosts(share, LayoutOf(share), {.num_seqs = 8});
  const auto together = StepCosts(share, LayoutOf(share), {.num_seqs = 8, .other_tokens = 24});
  // 64 experts get 12 and 48 pairs in the mean, those of the busiest of four ranks more.
  const auto busiest = [](double mean) { return mean + std::sqrt(mean * 250 / 256) * 1.02938; };
  EXPECT_NEAR(Find(together, "routed experts").flops / Find(alone, "routed experts").flops,
              busiest(48) / busiest(12), 1e-4);
  EXPECT_EQ(Find(together, "wq_b").flops, Find(alone, "wq_b").flops);
  // Heads, head and shared expert are whole on every data rank.
  const auto whole = StepCosts(LastRank(Flash(), {}), LayoutOf(share), {.num_seqs = 8});
  for (const char* name : {"wq_b", "wo_b", "head", "shared expert"}) {
    EXPECT_EQ(Find(together, name).weight_bytes, Find(whole, name).weight_bytes) << name;
  }
}

TEST(Roofline, BesideWholeExpertsATensorRankReadsAllOfTheSharedOne) {
  const auto shared = [](const config::ParallelConfig& parallel) {
    const RankShare share = LastRank(Flash(), parallel);
    return Find(StepCosts(share, LayoutOf(share), {}), "shared expert").weight_bytes;
  };
  EXPECT_NEAR(shared({2, 1, 1, false}), shared({}) / 2, 1);
  for (const config::ParallelConfig& parallel :
       {config::ParallelConfig{2, 1, 1, true}, {2, 2, 1, false}}) {
    EXPECT_EQ(shared(parallel), shared({}));
  }
}

TEST(Roofline, TensorRanksExchangeTwoSumsALayerAndTheLogits) {
  EXPECT_TRUE(StepExchanges(LastRank(Flash(), {}), {}).empty());
  double count = 0, bytes = 0;
  for (const ExchangeCost& exchange : StepExchanges(LastRank(Flash(), {2, 1, 1, false}), {})) {
    count += exchange.count;
    bytes += exchange.bytes;
  }
  EXPECT_EQ(count, 87);
  // A sum of 8 KB among two: half of it taken to be summed, half given back.
  EXPECT_EQ(bytes, 86 * 8192 + 129280 * 4 / 2);
}

TEST(Roofline, DataRanksSendTokensToAllAndTakeSumsBack) {
  const auto exchanges =
      StepExchanges(LastRank(Flash(), {1, 4, 1, true}), {.num_seqs = 8, .other_tokens = 24});
  ASSERT_EQ(exchanges.size(), 2U);
  EXPECT_EQ(exchanges[0].bytes, 43 * 3 * 8 * (4096 + 128));
  EXPECT_EQ(exchanges[1].bytes, 43 * 3 * 8 * 8192);
}

TEST(Roofline, AStageTakesFourStreamsFromTheOneBefore) {
  EXPECT_TRUE(StepExchanges(LastRank(Flash(), {1, 1, 2, false}, 0), {}).empty());
  const auto exchanges = StepExchanges(LastRank(Flash(), {1, 1, 2, false}, 1), {.num_seqs = 8});
  ASSERT_EQ(exchanges.size(), 1U);
  EXPECT_EQ(exchanges[0].bytes, 8 * 4 * 8192);
}

TEST(Roofline, SmallExchangesAreWaitedForAndLargeOnesShareTheTime) {
  const DeviceCeilings device{.name = "",
                              .source = "",
                              .memory_bytes_per_s = 1e9,
                              .fp8_flops = 1e9,
                              .bf16_flops = 1e9,
                              .link_bytes_per_s = 1e9,
                              .exchange_us_of_two = 2,
                              .exchange_us_of_more = 3};
  const std::vector<ProductCost> costs = {{.name = "", .weight_bytes = 5e3, .flops = 4e3}};
  EXPECT_DOUBLE_EQ(Price(costs, {{"", 2, 10, 1e3}}, device).floor_us(), 5 + 20);
  EXPECT_DOUBLE_EQ(Price(costs, {{"", 4, 10, 7e3}}, device).floor_us(), 7 + 30);
}

}  // namespace
}  // namespace fathom::model
