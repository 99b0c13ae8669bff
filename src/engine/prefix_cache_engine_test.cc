// The prefix cache through the engine and the real model: the same tokens and log-probabilities
// with it and without, from the device, from host memory, and from disk in a new engine.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <numeric>
#include <vector>

#include "engine/make_engine.h"
#include "engine/testing.h"
#include "model/testing.h"
#include "model/weights.h"

namespace fathom::engine {
namespace {

struct Answer {
  std::vector<int32_t> token_ids;
  int num_cached_tokens = 0;
};

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
    std::string name = std::filesystem::temp_directory_path() / "fathom-engine-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override {
    engine_.reset();
    std::filesystem::remove_all(directory_);
  }

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

  Answer Ask(const std::vector<int32_t>& prompt, const std::string& salt = "") {
    request::Request request;
    request.id = engine_->NextRequestId();
    request.prompt_token_ids = prompt;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 20;
    request.sampling.ignore_eos = true;
    request.cache_salt = salt;
    request.arrival = clock_.Now();
    const auto sink = std::make_shared<CachedTokensSink>();
    EXPECT_TRUE(engine_->Submit(std::move(request), sink).ok());
    sink->events.Wait();
    return {sink->events.token_ids(), sink->num_cached_tokens};
  }

  static void WaitUntil(const std::function<bool()>& done) {
    for (int i = 0; i < 6000 && !done(); ++i) usleep(10000);
    EXPECT_TRUE(done());
  }
  std::vector<uintmax_t> RecordSizes() const {
    std::vector<uintmax_t> sizes;
    std::error_code error;  // files come and go
    for (auto it = std::filesystem::recursive_directory_iterator(directory_ / "kv", error);
         !error && it != std::filesystem::recursive_directory_iterator(); it.increment(error)) {
      const auto extension = it->path().extension();
      if (extension == ".block" || extension == ".snapshot") sizes.push_back(it->file_size(error));
    }
    return sizes;
  }

  class CachedTokensSink final : public request::TokenSink {
   public:
    void OnEvent(request::TokenEvent event) override {
      num_cached_tokens = std::max(num_cached_tokens, event.num_cached_tokens);
      events.OnEvent(std::move(event));
    }
    CollectingSink events;
    int num_cached_tokens = 0;
  };

  const config::ModelConfig config_ = model::SmallConfig();
  const model::ModelLimits limits_{
      .max_batched_tokens = 300, .max_num_seqs = 4, .max_model_len = 2048};
  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(2);
  std::unique_ptr<model::DeepSeekV4> model_;
  std::filesystem::path directory_;
  std::unique_ptr<MetricsRegistry> metrics_;
  const SystemClock clock_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(PrefixCacheEngineTest, GivesTheSameTokensFromEveryTier) {
  const auto prompt = model::RandomTokens(config_, 700, 1);
  Start({.prefix_caching = false});
  const Answer plain = Ask(prompt);
  EXPECT_EQ(plain.num_cached_tokens, 0);
  std::vector<int32_t> longer = prompt;
  longer.insert(longer.end(), plain.token_ids.begin(), plain.token_ids.end());
  longer.push_back(3);
  const Answer plain_longer = Ask(longer);

  const KvTierOptions tiers{.host_bytes = int64_t{64} << 20,
                            .disk_directory = directory_ / "kv",
                            .disk_bytes = int64_t{1} << 30,
                            .disk_write_bytes_per_second = 0,
                            .model_fingerprint = "small"};
  Start(tiers);
  EXPECT_EQ(Ask(prompt).token_ids, plain.token_ids);
  const Answer live = Ask(longer);
  EXPECT_EQ(live.num_cached_tokens, 719);  // up to the last computed token
  EXPECT_EQ(live.token_ids, plain_longer.token_ids);
  EXPECT_EQ(Ask(prompt, "salt").num_cached_tokens, 0);

  // Two blocks and the prompt's snapshot for each salt.
  WaitUntil([this] { return RecordSizes().size() >= 6; });
  Start(tiers);
  const auto sizes = RecordSizes();
  const std::string all_are_found = fmt::format("fathom:kv_disk_bytes{{model_name=\"small\"}} {}\n",
                                                std::reduce(sizes.begin(), sizes.end()));
  WaitUntil([&] { return metrics_->ExposeText().find(all_are_found) != std::string::npos; });
  const Answer from_disk = Ask(prompt);
  EXPECT_EQ(from_disk.num_cached_tokens, 512);
  EXPECT_EQ(from_disk.token_ids, plain.token_ids);
  EXPECT_THAT(metrics_->ExposeText(), testing::HasSubstr("vllm:prefix_cache_queries_total"));
}

TEST_F(PrefixCacheEngineTest, RefusesADirectoryThatItCannotUse) {
  Start({.disk_directory = directory_ / "kv", .model_fingerprint = "small"});
  const auto layout =
      kv_cache::MakeKvLayout(config_, config::Numerics::kOfficial, config::IndexKeyDType::kFp4);
  MetricsRegistry metrics;
  EngineOptions options{.model_name = "small",
                        .vocab_size = config_.vocab_size,
                        .sliding_window = config_.sliding_window,
                        .eos_token_ids = {config_.eos_token_id},
                        .limits = limits_};
  options.kv = {.disk_directory = directory_ / "kv", .model_fingerprint = "small"};
  const auto second =
      MakeEngine(options, {{.model = model_.get(), .device = device_.get(), .layout = layout}},
                 metrics, clock_);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(second.status().message(), testing::HasSubstr("another server uses it"));
}

}  // namespace
}  // namespace fathom::engine
