// No step asks for more than a GPU has: all launches of Flash's and Pro's layers, for any number of
// tokens behind contexts of any length, alone and on a rank of two and four, without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/shard.h"
#include "comm/cuda_testing.h"
#include "model/cuda_testing.h"
#include "model/no_gpu.h"

namespace fathom::model {
namespace {

constexpr int kMaxSeqs = 300, kMaxTokens = 8192, kMaxLength = 1 << 20;

// Of an H200.
bool Fits(const Launched& l) {
  const unsigned threads = l.block.x * l.block.y * l.block.z;
  return l.grid.x > 0 && l.grid.y > 0 && l.grid.z > 0 && l.grid.x < 1u << 31 &&
         l.grid.y < 1u << 16 && l.grid.z < 1u << 16 && threads > 0 && threads <= 1024 &&
         l.cluster <= 16 && l.grid.x % l.cluster == 0 && l.shared_bytes <= 227 << 10;
}

using Param = std::tuple<const char*, int>;  // preset, ranks

class LaunchesTest : public testing::TestWithParam<Param> {
 protected:
  void MakeModel(kv_cache::IndexKeyDType dtype) {
    const auto& [preset, size] = GetParam();
    auto config =
        checkpoint::ParseModelConfig(checkpoint::PresetConfigText(preset).value(), preset).value();
    config.num_layers = 3;  // one of each kind
    config.compress_ratios = {0, 4, 128};
    config.draft = config::DraftKind::kNone;
    config.num_draft_blocks = 0;
    const ModelLimits limits{kMaxTokens, kMaxSeqs, kMaxLength};
    CudaModelOptions options{.enforce_eager = true};
    const auto whole = checkpoint::MakeSyntheticSource(config, 1);
    std::unique_ptr<checkpoint::TensorSource> sharded;
    model_ = nullptr;
    stream_ = nullptr;
    device_ = std::move(device::MakeCudaDevice(0).value());
    stream_ = std::move(device_->MakeStream().value());
    if (size > 1) {
      const config::ParallelConfig parallel{.tensor_parallel_size = size};
      const config::RankPlace place = PlaceOf(parallel, 0);
      const auto shard = WithWholeAttention(config, parallel,
                                            checkpoint::MakeShard(config, parallel, place).value());
      options.collectives =
          comm::MakePeerGroup(comm::FirstGpus(size), GroupOptions(config, limits, size)).value()[0];
      options.rank = {parallel, place, nullptr};
      sharded = checkpoint::MakeShardedSource(*whole, config, shard);
      config = shard.config;
    }
    auto model = MakeDeepSeekV4Cuda(config, dtype, sharded == nullptr ? *whole : *sharded, true,
                                    limits, *device_, options);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::move(*model);
  }

  // The first sequence behind `context` tokens, others behind fewer.
  void Step(int num_seqs, int tokens_each, int context, bool has_prompt) {
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
    OnLaunch([&](const Launched& l) {
      if (Fits(l) || HasFailure()) return;  // the first says it all
      ADD_FAILURE() << l.kernel << " (" << l.grid.x << ", " << l.grid.y << ", " << l.grid.z
                    << ") in clusters of " << l.cluster << " with " << l.shared_bytes
                    << " bytes: " << num_seqs << " sequences of " << tokens_each << " tokens, "
                    << context << " before";
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
                             .expert_ids = {}};
    ASSERT_TRUE(model_->Forward(batch, {}, nullptr, *stream_, nullptr).ok());
  }

  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<DeepSeekV4> model_;
};

TEST_P(LaunchesTest, AllFit) {
  for (const auto dtype : {kv_cache::IndexKeyDType::kFp4, kv_cache::IndexKeyDType::kFp8}) {
    MakeModel(dtype);
    if (HasFatalFailure()) return;
    for (int seqs = 1; seqs <= kMaxSeqs; seqs += seqs < 140 ? 1 : 7) {
      for (const int context : {1, 200, 2051, 4000, 16000, 20000, 40000, 70000, 140000, 262143,
                                270000, 530000, 1048000}) {
        Step(seqs, 1, context, false);
      }
    }
    for (int tokens = 1; tokens <= kMaxTokens; tokens = std::max(tokens + 1, tokens * 33 / 32)) {
      for (const int context : {0, 5000, 130000, 1030000}) Step(1, tokens, context, true);
    }
    for (int seqs = 2; seqs <= 64; ++seqs) {
      for (const int tokens : {2, 3, 33, 120}) Step(seqs, tokens, 3000, true);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, LaunchesTest,
                         testing::Combine(testing::Values("flash", "pro"),
                                          testing::Values(1, 2, 4)),
                         [](const auto& param) {
                           return std::get<0>(param.param) +
                                  std::to_string(std::get<1>(param.param));
                         });

}  // namespace
}  // namespace fathom::model
