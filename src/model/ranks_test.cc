// A model spread over ranks gives the bits of one rank, in any layout: no sum is split.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "comm/memory_transport.h"
#include "model/testing.h"

namespace fathom::model {
namespace {

using config::Numerics;
using config::ParallelConfig;

config::ModelConfig Config() {
  config::ModelConfig c = SmallConfig();
  c.num_heads = 8;
  c.o_groups = 4;
  c.o_lora_rank = 128;
  c.moe_intermediate_size = 256;
  return c;
}

// A sequence is run by every rank of its data rank: one copy each.
using Copies = std::vector<TestSequence>;

class RankedModel {
 public:
  RankedModel(const config::ModelConfig& config, Numerics numerics, const ParallelConfig& parallel)
      : parallel_(parallel),
        transports_(comm::MakeMemoryTransports(parallel.world_size(), std::chrono::seconds(60))) {
    for (int r = 0; r < parallel.world_size(); ++r) {
      const ModelRank rank{parallel, PlaceOf(parallel, r),
                           transports_[static_cast<size_t>(r)].get()};
      ranks_.push_back(std::make_unique<TestModel>(config, numerics, 1, 2, 700,
                                                   kv_cache::IndexKeyDType::kFp4, nullptr, nullptr,
                                                   CudaModelOptions{}, rank));
    }
  }

  // Runs sequence d on data rank d, in chunks of at most chunks[d], until all are done: shorter
  // ones leave their data rank without tokens. The copies of rank r are in result[r].
  std::vector<TestSequence> Run(const std::vector<std::vector<int32_t>>& token_ids,
                                const std::vector<int>& chunks) {
    std::vector<TestSequence> sequences;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      sequences.push_back(ranks_[r]->Add(token_ids[DataRankOf(r)]));
    }
    std::vector<std::thread> threads;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      threads.emplace_back([&, r] { RunRank(r, token_ids, chunks, sequences[r]); });
    }
    for (std::thread& thread : threads) thread.join();
    return sequences;
  }

  size_t DataRankOf(size_t rank) const {
    return static_cast<size_t>(PlaceOf(parallel_, static_cast<int>(rank)).data);
  }
  bool HasLogits(size_t rank) const {
    return PlaceOf(parallel_, static_cast<int>(rank)).pipeline ==
           parallel_.pipeline_parallel_size - 1;
  }
  size_t size() const { return ranks_.size(); }

 private:
  void RunRank(size_t rank, const std::vector<std::vector<int32_t>>& token_ids,
               const std::vector<int>& chunks, TestSequence& sequence) {
    std::vector<int> done(token_ids.size());
    while (true) {
      std::vector<int32_t> counts;
      for (size_t d = 0; d < token_ids.size(); ++d) {
        counts.push_back(std::min(chunks[d], static_cast<int>(token_ids[d].size()) - done[d]));
        done[d] += counts.back();
      }
      if (std::all_of(counts.begin(), counts.end(), [](int n) { return n == 0; })) return;
      TestSequence* const own[] = {&sequence};
      const int own_count[] = {counts[DataRankOf(rank)]};
      const size_t num_own = own_count[0] > 0 ? 1 : 0;
      ranks_[rank]->Step(std::span(own).first(num_own), std::span(own_count).first(num_own),
                         nullptr, counts);
    }
  }

  const ParallelConfig parallel_;
  std::vector<std::unique_ptr<comm::Transport>> transports_;
  std::vector<std::unique_ptr<TestModel>> ranks_;
};

struct Layout {
  const char* name;
  ParallelConfig parallel;
};

class ModelRanks : public testing::TestWithParam<Layout> {
 protected:
  // Of every rank that has logits.
  void ExpectTheBitsOfOneRank(Numerics numerics) {
    const ParallelConfig& parallel = GetParam().parallel;
    RankedModel ranked(Config(), numerics, parallel);
    std::vector<std::vector<int32_t>> token_ids;
    std::vector<int> chunks;
    for (int d = 0; d < parallel.data_parallel_size; ++d) {
      token_ids.push_back(RandomTokens(Config(), 300 - 140 * d, static_cast<uint32_t>(d) + 1));
      chunks.push_back(d == 0 ? 129 : 7);
    }
    const auto sequences = ranked.Run(token_ids, chunks);
    for (size_t d = 0; d < token_ids.size(); ++d) {
      TestModel alone(Config(), numerics, 2, 1, 700);
      TestSequence expected = alone.Add(token_ids[d]);
      alone.RunInChunks(expected, chunks[d]);
      for (size_t r = 0; r < ranked.size(); ++r) {
        if (ranked.DataRankOf(r) != d || !ranked.HasLogits(r)) continue;
        ASSERT_EQ(sequences[r].logits.size(), expected.logits.size());
        for (size_t row = 0; row < expected.logits.size(); ++row) {
          ASSERT_EQ(sequences[r].logits[row], expected.logits[row])
              << "rank " << r << " row " << row;
        }
      }
    }
  }
};

TEST_P(ModelRanks, GiveTheBitsOfOneRank) { ExpectTheBitsOfOneRank(Numerics::kOfficial); }
TEST_P(ModelRanks, GiveTheBitsOfOneRankInFp32) { ExpectTheBitsOfOneRank(Numerics::kFp32); }

INSTANTIATE_TEST_SUITE_P(
    Layouts, ModelRanks,
    testing::Values(
        Layout{"Tensor2", {.tensor_parallel_size = 2}},
        Layout{"Tensor4", {.tensor_parallel_size = 4}},
        Layout{"MoreTensorRanksThanGroups", {.tensor_parallel_size = 8}},
        Layout{"Tensor2Experts", {.tensor_parallel_size = 2, .enable_expert_parallel = true}},
        Layout{"Data2", {.data_parallel_size = 2}},
        Layout{"Data2Experts", {.data_parallel_size = 2, .enable_expert_parallel = true}},
        Layout{
            "Tensor2Data2Experts",
            {.tensor_parallel_size = 2, .data_parallel_size = 2, .enable_expert_parallel = true}},
        Layout{"Tensor3", {.tensor_parallel_size = 3}},
        Layout{"Stages2", {.pipeline_parallel_size = 2}},
        Layout{"Stages5", {.pipeline_parallel_size = 5}},
        Layout{"Tensor2Stages3", {.tensor_parallel_size = 2, .pipeline_parallel_size = 3}},
        Layout{"All2",
               {.tensor_parallel_size = 2,
                .data_parallel_size = 2,
                .pipeline_parallel_size = 2,
                .enable_expert_parallel = true}}),
    [](const auto& layout) { return layout.param.name; });

}  // namespace
}  // namespace fathom::model
