#include "checkpoint/shard_summary.h"

#include <gtest/gtest.h>

#include <map>

#include "checkpoint/summary.h"
#include "checkpoint/test_configs.h"

namespace fathom::checkpoint {
namespace {

using config::ParallelConfig;

int64_t Total(const std::vector<PartBytes>& parts) {
  int64_t sum = 0;
  for (const PartBytes& part : parts) sum += part.bytes;
  return sum;
}

std::map<std::string, int64_t> Summed(const config::ModelConfig& config,
                                      const ParallelConfig& parallel) {
  const ShardSummary summary(config);
  std::map<std::string, int64_t> bytes;
  for (int rank = 0; rank < parallel.world_size(); ++rank) {
    const Shard shard = MakeShard(config, parallel, PlaceOf(parallel, rank)).value();
    for (const PartBytes& part : summary.Of(shard)) bytes[part.name] += part.bytes;
  }
  return bytes;
}

TEST(ShardSummary, OfOneRankIsTheWholeModel) {
  for (const char* preset : {"flash", "pro", "tiny"}) {
    const config::ModelConfig config = MustParseConfig(PresetText(preset));
    const ModelSummary whole = Summarize(config);
    const auto parts = ShardSummary(config).Of(MakeShard(config, {}, {}).value());
    ASSERT_EQ(parts.size(), whole.parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(parts[i].name, whole.parts[i].name);
      EXPECT_EQ(parts[i].bytes, whole.parts[i].bytes) << preset << " " << parts[i].name;
    }
  }
}

TEST(ShardSummary, IsWhatTheShardedCheckpointHas) {
  const config::ModelConfig config = MustParseConfig(SmallText());
  const auto whole = MakeSyntheticSource(config, 1);
  const ShardSummary summary(config);
  for (const ParallelConfig& parallel :
       {ParallelConfig{2, 1, 1, false}, ParallelConfig{2, 2, 1, true},
        ParallelConfig{1, 3, 1, true}, ParallelConfig{2, 1, 3, true},
        ParallelConfig{3, 1, 1, false}}) {
    for (int rank = 0; rank < parallel.world_size(); ++rank) {
      const Shard shard = MakeShard(config, parallel, PlaceOf(parallel, rank)).value();
      const auto source = MakeShardedSource(*whole, config, shard);
      int64_t bytes = 0;
      for (const TensorInfo& tensor : source->tensors()) bytes += tensor.bytes;
      EXPECT_EQ(Total(summary.Of(shard)), bytes) << rank << " of " << parallel.world_size();
    }
  }
}

TEST(ShardSummary, ExpertsOfAllRanksAreTheModelsOwnHoweverTheyAreSplit) {
  const config::ModelConfig config = MustParseConfig(PresetText("flash"));
  const auto whole = Summed(config, {});
  for (const ParallelConfig& parallel :
       {ParallelConfig{4, 1, 1, false}, ParallelConfig{4, 1, 1, true},
        ParallelConfig{2, 2, 1, true}, ParallelConfig{1, 8, 1, true},
        ParallelConfig{2, 1, 2, false}}) {
    EXPECT_EQ(Summed(config, parallel)["experts"], whole.at("experts"));
  }
}

TEST(ShardSummary, AttentionOfDataRanksIsReplicated) {
  const config::ModelConfig config = MustParseConfig(PresetText("flash"));
  const auto whole = Summed(config, {});
  auto ranks = Summed(config, {1, 4, 1, true});
  for (const char* part : {"attention", "compressor", "head", "shared_experts", "embedding"}) {
    EXPECT_EQ(ranks[part], 4 * whole.at(part)) << part;
  }
}

}  // namespace
}  // namespace fathom::checkpoint
