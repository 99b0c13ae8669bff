#include "checkpoint/shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "checkpoint/test_configs.h"

namespace fathom::checkpoint {
namespace {

using config::ModelConfig;
using config::ParallelConfig;
using config::RankPlace;

std::vector<std::byte> ReadAll(const TensorSource& source, const TensorInfo& tensor) {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
  EXPECT_TRUE(source.Read(tensor, 0, bytes).ok());
  return bytes;
}

Shard MustMakeShard(const ModelConfig& config, const ParallelConfig& parallel, int rank) {
  Result<Shard> shard = MakeShard(config, parallel, PlaceOf(parallel, rank));
  EXPECT_TRUE(shard.ok()) << shard.status().message();
  return *shard;
}

// A small model whose sizes can be cut in two and in four.
ModelConfig Config() {
  return MustParseConfig(WithFields("tiny", {{"num_attention_heads", "8"},
                                             {"o_groups", "4"},
                                             {"moe_intermediate_size", "512"},
                                             {"vocab_size", "1000"}}));
}

TEST(Shard, RanksAreNumberedTensorFirstThenDataThenStage) {
  const ParallelConfig parallel{
      .tensor_parallel_size = 2, .data_parallel_size = 3, .pipeline_parallel_size = 2};
  for (int rank = 0; rank < 12; ++rank) {
    const RankPlace place = PlaceOf(parallel, rank);
    EXPECT_EQ(RankOf(parallel, place), rank);
    EXPECT_EQ(place.tensor, rank % 2);
    EXPECT_EQ(place.pipeline, rank / 6);
  }
}

TEST(Shard, OneRankHasTheWholeModel) {
  const ModelConfig config = Config();
  const Shard shard = MustMakeShard(config, {}, 0);
  const auto whole = MakeSyntheticSource(config, 1);
  const auto source = MakeShardedSource(*whole, config, shard);
  ASSERT_EQ(source->tensors().size(), whole->tensors().size());
  for (size_t i = 0; i < source->tensors().size(); ++i) {
    EXPECT_EQ(source->tensors()[i].name, whole->tensors()[i].name);
    EXPECT_EQ(source->tensors()[i].shape, whole->tensors()[i].shape);
  }
  EXPECT_EQ(shard.config.num_heads, config.num_heads);
  EXPECT_EQ(shard.config.num_draft_blocks, config.num_draft_blocks);
}

TEST(Shard, ItLacksOnlyWhatTheEndsOfTheModelHave) {
  const ModelConfig config = Config();
  const auto whole = MakeSyntheticSource(config, 1);
  for (const ParallelConfig& parallel :
       {ParallelConfig{.tensor_parallel_size = 2}, ParallelConfig{.tensor_parallel_size = 4},
        ParallelConfig{.pipeline_parallel_size = 3},
        ParallelConfig{.tensor_parallel_size = 2, .pipeline_parallel_size = 2}}) {
    for (int rank = 0; rank < parallel.world_size(); ++rank) {
      const Shard shard = MustMakeShard(config, parallel, rank);
      const auto source = MakeShardedSource(*whole, config, shard);
      for (const TensorInfo& expected : ExpectedTensors(shard.config)) {
        const bool in_layer = expected.name.starts_with("layers.");
        const bool may_lack = !in_layer && parallel.pipeline_parallel_size > 1;
        EXPECT_TRUE(may_lack || source->Find(expected.name) != nullptr) << expected.name;
      }
    }
  }
}

TEST(Shard, TensorRanksTogetherHoldWhatIsSplit) {
  const ModelConfig config = Config();
  const auto whole = MakeSyntheticSource(config, 1);
  for (const int size : {2, 3, 4}) {
    const ParallelConfig parallel{.tensor_parallel_size = size};
    for (const char* name :
         {"layers.2.attn.wq_b.weight", "layers.2.attn.wq_b.scale", "layers.2.attn.attn_sink",
          "layers.2.attn.wo_a.weight", "layers.2.attn.wo_a.scale", "layers.2.attn.wo_b.weight",
          "layers.2.attn.wo_b.scale", "layers.3.ffn.experts.5.w1.weight",
          "layers.3.ffn.experts.5.w2.weight", "layers.3.ffn.experts.5.w2.scale",
          "layers.3.ffn.experts.5.w3.scale", "layers.3.ffn.shared_experts.w1.weight",
          "layers.3.ffn.shared_experts.w2.scale", "layers.3.ffn.shared_experts.w3.scale",
          "head.weight", "mtp.0.attn.wq_b.weight"}) {
      std::vector<std::byte> joined;
      for (int rank = 0; rank < size; ++rank) {
        const auto source =
            MakeShardedSource(*whole, config, MustMakeShard(config, parallel, rank));
        const TensorInfo* const slice = source->Find(name);
        ASSERT_NE(slice, nullptr);
        const auto part = ReadAll(*source, *slice);
        joined.insert(joined.end(), part.begin(), part.end());
      }
      EXPECT_EQ(joined, ReadAll(*whole, *whole->Find(name))) << name;
    }
  }
}

TEST(Shard, AnyRangeOfASliceCanBeRead) {
  const ModelConfig config = Config();
  const auto whole = MakeSyntheticSource(config, 1);
  const auto source =
      MakeShardedSource(*whole, config, MustMakeShard(config, {.tensor_parallel_size = 4}, 3));
  const TensorInfo& slice = *source->Find("layers.3.ffn.experts.5.w1.weight");
  const auto all = ReadAll(*source, slice);
  std::vector<std::byte> bytes(200);
  for (const int64_t offset : {int64_t{0}, int64_t{1}, int64_t{1000}, slice.bytes - 200}) {
    ASSERT_TRUE(source->Read(slice, offset, bytes).ok());
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), all.begin() + offset)) << offset;
  }
}

TEST(Shard, ExpertsOfAllRanksOfAStageAreEachThereOnce) {
  const ModelConfig config = Config();
  const auto whole = MakeSyntheticSource(config, 1);
  const ParallelConfig parallel{
      .tensor_parallel_size = 2, .data_parallel_size = 2, .enable_expert_parallel = true};
  std::map<std::string, int> count;
  for (int rank = 0; rank < 4; ++rank) {
    const auto source = MakeShardedSource(*whole, config, MustMakeShard(config, parallel, rank));
    for (const TensorInfo& tensor : source->tensors()) {
      if (tensor.name.find(".experts.") == std::string::npos) continue;
      ++count[tensor.name];
      EXPECT_EQ(tensor.shape, whole->Find(tensor.name)->shape);
    }
  }
  for (const TensorInfo& tensor : whole->tensors()) {
    if (tensor.name.find(".experts.") == std::string::npos) continue;
    EXPECT_EQ(count[tensor.name], 1) << tensor.name;
  }
}

TEST(Shard, StagesHaveConsecutiveLayersRenumbered) {
  const ModelConfig config = Config();  // 7 layers
  const auto whole = MakeSyntheticSource(config, 1);
  const ParallelConfig parallel{.pipeline_parallel_size = 3};
  int num_layers = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const Shard shard = MustMakeShard(config, parallel, rank);
    const auto source = MakeShardedSource(*whole, config, shard);
    EXPECT_EQ(source->Find("embed.weight") != nullptr, rank == 0);
    EXPECT_EQ(source->Find("head.weight") != nullptr, rank == 2);
    EXPECT_EQ(source->Find("hc_head_fn") != nullptr, rank == 2);
    for (int i = 0; i < shard.config.num_layers; ++i) {
      EXPECT_EQ(shard.config.layer_kind(i), config.layer_kind(num_layers + i));
      EXPECT_EQ(shard.config.routing_kind(i), config.routing_kind(num_layers + i));
      const std::string rest = ".attn.wkv.weight";
      EXPECT_EQ(ReadAll(*source, *source->Find("layers." + std::to_string(i) + rest)),
                ReadAll(*whole, *whole->Find("layers." + std::to_string(num_layers + i) + rest)));
    }
    num_layers += shard.config.num_layers;
  }
  EXPECT_EQ(num_layers, config.num_layers);
}

TEST(Shard, OfficialModelsSplitEvenly) {
  for (const char* preset : {"flash", "pro"}) {
    const ModelConfig config = MustParseConfig(PresetText(preset));
    for (const int size : {2, 4, 8}) {
      for (int rank = 0; rank < size; ++rank) {
        const Shard shard = MustMakeShard(config, {.tensor_parallel_size = size}, rank);
        EXPECT_EQ(shard.config.num_heads * size, config.num_heads);
        EXPECT_EQ(shard.routed_up.size() * size, config.moe_intermediate_size);
        EXPECT_EQ(shard.routed_down.size() * size, config.hidden_size);
        EXPECT_EQ(shard.outputs.size() * size, config.hidden_size);
      }
    }
  }
}

// A GPU's share of some tensors is all of them.
void ExpectWhole(const TensorSource& whole, const TensorSource& source, const std::string& part) {
  int num_tensors = 0;
  for (const TensorInfo& tensor : source.tensors()) {
    if (tensor.name.find(part) == std::string::npos) continue;
    EXPECT_EQ(ReadAll(source, tensor), ReadAll(whole, *whole.Find(tensor.name))) << tensor.name;
    ++num_tensors;
  }
  EXPECT_GT(num_tensors, 0) << part;
}

TEST(Shard, AGpuMayHaveAllOfAttention) {
  const ModelConfig config = Config();
  const auto whole = MakeSyntheticSource(config, 1);
  const Shard shard = MakeGpuShard(config, {.tensor_parallel_size = 2}, {.tensor = 1}).value();
  ASSERT_TRUE(shard.whole_attention);
  EXPECT_EQ(shard.config.num_heads, config.num_heads / 2);
  const auto source = MakeShardedSource(*whole, config, shard);
  ExpectWhole(*whole, *source, ".attn.");
  EXPECT_LT(source->Find("layers.3.ffn.shared_experts.w2.weight")->bytes,
            whole->Find("layers.3.ffn.shared_experts.w2.weight")->bytes);
}

TEST(Shard, AllOfAttentionIsThereWhereItHasRoomAndEveryRankHasHeads) {
  const auto has = [](const ModelConfig& config, const ParallelConfig& parallel) {
    return MakeGpuShard(config, parallel, {}).value().whole_attention;
  };
  const ModelConfig flash = MustParseConfig(PresetText("flash"));
  for (const int size : {2, 4, 8}) EXPECT_TRUE(has(flash, {.tensor_parallel_size = size}));
  EXPECT_FALSE(has(flash, {}));
  EXPECT_FALSE(has(flash, {.tensor_parallel_size = 16}));  // than output groups
  EXPECT_FALSE(has(flash, {.data_parallel_size = 2}));
  EXPECT_FALSE(has(flash, {.tensor_parallel_size = 2, .enable_expert_parallel = true}));
  EXPECT_FALSE(has(flash, {.tensor_parallel_size = 2, .data_parallel_size = 2}));
  EXPECT_FALSE(has(MustParseConfig(PresetText("pro")), {.tensor_parallel_size = 8}));  // 15 GB
}

TEST(Shard, BesideWholeExpertsAGpuHasAllOfTheSharedOne) {
  const ModelConfig config = Config();  // 8 experts
  const auto whole = MakeSyntheticSource(config, 1);
  for (const ParallelConfig& parallel :
       {ParallelConfig{.tensor_parallel_size = 2, .enable_expert_parallel = true},
        {.tensor_parallel_size = 2, .data_parallel_size = 2},
        {.data_parallel_size = 2},
        {.data_parallel_size = 2, .enable_expert_parallel = true}}) {
    const int size = parallel.stage_size();
    const Shard shard = MakeGpuShard(config, parallel, PlaceOf(parallel, size - 1)).value();
    EXPECT_EQ(shard.experts.begin, 8 - 8 / size);
    EXPECT_EQ(shard.experts.end, 8);
    EXPECT_EQ(shard.config.num_heads, config.num_heads / parallel.tensor_parallel_size);
    const auto source = MakeShardedSource(*whole, config, shard);
    ExpectWhole(*whole, *source, ".shared_experts.");
    ExpectWhole(*whole, *source, ".experts.7.");
    EXPECT_EQ(source->Find("layers.3.attn.wo_b.weight")->bytes * parallel.tensor_parallel_size,
              whole->Find("layers.3.attn.wo_b.weight")->bytes);
  }
}

TEST(Shard, WhatCannotBeCutIsRefused) {
  const ModelConfig config = Config();
  const auto refusal = [&](const ParallelConfig& parallel) {
    return MakeShard(config, parallel, {}).status().message();
  };
  EXPECT_THAT(refusal({.pipeline_parallel_size = 8}), testing::HasSubstr("7 layers"));
  EXPECT_THAT(refusal({.tensor_parallel_size = 9}), testing::HasSubstr("8 heads"));
  EXPECT_THAT(refusal({.data_parallel_size = 9, .enable_expert_parallel = true}),
              testing::HasSubstr("8 experts to 9 ranks"));
}

}  // namespace
}  // namespace fathom::checkpoint
