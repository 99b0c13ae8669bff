// The engine over ranks of the real model with synthetic weights: as one rank, whatever runs
// beside.
#include <gtest/gtest.h>

#include <chrono>

#include "checkpoint/shard.h"
#include "comm/memory_transport.h"
#include "engine/make_engine.h"
#include "engine/testing.h"
#include "engine/testing_disk.h"
#include "model/testing.h"
#include "model/weights.h"

namespace fathom::engine {
namespace {

using config::ParallelConfig;

constexpr model::ModelLimits kLimits{
    .max_batched_tokens = 96, .max_num_seqs = 3, .max_model_len = 512};

config::ModelConfig Config() {
  config::ModelConfig c = model::SmallConfig();
  c.num_heads = 8;
  c.o_groups = 4;
  c.o_lora_rank = 128;
  c.moe_intermediate_size = 256;
  return c;
}

struct Answer {
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;
};

class RankedEngine {
 public:
  explicit RankedEngine(const ParallelConfig& parallel, const KvTierOptions& kv = {})
      : transports_(comm::MakeMemoryTransports(parallel.world_size(), std::chrono::seconds(60))) {
    const config::ModelConfig config = Config();
    constexpr auto kNumerics = config::Numerics::kOfficial;
    constexpr auto kIndexDType = kv_cache::IndexKeyDType::kFp4;
    const auto source = checkpoint::MakeSyntheticSource(config, 11);
    std::vector<EngineRank> ranks;
    for (int r = 0; r < parallel.world_size(); ++r) {
      const auto place = config::PlaceOf(parallel, r);
      comm::Transport* transport = transports_[static_cast<size_t>(r)].get();
      const auto shard = *checkpoint::MakeShard(config, parallel, place);
      const auto sharded = checkpoint::MakeShardedSource(*source, config, shard);
      const auto weights = *model::LoadWeights(shard.config, *sharded, *device_);
      models_.push_back(*model::MakeDeepSeekV4(shard.config, kNumerics, kIndexDType, weights,
                                               kLimits, *device_, {parallel, place, transport}));
      ranks.push_back({.model = models_.back().get(),
                       .device = device_.get(),
                       .layout = kv_cache::MakeKvLayout(shard.config, kNumerics, kIndexDType),
                       .place = place,
                       .transport = transport});
    }
    EngineOptions options = OptionsFor(config, kLimits);
    options.model_name = "small";
    options.parallel = parallel;
    options.kv_cache_bytes = int64_t{64} << 20;
    options.kv = kv;
    options.max_queue = 16;
    engine_ = *MakeEngine(options, ranks, metrics_, clock_);
  }

  // Greedy answers to prompts of many lengths, all at once.
  std::vector<Answer> Generate() {
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (const int length : {1, 7, 50, 130, 257}) {
      request::Request request;
      request.id = engine_->NextRequestId();
      request.prompt_token_ids =
          model::RandomTokens(Config(), length, static_cast<uint32_t>(length));
      request.sampling.temperature = 0;
      request.sampling.max_tokens = 24;
      request.sampling.ignore_eos = true;
      request.sampling.num_logprobs = 1;
      request.arrival = clock_.Now();
      sinks.push_back(std::make_shared<CollectingSink>());
      const Status status = engine_->Submit(std::move(request), sinks.back());
      EXPECT_TRUE(status.ok()) << status.message();
    }
    std::vector<Answer> answers;
    for (const auto& sink : sinks) {
      const auto last = sink->Wait();
      EXPECT_EQ(last.finish_reason, request::FinishReason::kLength) << last.error.message();
      answers.push_back({.token_ids = sink->token_ids(), .logprobs = {}});
      for (const auto& token : sink->logprobs()) {
        answers.back().logprobs.push_back(token.chosen.logprob);
      }
    }
    return answers;
  }

  const MetricsRegistry& metrics() const { return metrics_; }

 private:
  const SystemClock clock_;
  MetricsRegistry metrics_;
  std::unique_ptr<device::Device> device_ = device::MakeCpuDevice(1);
  std::vector<std::unique_ptr<comm::Transport>> transports_;
  std::vector<std::unique_ptr<model::DeepSeekV4>> models_;
  std::unique_ptr<Engine> engine_;
};

void ExpectSame(const std::vector<Answer>& answers, const std::vector<Answer>& expected) {
  ASSERT_EQ(answers.size(), expected.size());
  for (size_t i = 0; i < answers.size(); ++i) {
    EXPECT_EQ(answers[i].token_ids, expected[i].token_ids);
    EXPECT_EQ(answers[i].logprobs, expected[i].logprobs);
    ASSERT_EQ(answers[i].logprobs.size(), 24u);
  }
}

TEST(RankedModels, GiveTheAnswersOfOneRankToTheBit) {
  const auto expected = RankedEngine({}).Generate();
  const ParallelConfig layouts[] = {
      {.tensor_parallel_size = 2},
      {.data_parallel_size = 2, .enable_expert_parallel = true},
      {.data_parallel_size = 2},
      {.pipeline_parallel_size = 2},
      {.tensor_parallel_size = 2, .data_parallel_size = 2, .pipeline_parallel_size = 2}};
  for (const ParallelConfig& p : layouts) {
    SCOPED_TRACE(testing::Message()
                 << "tensor " << p.tensor_parallel_size << " data " << p.data_parallel_size
                 << " pipeline " << p.pipeline_parallel_size);
    ExpectSame(RankedEngine(p).Generate(), expected);
  }
}

// A block and a snapshot of the longest prompt, in each stage.
TEST(RankedModels, GiveTheSameAnswersFromDisk) {
  const auto expected = RankedEngine({}).Generate();
  // Who writes, and who reads it.
  const std::pair<ParallelConfig, ParallelConfig> layouts[] = {
      {{.tensor_parallel_size = 2}, {.tensor_parallel_size = 4}},
      {{}, {.tensor_parallel_size = 2}},
      {{.data_parallel_size = 2}, {.data_parallel_size = 2}},
      {{.pipeline_parallel_size = 2}, {.tensor_parallel_size = 2, .pipeline_parallel_size = 2}}};
  for (const auto& [writer, reader] : layouts) {
    SCOPED_TRACE(testing::Message()
                 << "tensor " << reader.tensor_parallel_size << " data "
                 << reader.data_parallel_size << " pipeline " << reader.pipeline_parallel_size);
    const DiskDirectory directory;
    const auto has_all = [&](const RankedEngine& engine) {
      return SumOfMetric(engine.metrics(), "fathom:kv_disk_bytes") == directory.RecordBytes();
    };
    {
      RankedEngine engine(writer, directory.Tiers());
      ExpectSame(engine.Generate(), expected);
      const auto num_files = size_t{2} * static_cast<size_t>(writer.pipeline_parallel_size);
      WaitUntil([&] { return directory.Records().size() == num_files && has_all(engine); });
    }
    RankedEngine engine(reader, directory.Tiers());
    WaitUntil([&] { return has_all(engine); });
    ExpectSame(engine.Generate(), expected);
    EXPECT_EQ(
        SumOfMetric(engine.metrics(), "fathom:prefix_cache_hits_by_tier_total", "tier=\"disk\""),
        256);
  }
}

}  // namespace
}  // namespace fathom::engine
