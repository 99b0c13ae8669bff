// The prefix cache through the engine and the real model: the same tokens and log-probabilities
// with it and without, from the device, from host memory, and from disk in a new engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "engine/make_engine.h"
#include "engine/testing_disk.h"
#include "model/testing.h"
#include "model/weights.h"

namespace fathom::engine {
namespace {

class PrefixCacheEngineTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto source = checkpoint::MakeSyntheticSource(config_, 11);
    auto weights = model::LoadWeights(config_, *source, *device_);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    auto model = model::MakeDeepSeekV4(config_, config::Numerics::kOfficial,
                                       config::IndexKeyDType::kFp4, *weights, limits_, *device_);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = *std::move(model);
  }
  void TearDown() override { engine_.reset(); }

  void Start(const KvTierOptions& kv) {
    engine_.reset();
    metrics_ = std::make_unique<MetricsRegistry>();
    const auto layout =
        kv_cache::MakeKvLayout(config_, config::Numerics::kOfficial, config::IndexKeyDType::kFp4);
    EngineOptions options{
        .model_name = "small",
        .vocab_size = config_.vocab_size,
        .sliding_window = config_.sliding_window,
        .eos_token_ids = {config_.eos_token_id},
        .limits = limits_,
        .kv_cache_bytes =
            24 * layout.block_bytes + 60 * layout.window_page_bytes + 8 * layout.state.slot_bytes};
    options.kv = kv;
    auto engine =
        MakeEngine(options, {{.model = model_.get(), .device = device_.get(), .layout = layout}},
                   *metrics_, clock_);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_ = *std::move(engine);
  }

  CachedAnswer Ask(const std::vector<int32_t>& prompt, const std::string& salt = "") {
    request::Request request;
    request.prompt_token_ids = prompt;
    request.cache_salt = salt;
    return Ask20(*engine_, std::move(request));
  }

  const config::ModelConfig config_ = model::SmallConfig();
  const model::ModelLimits limits_{
      .max_batched_tokens = 300, .max_num_seqs = 4, .max_model_len = 2048};
  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(2);
  std::unique_ptr<model::DeepSeekV4> model_;
  const DiskDirectory directory_;
  std::unique_ptr<MetricsRegistry> metrics_;
  const SystemClock clock_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(PrefixCacheEngineTest, GivesTheSameTokensFromEveryTier) {
  const auto prompt = model::RandomTokens(config_, 700, 1);
  Start({.prefix_caching = false});
  const CachedAnswer plain = Ask(prompt);
  EXPECT_EQ(plain.num_cached_tokens, 0);
  std::vector<int32_t> longer = prompt;
  longer.insert(longer.end(), plain.token_ids.begin(), plain.token_ids.end());
  longer.push_back(3);
  const CachedAnswer plain_longer = Ask(longer);

  Start(directory_.Tiers());
  EXPECT_EQ(Ask(prompt).token_ids, plain.token_ids);
  const CachedAnswer live = Ask(longer);
  EXPECT_EQ(live.num_cached_tokens, 719);  // up to the last computed token
  EXPECT_EQ(live.token_ids, plain_longer.token_ids);
  EXPECT_EQ(Ask(prompt, "salt").num_cached_tokens, 0);

  // Two blocks and the prompt's snapshot for each salt.
  WaitUntil([this] { return directory_.Records().size() >= 6; });
  Start(directory_.Tiers());
  WaitUntil([this] {
    return SumOfMetric(*metrics_, "fathom:kv_disk_bytes") == directory_.RecordBytes();
  });
  const CachedAnswer from_disk = Ask(prompt);
  EXPECT_EQ(from_disk.num_cached_tokens, 512);
  EXPECT_EQ(from_disk.token_ids, plain.token_ids);
  EXPECT_THAT(metrics_->ExposeText(), testing::HasSubstr("vllm:prefix_cache_queries_total"));
}

TEST_F(PrefixCacheEngineTest, RefusesADirectoryThatItCannotUse) {
  Start(directory_.Tiers());
  const auto layout =
      kv_cache::MakeKvLayout(config_, config::Numerics::kOfficial, config::IndexKeyDType::kFp4);
  MetricsRegistry metrics;
  EngineOptions options{.model_name = "small",
                        .vocab_size = config_.vocab_size,
                        .sliding_window = config_.sliding_window,
                        .eos_token_ids = {config_.eos_token_id},
                        .limits = limits_};
  options.kv = directory_.Tiers();
  const auto second =
      MakeEngine(options, {{.model = model_.get(), .device = device_.get(), .layout = layout}},
                 metrics, clock_);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(second.status().message(), testing::HasSubstr("another server uses it"));
}

}  // namespace
}  // namespace fathom::engine
