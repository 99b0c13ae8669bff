// No step asks for more than a GPU has, nor for memory, streams or events: all launches of Flash's
// and Pro's layers, for any number of tokens behind contexts of any length, alone and on a rank of
// two, four and eight in every kind of layout, and of models of other sizes, without a GPU. Sizes
// that kernels do not run are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/shard.h"
#include "comm/cuda_group.h"
#include "comm/cuda_testing.h"
#include "model/cuda_testing.h"
#include "model/no_gpu.h"

namespace fathom::model {
namespace {

constexpr int kMaxSeqs = 300, kMaxTokens = 65535, kMaxLength = 1 << 20;

// Of an H200.
bool Fits(const Launched& l) {
  const unsigned threads = l.block.x * l.block.y * l.block.z;
  return l.grid.x > 0 && l.grid.y > 0 && l.grid.z > 0 && l.grid.x < 1u << 31 &&
         l.grid.y < 1u << 16 && l.grid.z < 1u << 16 && threads > 0 && threads <= 1024 &&
         l.cluster <= 16 && l.grid.x % l.cluster == 0 && l.shared_bytes <= 227 << 10;
}

// Of a launch of attention: its family, and into how many parts it splits a token's keys.
using KeySplits = std::pair<std::string_view, unsigned>;
std::optional<KeySplits> SplitsOf(const Launched& l) {
  const std::string_view kernel = l.kernel;
  for (const auto& [family, splits] : {KeySplits{"ClusterAttentionKernel", l.cluster},
                                       {"DecodeAttentionKernel", l.grid.x},
                                       {"LongAttentionKernel", l.grid.x},
                                       {"SparseAttentionKernel", l.grid.y}}) {
    if (kernel.find(family) != std::string_view::npos) return {{family, splits}};
  }
  return std::nullopt;
}

struct Layout {
  const char* name;
  int num_tensor_ranks = 1;
  int num_data_ranks = 1;
  bool whole_experts = num_data_ranks > 1;
};

config::ModelConfig FirstLayers(const char* preset) {
  auto config =
      checkpoint::ParseModelConfig(checkpoint::PresetConfigText(preset).value(), preset).value();
  config.num_layers = 3;  // one of each kind
  config.compress_ratios = {0, 4, 128};
  config.draft = config::DraftKind::kNone;
  config.num_draft_blocks = 0;
  return config;
}

// What each of the other data ranks runs.
struct OtherRanks {
  int num_tokens;
  bool decode;
};

constexpr ModelLimits kLimits{kMaxTokens, kMaxSeqs, kMaxLength};

class Launches : public testing::Test {
 protected:
  // The first rank's.
  void MakeModel(config::ModelConfig config, const Layout& layout, kv_cache::IndexKeyDType dtype,
                 bool enforce_eager = true) {
    num_data_ranks_ = layout.num_data_ranks;
    CudaModelOptions options{.enforce_eager = enforce_eager};
    const auto whole = checkpoint::MakeSyntheticSource(config, 1);
    std::unique_ptr<checkpoint::TensorSource> sharded;
    model_ = nullptr;
    stream_ = nullptr;
    device_ = std::move(device::MakeCudaDevice(0).value());
    stream_ = std::move(device_->MakeStream().value());
    const config::ParallelConfig parallel{.tensor_parallel_size = layout.num_tensor_ranks,
                                          .data_parallel_size = layout.num_data_ranks,
                                          .enable_expert_parallel = layout.whole_experts};
    if (parallel.world_size() > 1) {
      Join(config, kLimits, parallel, options);
      const auto shard = checkpoint::MakeGpuShard(config, parallel, options.rank.place).value();
      sharded = checkpoint::MakeShardedSource(*whole, config, shard);
      config = shard.config;
    }
    auto model = MakeDeepSeekV4Cuda(config, dtype, sharded == nullptr ? *whole : *sharded, true,
                                    kLimits, *device_, options);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::move(*model);
  }

  static void Join(const config::ModelConfig& config, const ModelLimits& limits,
                   const config::ParallelConfig& parallel, CudaModelOptions& options) {
    options.rank = {parallel, PlaceOf(parallel, 0), nullptr};
    const std::vector<int> gpus = comm::FirstGpus(parallel.world_size());
    const int tensor_ranks = parallel.tensor_parallel_size;
    if (parallel.gpus_have_whole_experts()) {
      options.expert_ranks =
          comm::MakeCudaExpertRanks(gpus, {.hidden = config.hidden_size,
                                           .num_experts = config.num_experts,
                                           .num_chosen = config.num_experts_per_token,
                                           .max_tokens = limits.max_batched_tokens,
                                           .num_tensor_ranks = tensor_ranks})
              .value()[0];
    }
    if (tensor_ranks > 1) {
      options.collectives =
          comm::MakePeerGroup(
              std::span(gpus).first(static_cast<size_t>(tensor_ranks)),
              GroupOptions(config, limits, tensor_ranks, parallel.data_parallel_size))
              .value()[0];
    }
  }

  // The first sequence behind `context` tokens, others behind fewer. Other data ranks do the same.
  void Step(int num_seqs, int tokens_each, int context, bool has_prompt) {
    Step(num_seqs, tokens_each, context, has_prompt, {num_seqs * tokens_each, !has_prompt});
  }
  void Step(int num_seqs, int tokens_each, int context, bool has_prompt, OtherRanks others) {
    const auto calls = ResourceCallsOf(num_seqs, tokens_each, context, has_prompt, others);
    if (calls.empty() || HasFailure()) return;
    ADD_FAILURE() << calls[0] << " in a step: " << num_seqs << " sequences of " << tokens_each
                  << " tokens, " << context << " before, " << others.num_tokens
                  << " on other data ranks";
  }
  // Likewise, and what the step asks the GPU for.
  std::vector<std::string> ResourceCallsOf(int num_seqs, int tokens_each, int context,
                                           bool has_prompt, OtherRanks others) {
    const auto seqs = static_cast<size_t>(num_seqs), each = static_cast<size_t>(tokens_each);
    std::vector<int32_t> ids(seqs * each), ends{0}, computed, first_pages, slots, rows;
    for (int s = 0; s < num_seqs; ++s) {
      computed.push_back(s == 0 ? context : std::min(context, 3000 + s));
      ends.push_back((s + 1) * tokens_each);
      first_pages.push_back(std::max(0, computed.back() - 127) / 64);
      slots.push_back(s);
      rows.push_back(ends.back() - 1);
    }
    const int blocks = (context + tokens_each + 255) / 256, pages = (tokens_each + 127) / 64 + 3;
    const std::vector<int32_t> tables(seqs * static_cast<size_t>(blocks)),
        windows(seqs * static_cast<size_t>(pages));
    std::vector<int32_t> of_data_ranks;
    if (num_data_ranks_ > 1) {
      of_data_ranks.assign(static_cast<size_t>(num_data_ranks_), others.num_tokens);
      of_data_ranks[0] = num_seqs * tokens_each;
    }
    num_launches_ = 0;
    attention_.clear();
    OnLaunch([&](const Launched& l) {
      ++num_launches_;
      if (const auto splits = SplitsOf(l)) attention_.push_back(*splits);
      if (Fits(l) || HasFailure()) return;  // the first says it all
      ADD_FAILURE() << l.kernel << " (" << l.grid.x << ", " << l.grid.y << ", " << l.grid.z
                    << ") in clusters of " << l.cluster << " with " << l.shared_bytes
                    << " bytes: " << num_seqs << " sequences of " << tokens_each << " tokens, "
                    << context << " before, " << others.num_tokens << " on other data ranks";
    });
    const ForwardBatch batch{.token_ids = ids,
                             .cu_seqlens_q = ends,
                             .num_computed = computed,
                             .block_tables = tables,
                             .max_blocks = blocks,
                             .window_tables = windows,
                             .max_window_pages = pages,
                             .first_window_page = first_pages,
                             .state_slots = slots,
                             .logits_rows = rows,
                             .has_prompt = has_prompt,
                             .data_rank_tokens = of_data_ranks,
                             .data_ranks_decode = others.decode && !has_prompt,
                             .expert_ids = {}};
    TakeResourceCalls();
    EXPECT_TRUE(model_->Forward(batch, {}, nullptr, *stream_, nullptr).ok());
    OnLaunch(nullptr);
    return TakeResourceCalls();
  }
  std::vector<std::string> ResourceCallsOfDecodes(int num_seqs, int context) {
    return ResourceCallsOf(num_seqs, 1, context, false, {num_seqs, true});
  }

  // Why there is no such model.
  static Status Refusal(const config::ModelConfig& config, const ModelLimits& limits) {
    const auto device = device::MakeCudaDevice(0).value();
    return MakeDeepSeekV4Cuda(config, kv_cache::IndexKeyDType::kFp4,
                              *checkpoint::MakeSyntheticSource(config, 1), true, limits, *device)
        .status();
  }

  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<DeepSeekV4> model_;
  int num_data_ranks_ = 1;
  int num_launches_ = 0;              // of the last step
  std::vector<KeySplits> attention_;  // likewise
};

class LaunchesTest : public Launches,
                     public testing::WithParamInterface<std::tuple<const char*, Layout>> {
 protected:
  void MakeModelOfParam(kv_cache::IndexKeyDType dtype, bool enforce_eager = true) {
    MakeModel(FirstLayers(std::get<0>(GetParam())), std::get<1>(GetParam()), dtype, enforce_eager);
  }
};

TEST_P(LaunchesTest, AllFitAndNoneAllocates) {
  for (const auto dtype : {kv_cache::IndexKeyDType::kFp4, kv_cache::IndexKeyDType::kFp8}) {
    MakeModelOfParam(dtype);
    if (HasFatalFailure()) return;
    for (int seqs = 1; seqs <= kMaxSeqs; seqs += seqs < 140 ? 1 : 7) {
      for (const int context : {1, 200, 2051, 4000, 16000, 20000, 40000, 70000, 140000, 262143,
                                270000, 530000, 1048000}) {
        Step(seqs, 1, context, false);
      }
    }
    for (int tokens = 1; tokens <= kMaxTokens; tokens = std::max(tokens + 1, tokens * 33 / 32)) {
      for (const int context : {0, 5000, 130000, 980000}) Step(1, tokens, context, true);
    }
    for (int seqs = 2; seqs <= 64; ++seqs) {
      for (const int tokens : {2, 3, 33, 120}) Step(seqs, tokens, 3000, true);
    }
  }
}

// But for graphs: those that were not made at the start are made when a step of their shape is
// first seen, in the place of the one that was used longest ago.
TEST_P(LaunchesTest, ReplaysAllocateNothing) {
  MakeModelOfParam(kv_cache::IndexKeyDType::kFp4, /*enforce_eager=*/false);
  if (HasFatalFailure()) return;
  const int num_captured = model_->CaptureDecodes({}, nullptr, nullptr, *stream_);
  ASSERT_GT(num_captured, 0);
  for (int seqs = 1; seqs <= kMaxSeqs; ++seqs) {
    for (const int context : {1, 2000, 4000, 8000}) {
      EXPECT_THAT(ResourceCallsOfDecodes(seqs, context), testing::IsEmpty())
          << seqs << " behind " << context;
      EXPECT_EQ(num_launches_, 0) << "not captured";
    }
  }
  for (const int seqs : {1, 100, kMaxSeqs}) {
    EXPECT_THAT(ResourceCallsOfDecodes(seqs, 500000),
                testing::UnorderedElementsAre("cudaGraphInstantiate", "cudaGraphExecDestroy"));
    EXPECT_GT(num_launches_, 0);
    EXPECT_THAT(ResourceCallsOfDecodes(seqs, 500000), testing::IsEmpty());
    EXPECT_EQ(num_launches_, 0);
    Step(1, 1000 + seqs, 5000, true);  // prompts between them
  }
}

// One rank has nothing to do, or little, where others have much, and the other way round.
class DataRankLaunchesTest : public LaunchesTest {};

TEST_P(DataRankLaunchesTest, AllFitWhateverOthersRun) {
  MakeModelOfParam(kv_cache::IndexKeyDType::kFp4);
  if (HasFatalFailure()) return;
  for (const int others : {0, 1, 8, 9, 16, 17, 132, 133, kMaxSeqs}) {
    for (const int seqs : {0, 1, 8, 9, 17, 140, kMaxSeqs}) {
      Step(seqs, 1, 40000, false, {others, true});
    }
  }
  for (const int others : {0, 1, 17, 300, kMaxTokens}) {
    for (const int seqs : {0, 1, 8, 9, kMaxSeqs}) Step(seqs, 1, 5000, false, {others, false});
    for (const int tokens : {2, 63, 1000, kMaxTokens}) Step(1, tokens, 5000, true, {others, false});
  }
}

// So a step has the same bits on any number of ranks. Not with all of Pro's heads
// (docs/numerics.md).
TEST_F(Launches, AttentionSplitsATokensKeysAlikeOnAnyNumberOfRanks) {
  for (const char* preset : {"flash", "pro"}) {
    std::vector<KeySplits> expected;
    for (const int ranks : {1, 2, 4, 8}) {
      if (ranks == 1 && preset == std::string_view("pro")) continue;
      MakeModel(FirstLayers(preset), {.name = "ranks", .num_tensor_ranks = ranks},
                kv_cache::IndexKeyDType::kFp4);
      std::vector<KeySplits> all;
      for (const int seqs : {1, 2, 3, 4, 5, 8, 12, 13, 16, 32, 33, 64, 65, 128, 129}) {
        for (const int context : {1, 2000, 4096, 20000, 30000, 130000, 270000, 530000, 1048000}) {
          Step(seqs, 1, context, false);
          ASSERT_FALSE(attention_.empty());
          all.insert(all.end(), attention_.begin(), attention_.end());
        }
      }
      if (expected.empty()) expected = all;
      EXPECT_EQ(all, expected) << preset << " on " << ranks << " ranks";
    }
  }
}

TEST_F(Launches, AGpuWithoutCodeIsNamed) {
  for (const auto& [major, minor] : {std::pair(8, 0), {9, 1}, {10, 0}}) {
    SetComputeCapability(major, minor);
    const Status status = device::MakeCudaDevice(0).status();
    SetComputeCapability(9, 0);
    EXPECT_EQ(status.code(), StatusCode::kDevice);
    EXPECT_THAT(status.message(), testing::AllOf(testing::HasSubstr(std::to_string(major) + "." +
                                                                    std::to_string(minor)),
                                                 testing::HasSubstr("code for 9.0 only")));
  }
}

// Flash, but for one size.
struct Size {
  const char* field;
  int config::ModelConfig::* member;
  std::vector<int> run, refused;
};

class SizesTest : public Launches, public testing::WithParamInterface<Size> {
 protected:
  static config::ModelConfig FlashBut(int size) {
    config::ModelConfig config = FirstLayers("flash");
    config.*GetParam().member = size;
    return config;
  }
};

TEST_P(SizesTest, AreRunOrRefused) {
  for (const int size : GetParam().run) {
    SCOPED_TRACE(size);
    MakeModel(FlashBut(size), {"alone"}, kv_cache::IndexKeyDType::kFp4);
    if (HasFatalFailure()) return;
    for (const int tokens : {1, 5, 12, 40, 300}) Step(tokens, 1, 20000, false);
    for (const int tokens : {1, 30, 1000, 9000}) Step(1, tokens, 20000, true);
  }
  for (const int size : GetParam().refused) {
    const Status status = Refusal(FlashBut(size), kLimits);
    EXPECT_EQ(status.code(), StatusCode::kBadModel) << size;
    EXPECT_THAT(status.message(), testing::StartsWith(GetParam().field)) << size;
  }
}

// Of more than a large boundary adds up, ranks' outputs are gathered before it.
TEST_F(Launches, RanksRunAnyNumberOfChosenExperts) {
  for (const int chosen : {1, 8, 9, 16}) {
    config::ModelConfig config = FirstLayers("flash");
    config.num_experts_per_token = chosen;
    MakeModel(config, {"tensor2", 2}, kv_cache::IndexKeyDType::kFp4);
    for (const int tokens : {12, 17, 64, 65, 300}) Step(tokens, 1, 20000, false);
  }
}

TEST_F(Launches, MoreTokensThanAStepMayHaveAreRefused) {
  const Status status = Refusal(FirstLayers("flash"), {kMaxTokens + 1, kMaxSeqs, kMaxLength});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), testing::HasSubstr("--max-num-batched-tokens is 65536"));
}

std::string NameOf(const testing::TestParamInfo<LaunchesTest::ParamType>& param) {
  const auto& [preset, layout] = param.param;
  return std::string(preset) + "_" + layout.name;
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, LaunchesTest,
    testing::Combine(testing::Values("flash", "pro"),
                     testing::Values(Layout{"alone"}, Layout{"tensor2", 2}, Layout{"tensor3", 3},
                                     Layout{"tensor4", 4}, Layout{"tensor8", 8},
                                     Layout{"data2", 1, 2}, Layout{"data4", 1, 4},
                                     Layout{"data8", 1, 8}, Layout{"tensor2_experts", 2, 1, true},
                                     Layout{"tensor8_experts", 8, 1, true},
                                     Layout{"tensor2_data2", 2, 2}, Layout{"tensor4_data2", 4, 2})),
    NameOf);
using config::ModelConfig;
INSTANTIATE_TEST_SUITE_P(
    Of, SizesTest,
    testing::Values(
        Size{"hidden_size", &ModelConfig::hidden_size, {128, 384, 5120, 8192}, {8320}},
        Size{"vocab_size", &ModelConfig::vocab_size, {2, 4098}, {4097}},
        Size{"q_lora_rank", &ModelConfig::q_lora_rank, {128, 384, 2048}, {2176}},
        Size{"o_lora_rank", &ModelConfig::o_lora_rank, {128, 384}, {64, 192}},
        Size{"index_n_heads", &ModelConfig::index_num_heads, {2, 8, 10, 64}, {1, 3, 66}},
        Size{"index_topk", &ModelConfig::index_topk, {1, 100, 1024}, {1025}},
        Size{"moe_intermediate_size", &ModelConfig::moe_intermediate_size, {128, 1408, 8192}, {}},
        Size{"n_routed_experts", &ModelConfig::num_experts, {6, 64, 512}, {7, 514}},
        Size{"num_experts_per_tok", &ModelConfig::num_experts_per_token, {1, 16}, {17}}),
    [](const auto& size) { return std::string(size.param.field); });
INSTANTIATE_TEST_SUITE_P(Layouts, DataRankLaunchesTest,
                         testing::Combine(testing::Values("flash", "pro"),
                                          testing::Values(Layout{"data2", 1, 2},
                                                          Layout{"data4", 1, 4},
                                                          Layout{"tensor2_data2", 2, 2})),
                         NameOf);

}  // namespace
}  // namespace fathom::model
