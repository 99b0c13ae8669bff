// Tokens go to all ranks, and outputs back to all that have the token, whatever each data rank has
// and whatever carries them: against what the host finds.
#include "comm/cuda_expert_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "comm/cuda_expert_kinds.h"
#include "comm/cuda_testing.h"

namespace fathom::comm {
namespace {

constexpr int64_t kHidden = 512;
constexpr int kExperts = 10, kChosen = 3, kMaxTokens = 100;

// A data rank's tokens in a step, as the host knows them.
struct Tokens {
  int count = 0;
  std::vector<uint8_t> codes;  // tiles
  std::vector<float> scales;
  std::vector<int32_t> seqs;  // -1: padding
  std::vector<int32_t> ids;   // [count, kChosen]
  std::vector<float> weights;
  int64_t row_groups = 0;

  Tokens(int num_tokens, uint32_t seed) : count(num_tokens), row_groups((num_tokens + 7) / 8 + 1) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < row_groups * 8 * kHidden; ++i) {
      codes.push_back(static_cast<uint8_t>(random()));
    }
    for (int64_t i = 0; i < row_groups * 8 * kHidden / 128; ++i) {
      scales.push_back(static_cast<float>(random() % 100));
    }
    for (int t = 0; t < count; ++t) {
      seqs.push_back(t % 7 == 5 ? -1 : t);
      std::set<int32_t> chosen;
      while (chosen.size() < kChosen) chosen.insert(static_cast<int32_t>(random() % kExperts));
      ids.insert(ids.end(), chosen.begin(), chosen.end());
      for (int i = 0; i < kChosen; ++i) weights.push_back(static_cast<float>(random() % 1000));
    }
  }
};

template <typename U>
U* As(const device::Buffer& buffer) {
  return reinterpret_cast<U*>(buffer.data());
}

struct Layout {
  const char* name;
  int data_ranks;
  int tensor_ranks;
  int size() const { return data_ranks * tensor_ranks; }
};

enum class Kind { kPeers, kNccl, kHost };

Result<CudaExpertGroup> MakeRanks(Kind kind, const std::vector<int>& gpus,
                                  const CudaExpertOptions& options) {
  if (kind == Kind::kPeers) return MakePeerExpertRanks(gpus, options);
  const CudaGroupOptions group = ExpertGroupOptions(gpus.size(), options);
  if (kind == Kind::kHost) {
    ASSIGN_OR_RETURN(const CudaGroup all, MakeHostGroup(gpus, group));
    return MakeGatheredExpertRanks(all, gpus, options);
  }
  ASSIGN_OR_RETURN(const NcclLibrary nccl, LoadNccl());
  ASSIGN_OR_RETURN(const CudaGroup all, MakeNcclGroup(nccl, gpus, group));
  return MakeGatheredExpertRanks(all, gpus, options);
}

class CudaExpertRanksTest : public testing::TestWithParam<std::tuple<Kind, Layout>> {
 protected:
  void SetUp() override {
    const int size = layout().size(), count = device::CountGpus();
    const int needed = kind() == Kind::kHost ? 1 : size;
    if (count < needed) GTEST_SKIP() << needed << " GPUs are needed, there are " << count;
    const std::vector<int> gpus = GpusInTurn(size);
    auto made = MakeRanks(kind(), gpus,
                          {.hidden = kHidden,
                           .num_experts = kExperts,
                           .num_chosen = kChosen,
                           .max_tokens = kMaxTokens,
                           .num_tensor_ranks = layout().tensor_ranks,
                           .timeout = std::chrono::milliseconds(500)});
    if (made.status().code() == StatusCode::kNotFound) GTEST_SKIP() << made.status().message();
    ASSERT_TRUE(made.ok()) << made.status().message();
    group_ = std::move(*made);
    ranks_ = std::make_unique<TestRanks>(CudaGroup(static_cast<size_t>(size)), gpus);
  }

  static Kind kind() { return std::get<0>(GetParam()); }
  static const Layout& layout() { return std::get<1>(GetParam()); }
  size_t size() const { return group_.size(); }
  size_t data_ranks() const { return static_cast<size_t>(layout().data_ranks); }
  size_t DataRank(size_t rank) const { return rank / static_cast<size_t>(layout().tensor_ranks); }
  int first_expert(size_t rank) const {
    return kExperts * static_cast<int>(rank) / layout().size();
  }
  bool IsOwn(size_t rank, int32_t expert) const {
    return expert >= first_expert(rank) && expert < first_expert(rank + 1);
  }

  // The layer's tokens, all[d] of data rank d, there and back, on one rank.
  void RunLayer(size_t r, const std::vector<Tokens>& all, int64_t slots, bool is_large) {
    const TestRank& rank = (*ranks_)[r];
    const Tokens& own = all[DataRank(r)];
    const int64_t num_tokens = static_cast<int64_t>(data_ranks()) * slots;
    const int64_t pairs = num_tokens * kChosen;
    const int64_t first_group = (slots + 63) / 64 * 8,
                  rows = first_group * 8 + pairs + kExperts * 8;
    const auto codes = rank.Upload(own.codes), scales = rank.Upload(own.scales);
    const auto ids = rank.Upload(own.ids), weights = rank.Upload(own.weights);
    const auto seqs = rank.Upload(own.seqs);
    const auto pair_of = rank.Poisoned(pairs * 4), pair_weight = rank.Poisoned(rows * 4);
    const auto num_tiles = rank.Poisoned(8);
    const auto progress = rank.Poisoned((1 + slots + pairs + kExperts) * 4);
    const auto tiles =
        rank.Poisoned((pairs + kExperts) * static_cast<int64_t>(sizeof(kernels::ExpertTile)));
    const auto gathered = rank.Poisoned(rows * kHidden);
    const auto gathered_scales = rank.Poisoned(rows * kHidden / 128 * 4);
    group_[r]->Send({.to = {},
                     .num_tokens = own.count,
                     .x = {As<uint8_t>(codes), As<float>(scales), own.row_groups},
                     .expert_ids = As<int32_t>(ids),
                     .weights = As<float>(weights),
                     .token_seq = As<int32_t>(seqs)},
                    slots, *rank.stream);
    const kernels::ExpertPlan plan{.num_tiles = As<int32_t>(num_tiles),
                                   .tiles = As<kernels::ExpertTile>(tiles),
                                   .pair_of = As<int32_t>(pair_of),
                                   .pair_weight = As<float>(pair_weight),
                                   .progress = As<int32_t>(progress),
                                   .is_large = is_large,
                                   .has_narrow = is_large};
    group_[r]->Take({.from = {},
                     .first_expert = first_expert(r),
                     .num_experts = first_expert(r + 1) - first_expert(r),
                     .first_group = first_group,
                     .plan = plan,
                     .gathered = {As<uint8_t>(gathered), As<float>(gathered_scales), rows / 8}},
                    slots, *rank.stream);
    const auto row_of = rank.Download<int32_t>(pair_of.data(), static_cast<size_t>(pairs));
    const auto counts = rank.Download<int32_t>(num_tiles.data(), 2);
    ExpectPlan(
        r, all, slots, row_of,
        rank.Download<kernels::ExpertTile>(tiles.data(), static_cast<size_t>(counts[0])), counts[1],
        kernels::SplitOfTiles(plan, num_tokens, first_expert(r + 1) - first_expert(r), kChosen));
    ExpectGathered(
        all, slots, row_of,
        rank.Download<uint8_t>(gathered.data(), static_cast<size_t>(rows * kHidden)),
        rank.Download<float>(gathered_scales.data(), static_cast<size_t>(rows * kHidden / 128)),
        rank.Download<float>(pair_weight.data(), static_cast<size_t>(rows)), rows / 8);
    // Outputs that name their pair.
    std::vector<uint16_t> y(static_cast<size_t>(rows * kHidden), 0xffff);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      if (row_of[static_cast<size_t>(pair)] < 0) continue;
      for (int64_t c = 0; c < kHidden; ++c) {
        y[static_cast<size_t>(row_of[static_cast<size_t>(pair)] * kHidden + c)] = Output(pair, c);
      }
    }
    const auto outputs = rank.Upload(y);
    group_[r]->Return({.to = {}, .pair_of = As<int32_t>(pair_of), .y = As<__nv_bfloat16>(outputs)},
                      slots, *rank.stream);
    group_[r]->EndStep(*rank.stream);
    ExpectOutputs(r, own, slots);
    ASSERT_TRUE(group_[r]->Check().ok());
  }

  static uint16_t Output(int64_t pair, int64_t column) {
    return static_cast<uint16_t>(pair * 31 + column * 7);
  }

  // Every pair of an own expert has a row of its own, in a tile of its expert, narrow from
  // `num_wide` on.
  void ExpectPlan(size_t r, const std::vector<Tokens>& all, int64_t slots,
                  const std::vector<int32_t>& row_of, const std::vector<kernels::ExpertTile>& tiles,
                  int num_wide, kernels::ExpertTileSplit split) const {
    std::map<int32_t, int32_t> expert_of_row;
    for (const kernels::ExpertTile& tile : tiles) {
      const bool is_wide = &tile - tiles.data() < num_wide;
      EXPECT_LE(tile.num_rows, is_wide ? split.rows : kernels::kNarrowTileRows);
      for (int32_t i = 0; i < tile.num_rows; ++i) {
        EXPECT_TRUE(expert_of_row.emplace(tile.pair_group * 8 + i, tile.expert).second);
      }
    }
    std::set<int32_t> used;
    for (size_t i = 0; i < row_of.size(); ++i) {
      const int64_t token = static_cast<int64_t>(i) / kChosen, t = token % slots;
      const Tokens& of = all[static_cast<size_t>(token / slots)];
      const bool is_token = t < of.count && of.seqs[static_cast<size_t>(t)] >= 0;
      const int32_t expert = is_token ? of.ids[static_cast<size_t>(t * kChosen) + i % kChosen] : -1;
      if (!IsOwn(r, expert)) {
        EXPECT_EQ(row_of[i], -1);
        continue;
      }
      EXPECT_TRUE(used.insert(row_of[i]).second);
      ASSERT_TRUE(expert_of_row.contains(row_of[i]));
      EXPECT_EQ(expert_of_row[row_of[i]], expert - first_expert(r));
    }
    EXPECT_EQ(used.size(), expert_of_row.size());
  }

  void ExpectGathered(const std::vector<Tokens>& all, int64_t slots,
                      const std::vector<int32_t>& row_of, const std::vector<uint8_t>& codes,
                      const std::vector<float>& scales, const std::vector<float>& weights,
                      int64_t row_groups) const {
    for (size_t i = 0; i < row_of.size(); ++i) {
      if (row_of[i] < 0) continue;
      const int64_t row = row_of[i], token = static_cast<int64_t>(i) / kChosen, t = token % slots;
      const Tokens& of = all[static_cast<size_t>(token / slots)];
      EXPECT_EQ(weights[static_cast<size_t>(row)],
                of.weights[static_cast<size_t>(t * kChosen) + i % kChosen]);
      for (int64_t c = 0; c < kHidden; ++c) {
        ASSERT_EQ(codes[static_cast<size_t>(kernels::Fp8TileOffset(row, c, row_groups))],
                  of.codes[static_cast<size_t>(kernels::Fp8TileOffset(t, c, of.row_groups))]);
        ASSERT_EQ(scales[static_cast<size_t>(c / 128 * row_groups * 8 + row)],
                  of.scales[static_cast<size_t>(c / 128 * of.row_groups * 8 + t)]);
      }
    }
  }

  void ExpectOutputs(size_t r, const Tokens& own, int64_t slots) const {
    const TestRank& rank = (*ranks_)[r];
    const auto rows =
        rank.Download<int32_t>(group_[r]->pair_of(), static_cast<size_t>(slots * kChosen));
    const int64_t num_rows = rows.back() + 1;
    const auto y =
        rank.Download<uint16_t>(group_[r]->outputs(), static_cast<size_t>(num_rows * kHidden));
    for (int64_t t = 0; t < own.count; ++t) {
      if (own.seqs[static_cast<size_t>(t)] < 0) continue;
      for (int64_t i = t * kChosen; i < (t + 1) * kChosen; ++i) {
        const int64_t pair = static_cast<int64_t>(DataRank(r)) * slots * kChosen + i;
        for (int64_t c = 0; c < kHidden; ++c) {
          ASSERT_EQ(y[static_cast<size_t>(rows[static_cast<size_t>(i)] * kHidden + c)],
                    Output(pair, c));
        }
      }
    }
  }

  CudaExpertGroup group_;
  std::unique_ptr<TestRanks> ranks_;
};

TEST_P(CudaExpertRanksTest, EveryTokenReachesItsExpertsAndTheirOutputsComeBack) {
  const std::vector<std::vector<int>> steps = {{1, 1},   {9, 0},  {0, 64},
                                               {100, 3}, {8, 17}, {64, 64}};
  for (size_t i = 0; i < steps.size(); ++i) {
    std::vector<Tokens> all;
    for (size_t d = 0; d < data_ranks(); ++d) {
      all.emplace_back(steps[i][d % 2], static_cast<uint32_t>(10 * i + d));
    }
    const int64_t slots =
        kernels::ExpertSlots(layout().data_ranks, std::max(steps[i][0], steps[i][1]));
    std::vector<std::thread> threads;
    for (size_t r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] {
        CHECK_EQ(cudaSetDevice((*ranks_)[r].gpu), cudaSuccess);
        RunLayer(r, all, slots, i % 2 == 1);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// Not with NCCL, which waits for ever.
using CudaExpertRanksTimeoutTest = CudaExpertRanksTest;

TEST_P(CudaExpertRanksTimeoutTest, ARankThatDoesNotComeIsNamed) {
  const TestRank& rank = (*ranks_)[0];
  CHECK_EQ(cudaSetDevice(0), cudaSuccess);
  const auto memory = rank.Poisoned(1 << 20);
  group_[0]->Send({}, 16, *rank.stream);
  group_[0]->Take({.from = {},
                   .num_experts = first_expert(1),
                   .plan = {As<int32_t>(memory), As<kernels::ExpertTile>(memory) + 64,
                            As<int32_t>(memory) + 65536, As<float>(memory) + 131072,
                            As<int32_t>(memory) + 220000},
                   .gathered = {As<uint8_t>(memory) + (600 << 10), As<float>(memory) + 200000, 8}},
                  16, *rank.stream);
  ASSERT_TRUE(rank.stream->Synchronize().ok());
  const Status status = group_[0]->Check();
  EXPECT_EQ(status.code(), StatusCode::kPeer);
  EXPECT_NE(status.message().find("rank 0 waited 0.5 s for rank"), std::string::npos)
      << status.message();
}

std::string NameOf(const testing::TestParamInfo<CudaExpertRanksTest::ParamType>& param) {
  static constexpr const char* kNames[] = {"Peers", "Nccl", "Host"};
  const auto& [kind, layout] = param.param;
  return std::string(kNames[static_cast<int>(kind)]) + layout.name;
}

auto Layouts() {
  return testing::Values(Layout{"Data2", 2, 1}, Layout{"Tensor2", 1, 2}, Layout{"Data4", 4, 1},
                         Layout{"Data2Tensor2", 2, 2}, Layout{"Tensor4", 1, 4});
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaExpertRanksTest,
                         testing::Combine(testing::Values(Kind::kPeers, Kind::kNccl, Kind::kHost),
                                          Layouts()),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Ranks, CudaExpertRanksTimeoutTest,
                         testing::Combine(testing::Values(Kind::kPeers, Kind::kHost), Layouts()),
                         NameOf);

}  // namespace
}  // namespace fathom::comm
