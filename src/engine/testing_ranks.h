// What tests of several ranks share: scripted models that run in lock-step.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/memory_transport.h"
#include "comm/node_group.h"
#include "config/parallel_config.h"
#include "engine/make_engine.h"
#include "runtime/testing/fake_model.h"

namespace fathom::engine {

inline constexpr int kVocab = 96;
inline constexpr int32_t kEos = 1;

// Logits that depend on every token so far, with something to draw from.
inline void HashOfAll(std::span<const int32_t> token_ids, int64_t, std::span<float> logits) {
  uint64_t h = 1;
  for (const int32_t id : token_ids) h = (h ^ static_cast<uint64_t>(id)) * 0x100000001b3u;
  for (float& x : logits) {
    h = h * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<float>(h >> 40) * 0x1p-22f;
  }
}

inline EngineOptions FakeOptions(const config::ParallelConfig& parallel) {
  return {.model_name = "fake",
          .vocab_size = kVocab,
          .eos_token_ids = {kEos},
          .num_layers = runtime::kFakeLayers,
          .num_experts_per_token = runtime::kFakeExpertsPerToken,
          .limits = {.max_batched_tokens = 256, .max_num_seqs = 4, .max_model_len = 2048},
          .parallel = parallel,
          .max_queue = 64};
}

// A FakeModel that tells all ranks of its step how many tokens it runs, and expects what the batch
// says of them: a rank that misses a step, or runs another, ends the test.
class LockStepModel final : public model::DeepSeekV4 {
 public:
  LockStepModel(const config::ParallelConfig& parallel, comm::Transport& transport, int vocab_size,
                runtime::FakeModel::Script script)
      : parallel_(parallel), transport_(transport), model_(vocab_size, std::move(script)) {}

  Status Forward(const model::ForwardBatch& batch, const model::KvCacheView& kv, float* logits,
                 device::Stream& stream, model::ChoiceRecorder* recorder) override {
    RETURN_IF_ERROR(model_.Forward(batch, kv, logits, stream, recorder));
    const auto num_tokens = static_cast<int32_t>(batch.token_ids.size());
    std::vector<int32_t> all(static_cast<size_t>(parallel_.world_size()), num_tokens);
    std::vector<comm::Outgoing> outgoing;
    std::vector<comm::Incoming> incoming;
    for (int rank = 0; rank < parallel_.world_size(); ++rank) {
      if (rank == transport_.rank()) continue;
      outgoing.push_back({rank, std::as_bytes(std::span(&num_tokens, 1))});
      incoming.push_back(
          {rank, std::as_writable_bytes(std::span(&all[static_cast<size_t>(rank)], 1))});
    }
    RETURN_IF_ERROR(transport_.Exchange(outgoing, incoming));
    for (int rank = 0; rank < parallel_.world_size(); ++rank) {
      const auto data = static_cast<size_t>(config::PlaceOf(parallel_, rank).data);
      const int32_t expected =
          batch.data_rank_tokens.empty() ? num_tokens : batch.data_rank_tokens[data];
      EXPECT_EQ(all[static_cast<size_t>(rank)], expected) << "of rank " << rank;
    }
    return OkStatus();
  }

  int64_t num_steps() const { return model_.num_steps(); }

 private:
  const config::ParallelConfig parallel_;
  comm::Transport& transport_;
  runtime::FakeModel model_;
};

// Ranks of a layout: all, as threads of one process, or those of a node.
struct FakeRanks {
  using ScriptOf = std::function<runtime::FakeModel::Script(int rank)>;

  FakeRanks(const config::ParallelConfig& parallel, int vocab_size, const ScriptOf& script)
      : transports(comm::MakeMemoryTransports(parallel.world_size(), std::chrono::hours(1))) {
    for (auto& transport : transports) Add(parallel, vocab_size, script, *transport);
  }
  FakeRanks(const config::ParallelConfig& parallel, int vocab_size, const ScriptOf& script,
            comm::NodeGroup& nodes) {
    const comm::NodeInfo& self = nodes.nodes()[static_cast<size_t>(nodes.node_rank())];
    for (int i = 0; i < self.num_ranks; ++i) {
      Add(parallel, vocab_size, script, nodes.transport(i));
    }
  }

  std::unique_ptr<device::Device> device = device::MakeCpuDevice(1);
  std::vector<std::unique_ptr<comm::Transport>> transports;
  std::vector<std::unique_ptr<LockStepModel>> models;
  std::vector<EngineRank> ranks;

 private:
  void Add(const config::ParallelConfig& parallel, int vocab_size, const ScriptOf& script,
           comm::Transport& transport) {
    const int rank = transport.rank();
    models.push_back(
        std::make_unique<LockStepModel>(parallel, transport, vocab_size, script(rank)));
    ranks.push_back({.model = models.back().get(),
                     .device = device.get(),
                     .layout = runtime::FakeLayout(),
                     .place = config::PlaceOf(parallel, rank),
                     .transport = &transport});
  }
};

}  // namespace fathom::engine
