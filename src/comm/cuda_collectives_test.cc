// Gathers between GPUs: fresh random parts, poisoned memory, what every rank then has, in all three
// kinds and ways; long chains of replayed graphs; a rank that does not come.
#include "comm/cuda_collectives.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <thread>

#include "base/float_types.h"
#include "comm/boundary_testing.h"
#include "comm/cuda_testing.h"
#include "comm/missing_rank_testing.h"
#include "comm/next_values.h"
#include "kernels/gemm/gemm_cuda.h"

namespace fathom::comm {
namespace {

using kernels::OutputExchange;

constexpr int kMaxRanks = 4;
constexpr int64_t kSharedBytes = int64_t{64} << 20;
constexpr CudaGroupOptions kOptions{
    .hidden = 4096, .shared_bytes = kSharedBytes, .max_row_bytes = int64_t{1} << 20};

float ToFloat(BFloat16 value) { return static_cast<float>(value); }

template <typename T>
T* As(const device::Buffer& buffer) {
  return reinterpret_cast<T*>(buffer.data());
}

// Cut at multiples of `unit`; uneven, and with `empty` the second rank has nothing.
kernels::RankParts Parts(int size, int64_t total, int64_t unit, bool empty = false) {
  kernels::RankParts parts;
  for (int r = 0; r < size; ++r) parts.begin[r + 1] = total / unit * (r + 1) / size * unit;
  if (empty) parts.begin[2] = parts.begin[1];
  if (empty && size == 2) parts.begin[1] = parts.begin[2] = total;
  return parts;
}

enum class Kind { kPeers, kNccl, kHost };

Result<CudaGroup> MakeGroup(Kind kind, int size, const CudaGroupOptions& options) {
  const std::vector<int> gpus = FirstGpus(size);
  if (kind == Kind::kPeers) return MakePeerGroup(gpus, options);
  if (kind == Kind::kHost) return MakeHostGroup(gpus, options);
  ASSIGN_OR_RETURN(const NcclLibrary nccl, LoadNccl());
  return MakeNcclGroup(nccl, gpus, options);
}

class CudaCollectivesTest : public testing::TestWithParam<std::tuple<Kind, int>> {
 protected:
  void SetUp() override {
    const auto [kind, size] = GetParam();
    const int count = device::CountGpus();
    if (count < size) GTEST_SKIP() << size << " GPUs are needed, there are " << count;
    auto group = MakeGroup(kind, size, kOptions);
    if (kind == Kind::kNccl && group.status().code() == StatusCode::kNotFound) {
      GTEST_SKIP() << group.status().message();
    }
    ASSERT_TRUE(group.ok()) << group.status().message();
    ranks_ = std::make_unique<TestRanks>(std::move(*group));
  }

  // Fills the front of a rank's shared memory; before any rank begins to gather, since others write
  // there.
  static void Put(TestRank& rank, const void* values, size_t bytes) {
    CHECK_LE(bytes, static_cast<size_t>(kSharedBytes));
    CHECK(rank.stream->Copy(rank.collectives->shared_memory(), values, static_cast<int64_t>(bytes))
              .ok());
    CHECK(rank.stream->Synchronize().ok());
  }

  void ExpectTiles(int64_t tokens, int k, const kernels::RankParts& blocks);
  // shares: whose each token is; empty: all ranks'.
  void ExpectOutput(int64_t tokens, int k, const kernels::RankParts& columns,
                    const kernels::RankParts& shares = {});
  void ExpectLogits(int64_t rows, const kernels::RankParts& columns);

  std::unique_ptr<TestRanks> ranks_;
};

// Codes and scales are numbers of their place, but where a rank has nothing of its own.
void CudaCollectivesTest::ExpectTiles(int64_t tokens, int k, const kernels::RankParts& blocks) {
  const int64_t groups = (tokens * (1 + k) * 2 + 7) / 8 + 3, rows = groups * 8;
  const int64_t num_blocks = blocks.begin[ranks_->size()];
  const auto code_bytes = static_cast<size_t>(rows * num_blocks * 128);
  const auto scale_count = static_cast<size_t>(rows * num_blocks);
  std::vector<uint8_t> codes(code_bytes);
  std::vector<float> scales(scale_count);
  std::mt19937 random(static_cast<uint32_t>(tokens * 10 + k));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
  for (float& scale : scales) scale = static_cast<float>(random());
  // Every second row is some pair's.
  std::vector<int32_t> pair_of;
  for (int64_t i = 0; i < tokens * k; ++i) pair_of.push_back(static_cast<int32_t>(tokens + 2 * i));
  const int64_t used = tokens * (1 + 2 * k);
  std::shuffle(pair_of.begin(), pair_of.end(), random);
  ranks_->OnAll([&](TestRank& rank) {
    const int r = rank.collectives->rank();
    std::vector<std::byte> memory(code_bytes + scale_count * 4, std::byte{0xff});
    const auto copy_own = [&](std::byte* to, const void* from, size_t of_block) {
      std::memcpy(
          to + static_cast<size_t>(blocks.begin[r]) * of_block,
          static_cast<const std::byte*>(from) + static_cast<size_t>(blocks.begin[r]) * of_block,
          static_cast<size_t>(blocks.count(r)) * of_block);
    };
    copy_own(memory.data(), codes.data(), static_cast<size_t>(rows) * 128);
    copy_own(memory.data() + code_bytes, scales.data(), static_cast<size_t>(rows) * 4);
    Put(rank, memory.data(), memory.size());
  });
  ranks_->OnAll([&](TestRank& rank) {
    const int r = rank.collectives->rank();
    const auto pairs = rank.Upload(k > 0 ? pair_of : std::vector<int32_t>{0});
    std::byte* const shared = rank.collectives->shared_memory();
    kernels::CudaGatherTilesParams p{
        .exchange = {},
        .tiles = {reinterpret_cast<uint8_t*>(shared), reinterpret_cast<float*>(shared + code_bytes),
                  groups},
        .blocks = blocks,
        .num_tokens = tokens,
        .num_rows = used};
    if (k > 0) p.pair_of = As<int32_t>(pairs), p.num_chosen = k;
    ASSERT_TRUE(rank.collectives->GatherTiles(p, *rank.stream).ok());
    rank.collectives->EndStep(*rank.stream);
    const auto got = rank.Download<uint8_t>(shared, code_bytes + scale_count * 4);
    EXPECT_TRUE(rank.collectives->Check().ok());
    std::vector<int32_t> in_use = pair_of;
    for (int32_t t = 0; t < tokens; ++t) in_use.push_back(t);
    for (const int32_t row : in_use) {
      for (int64_t b = 0; b < num_blocks; ++b) {
        for (int64_t chunk = 0; chunk < 8; ++chunk) {
          const auto at =
              static_cast<size_t>(kernels::Fp8TileOffset(row, b * 128 + chunk * 16, groups));
          ASSERT_EQ(0, std::memcmp(got.data() + at, codes.data() + at, 16))
              << "rank " << r << " row " << row << " block " << b << " of " << tokens;
        }
        const auto scale = static_cast<size_t>(b * rows + row);
        float got_scale = 0;
        std::memcpy(&got_scale, got.data() + code_bytes + scale * 4, sizeof(got_scale));
        ASSERT_EQ(got_scale, scales[scale])
            << "rank " << r << " row " << row << " block " << b << " of " << tokens;
      }
    }
  });
}

// A sub-layer's output: a row a token, or the shared expert's row and routed experts' elsewhere.
struct Output {
  std::vector<BFloat16> rows;
  std::vector<int32_t> pair_of;  // [tokens, k]
  int k = 0;
  int64_t hidden = 0;

  Output(int64_t tokens, int64_t size, int num_chosen, uint32_t seed)
      : rows(RandomValues(tokens * (num_chosen + 1) * size, seed)), k(num_chosen), hidden(size) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < tokens * k; ++i) {
      pair_of.push_back(
          static_cast<int32_t>(tokens + random() % static_cast<uint32_t>(tokens * k)));
    }
    if (k == 0) pair_of.push_back(0);
  }
  BFloat16 Row(int64_t row, int64_t c) const { return rows[static_cast<size_t>(row * hidden + c)]; }
  // Of token t, column c.
  BFloat16 Value(int64_t t, int64_t c) const {
    float sum = 0;
    for (int i = 0; i < k; ++i) sum += ToFloat(Row(pair_of[static_cast<size_t>(t * k + i)], c));
    return k == 0 ? Row(t, c) : BFloat16(sum + ToFloat(Row(t, c)));
  }
  // What a rank has.
  std::vector<BFloat16> Own(const kernels::RankParts& columns, int rank) const {
    std::vector<BFloat16> own(rows.size(), BFloat16(std::nanf("")));
    for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(hidden)) {
      std::copy_n(rows.begin() + static_cast<int64_t>(at) + columns.begin[rank],
                  columns.count(rank),
                  own.begin() + static_cast<int64_t>(at) + columns.begin[rank]);
    }
    return own;
  }
  // Each of `size` ranks' columns become what this one has, as many.
  void Repeat(const kernels::RankParts& columns, int rank, int size) {
    for (auto row = rows.begin(); row != rows.end(); row += hidden) {
      for (int r = 0; r < size; ++r) {
        std::copy_n(row + columns.begin[rank], columns.count(rank), row + columns.begin[r]);
      }
    }
  }
  kernels::SublayerOutput OnGpu(const device::Buffer& own, const device::Buffer& pairs) const {
    return {As<__nv_bfloat16>(own), k > 0 ? As<int32_t>(pairs) : nullptr, k};
  }
};

void CudaCollectivesTest::ExpectOutput(int64_t tokens, int k, const kernels::RankParts& columns,
                                       const kernels::RankParts& shares) {
  const int64_t hidden = columns.begin[ranks_->size()];
  const Output output(tokens, hidden, k, static_cast<uint32_t>(tokens * 100 + k));
  const auto count = static_cast<size_t>(tokens * hidden);
  ranks_->OnAll([&](TestRank& rank) {
    Put(rank, std::vector<std::byte>(count * 2, std::byte{0xff}).data(), count * 2);
  });
  ranks_->OnAll([&](TestRank& rank) {
    const int r = rank.collectives->rank();
    const auto own = rank.Upload(output.Own(columns, r)), pairs = rank.Upload(output.pair_of);
    auto* const y = reinterpret_cast<__nv_bfloat16*>(rank.collectives->shared_memory());
    ASSERT_TRUE(rank.collectives
                    ->GatherOutput({.exchange = {},
                                    .output = output.OnGpu(own, pairs),
                                    .columns = columns,
                                    .num_tokens = tokens,
                                    .y = y,
                                    .tokens = shares},
                                   *rank.stream)
                    .ok());
    rank.collectives->EndStep(*rank.stream);
    const auto got = rank.Download<BFloat16>(y, count);
    EXPECT_TRUE(rank.collectives->Check().ok());
    const bool all = shares.begin[ranks_->size()] == 0;
    const int64_t first = all ? 0 : shares.begin[r], end = all ? tokens : shares.begin[r + 1];
    for (int64_t i = first * hidden; i < end * hidden; ++i) {
      ASSERT_EQ(got[static_cast<size_t>(i)].bits, output.Value(i / hidden, i % hidden).bits)
          << "rank " << r << " value " << i << " of " << tokens << " tokens";
    }
  });
}

void CudaCollectivesTest::ExpectLogits(int64_t rows, const kernels::RankParts& columns) {
  const int64_t width = columns.begin[ranks_->size()];
  const auto value = [&](int64_t i) { return static_cast<float>(i % 100'003) - 50'000.0f; };
  ranks_->OnAll([&](TestRank& rank) {
    const int r = rank.collectives->rank();
    std::vector<float> own(static_cast<size_t>(rows * width), std::nanf(""));
    for (int64_t i = 0; i < rows * width; ++i) {
      const bool mine = i % width >= columns.begin[r] && i % width < columns.begin[r + 1];
      if (mine) own[static_cast<size_t>(i)] = value(i);
    }
    const auto buffer = rank.Upload(own);
    auto* const values = As<float>(buffer);
    ASSERT_TRUE(
        rank.collectives
            ->GatherLogits({.exchange = {}, .values = values, .num_rows = rows, .columns = columns},
                           *rank.stream)
            .ok());
    rank.collectives->EndStep(*rank.stream);
    const auto all = rank.Download<float>(values, own.size());
    for (int64_t i = 0; i < rows * width; ++i) {
      ASSERT_EQ(all[static_cast<size_t>(i)], value(i))
          << "rank " << r << " value " << i << " of " << rows << " rows";
    }
  });
}

TEST_P(CudaCollectivesTest, TilesOfAllRanksMeet) {
  for (const int64_t tokens : {1, 3, 8, 17, 100, 700}) {
    ExpectTiles(tokens, 0, Parts(ranks_->size(), 13, 1));
    ExpectTiles(tokens, 2, Parts(ranks_->size(), 5, 1));
    ExpectTiles(tokens, 2, Parts(ranks_->size(), 5, 1, /*empty=*/true));
  }
  ExpectTiles(3000, 0, Parts(ranks_->size(), 13, 1));
}

TEST_P(CudaCollectivesTest, OutputsOfAllRanksMeet) {
  for (const int64_t tokens : {1, 2, 17, 64, 300, 2000}) {
    ExpectOutput(tokens, 0, Parts(ranks_->size(), 4096, 128));
    ExpectOutput(tokens, 6, Parts(ranks_->size(), 640, 128));
    ExpectOutput(tokens, 2, Parts(ranks_->size(), 256, 128, /*empty=*/true));
  }
  ExpectOutput(8000, 0, Parts(ranks_->size(), 4096, 128));
  for (const int64_t tokens : {512, 2048}) {
    const kernels::RankParts shares = Parts(ranks_->size(), tokens, 128);
    ExpectOutput(tokens, 6, Parts(ranks_->size(), 640, 128), shares);
    ExpectOutput(tokens, 0, Parts(ranks_->size(), 4096, 128), shares);
  }
  ExpectOutput(1, 0, Parts(ranks_->size(), 4096, 128));
}

TEST_P(CudaCollectivesTest, LogitsOfAllRanksMeet) {
  for (const int64_t unit : {2, 64}) {  // an odd number of pairs go as packets, however many
    const kernels::RankParts columns = Parts(ranks_->size(), 16'512 + 2 * unit, unit);
    for (const int64_t rows : {1, 3, 64, 300}) ExpectLogits(rows, columns);
  }
}

// Two of three matrices are sent ahead of the gather, one that lies together and columns of
// another: what the stream makes of them last goes. They are looked at right behind the gather,
// when copies that nobody awaited would still be under way.
TEST_P(CudaCollectivesTest, WhatIsSentAheadMeetsBehindTheNextGather) {
  constexpr int64_t kRows = 3000, kWidth = 4096, kRest = 128, kRounds = 10;
  const int size = ranks_->size();
  const kernels::RankParts rows = Parts(size, kRows, 8), columns = Parts(size, kWidth, 64);
  const auto value = [](int round, int matrix, int owner) {
    return 1 + (round * 31 + matrix * 7 + owner) % 250;
  };
  const bool can = ranks_->operator[](0).collectives->can_send_ahead();
  EXPECT_EQ(can, std::get<0>(GetParam()) == Kind::kPeers);
  ranks_->OnAll([&](TestRank& rank) {
    const int r = rank.collectives->rank();
    std::byte* const shared = rank.collectives->shared_memory();
    // In turn: no memory is in two gathers in a row.
    const auto matrices = [&](int round) {
      std::byte* const at = shared + round % 2 * kRows * (2 * kWidth + kRest);
      return std::array{kernels::GatheredRows(at, kWidth, kWidth, rows, size),
                        kernels::GatheredColumns(at + kRows * kWidth, kRows, 1, columns, size),
                        kernels::GatheredRows(at + 2 * kRows * kWidth, kRest, 64, rows, size)};
    };
    const auto bytes = [&](const kernels::GatheredMatrix& matrix) {
      return static_cast<size_t>(kRows * matrix.pitch);
    };
    const device::Buffer seen = rank.Poisoned(kRows * (2 * kWidth + kRest));
    const auto fill = [&](int round) {
      const auto all = matrices(round);
      for (size_t m = 0; m < all.size(); ++m) {
        const auto& part = all[m].of[r];
        ASSERT_EQ(
            cudaMemset2DAsync(all[m].data + part.offset, static_cast<size_t>(all[m].pitch),
                              value(round, static_cast<int>(m), r), static_cast<size_t>(part.width),
                              static_cast<size_t>(part.height), rank.cuda_stream()),
            cudaSuccess);
      }
    };
    for (int round = 0; round < kRounds; ++round) {
      fill(round);
      const auto all = matrices(round);
      const std::span<const kernels::GatheredMatrix> ahead(all.data(), 2), rest(all.data() + 2, 1);
      if (can) rank.collectives->SendAhead(ahead, *rank.stream);
      ASSERT_TRUE(rank.collectives->Gather(can ? rest : std::span(all), *rank.stream).ok());
      const auto place = [&](size_t m) {
        return static_cast<std::byte*>(seen.data()) + (all[m].data - all[0].data);
      };
      for (const size_t m : {1, 0, 2}) {  // what was sent last first
        ASSERT_EQ(cudaMemcpyAsync(place(m), all[m].data, bytes(all[m]), cudaMemcpyDeviceToDevice,
                                  rank.cuda_stream()),
                  cudaSuccess);
      }
      std::vector<std::vector<uint8_t>> got;
      for (size_t m = 0; m < all.size(); ++m) {
        got.push_back(rank.Download<uint8_t>(place(m), bytes(all[m])));
      }
      for (size_t m = 0; m < all.size(); ++m) {
        for (int from = 0; from < size; ++from) {
          const auto& part = all[m].of[from];
          const std::vector<uint8_t> expected(
              static_cast<size_t>(part.width),
              static_cast<uint8_t>(value(round, static_cast<int>(m), from)));
          for (int64_t row = 0; row < part.height; ++row) {
            const auto at = static_cast<size_t>(part.offset + row * all[m].pitch);
            ASSERT_EQ(0, std::memcmp(got[m].data() + at, expected.data(), expected.size()))
                << "rank " << r << " round " << round << " matrix " << m << " row " << row
                << " from " << from;
          }
        }
      }
    }
    rank.collectives->EndStep(*rank.stream);
    EXPECT_TRUE(rank.stream->Synchronize().ok());
    EXPECT_TRUE(rank.collectives->Check().ok());
  });
}

// The first exchange of a group is one in a graph.
TEST_P(CudaCollectivesTest, AGraphIsCapturedBeforeAnythingElse) {
  if (!ranks_->operator[](0).collectives->is_captured()) GTEST_SKIP() << "the host takes part";
  const kernels::RankParts columns = Parts(ranks_->size(), 1024, 128);
  const std::vector<BFloat16> values = RandomValues(1024, 3);
  ranks_->OnAll([&](TestRank& rank) { Put(rank, values.data(), 2048); });
  ranks_->OnAll([&](TestRank& rank) {
    auto* const y = reinterpret_cast<__nv_bfloat16*>(rank.collectives->shared_memory());
    const cudaGraphExec_t graph = Capture(rank, [&] {
      EXPECT_TRUE(
          rank.collectives
              ->GatherOutput(
                  {.exchange = {}, .output = {.y = y}, .columns = columns, .num_tokens = 1, .y = y},
                  *rank.stream)
              .ok());
      rank.collectives->EndStep(*rank.stream);
    });
    ASSERT_EQ(cudaGraphLaunch(graph, rank.cuda_stream()), cudaSuccess);
    const auto got = rank.Download<BFloat16>(y, 1024);
    EXPECT_EQ(0, std::memcmp(got.data(), values.data(), 2048));
    cudaGraphExecDestroy(graph);
  });
}

std::string NameOf(const testing::TestParamInfo<std::tuple<Kind, int>>& info) {
  const auto [kind, size] = info.param;
  const char* name = kind == Kind::kPeers ? "Peers" : kind == Kind::kNccl ? "Nccl" : "Host";
  return name + std::to_string(size);
}
INSTANTIATE_TEST_SUITE_P(Kinds, CudaCollectivesTest,
                         testing::Combine(testing::Values(Kind::kPeers, Kind::kNccl, Kind::kHost),
                                          testing::Values(2, kMaxRanks)),
                         NameOf);

class CudaNcclTest : public CudaCollectivesTest {};

// NCCL itself waits without end: in a graph, as steps are, and outside of one.
TEST_P(CudaNcclTest, ARankThatDoesNotComeIsNamed) {
  const auto [kind, size] = GetParam();
  for (const bool captured : {false, true}) {
    auto group = MakeGroup(
        kind, size,
        {.hidden = 1024, .shared_bytes = kSharedBytes, .timeout = std::chrono::milliseconds(500)});
    ASSERT_TRUE(group.ok()) << group.status().message();
    TestRanks ranks(*group);
    const int missing = size - 1;
    const auto step = [size](TestRank& rank) {
      auto* const y = reinterpret_cast<__nv_bfloat16*>(rank.collectives->shared_memory());
      for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(rank.collectives
                        ->GatherOutput({.exchange = {},
                                        .output = {.y = y},
                                        .columns = Parts(size, 1024, 128),
                                        .num_tokens = 4,
                                        .y = y},
                                       *rank.stream)
                        .ok());
      }
      rank.collectives->EndStep(*rank.stream);
    };
    // A step of all, then a rest longer than the timeout, which is nobody's fault.
    ranks.OnAll([&](TestRank& rank) {
      step(rank);
      ASSERT_TRUE(rank.stream->Synchronize().ok());
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    ranks.OnAll([&](TestRank& rank) {
      EXPECT_TRUE(rank.collectives->Check().ok());
      if (rank.collectives->rank() == missing) return;
      const auto begin = std::chrono::steady_clock::now();
      cudaGraphExec_t graph = nullptr;
      if (captured) {
        graph = Capture(rank, [&] { step(rank); });
        ASSERT_EQ(cudaGraphLaunch(graph, rank.cuda_stream()), cudaSuccess);
      } else {
        step(rank);
      }
      ASSERT_TRUE(rank.stream->Synchronize().ok());
      EXPECT_LT(Seconds(std::chrono::steady_clock::now() - begin), 3.0);
      ExpectMissingIsNamed(*rank.collectives, missing);
      if (graph != nullptr) cudaGraphExecDestroy(graph);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaNcclTest,
                         testing::Combine(testing::Values(Kind::kNccl),
                                          testing::Values(2, kMaxRanks)),
                         NameOf);

class CudaPeersTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const int count = device::CountGpus();
    if (count < GetParam()) GTEST_SKIP() << GetParam() << " GPUs are needed, there are " << count;
  }
  TestRanks Make(const CudaGroupOptions& options) const {
    return TestRanks(MakePeerGroup(FirstGpus(GetParam()), options).value());
  }
};

// Exchanges as packets and as plain values, thousands of times, no rank waiting for another but in
// them. Each value is made of a neighbour's of the exchange before, which is another
// rank's at the parts' ends.
TEST_P(CudaPeersTest, AReplayedChainOfGathersLosesNothing) {
  constexpr int kReplays = 2000;
  constexpr int64_t kHidden = 1024, kMostTokens = 4000;  // which go as plain values
  constexpr int64_t kSizes[] = {1, kMostTokens, 5};
  TestRanks ranks = Make(kOptions);
  const kernels::RankParts columns = Parts(ranks.size(), kHidden, 128);
  std::vector<std::vector<BFloat16>> results(static_cast<size_t>(ranks.size()));
  ranks.OnAll([&](TestRank& rank) {
    constexpr size_t kBytes = 2 * kMostTokens * kHidden * sizeof(BFloat16);
    CHECK_EQ(cudaMemset(rank.collectives->shared_memory(), 0, kBytes), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);  // before others write there
  });
  ranks.OnAll([&](TestRank& rank) {
    const int r = rank.collectives->rank();
    auto* const shared = reinterpret_cast<__nv_bfloat16*>(rank.collectives->shared_memory());
    // Two places that take turns.
    const auto place = [&](int i) { return shared + (i % 2) * kMostTokens * kHidden; };
    const cudaGraphExec_t graph = Capture(rank, [&] {
      for (int i = 0; i < 6; ++i) {
        const int64_t tokens = kSizes[i % 3];
        LaunchNextValues(place(i + 1), place(i), kHidden, kSizes[(i + 2) % 3], tokens,
                         columns.begin[r], columns.begin[r + 1], *rank.stream);
        ASSERT_TRUE(rank.collectives
                        ->GatherOutput({.exchange = {},
                                        .output = {.y = place(i)},
                                        .columns = columns,
                                        .num_tokens = tokens,
                                        .y = place(i)},
                                       *rank.stream)
                        .ok());
      }
      rank.collectives->EndStep(*rank.stream);
    });
    for (int i = 0; i < kReplays; ++i) {
      ASSERT_EQ(cudaGraphLaunch(graph, rank.cuda_stream()), cudaSuccess);
    }
    results[static_cast<size_t>(r)] = rank.Download<BFloat16>(place(1), 5 * kHidden);
    EXPECT_TRUE(rank.collectives->Check().ok()) << rank.collectives->Check().message();
    cudaGraphExecDestroy(graph);
  });
  std::vector<uint16_t> values[2];
  for (auto& v : values) v.resize(static_cast<size_t>(kMostTokens * kHidden));
  // A token's values depend on no others but the first's, so few tokens are enough.
  for (int n = 0; n < 6 * kReplays; ++n) {
    const int64_t tokens = kSizes[n % 3], before = kSizes[(n + 2) % 3];
    const auto& from = values[(n + 1) % 2];
    auto& to = values[n % 2];
    for (int64_t i = 0; i < std::min<int64_t>(tokens, 5) * kHidden; ++i) {
      to[static_cast<size_t>(i)] = NextValue(from.data(), i, kHidden, before);
    }
  }
  for (int r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < 5 * kHidden; ++i) {
      ASSERT_EQ(results[static_cast<size_t>(r)][i].bits, values[1][i])
          << "rank " << r << " value " << i;
    }
  }
}

TEST_P(CudaPeersTest, ARankThatDoesNotComeIsNamed) {
  for (const int64_t tokens : {1, 4000}) {
    TestRanks ranks = Make(
        {.hidden = 1024, .shared_bytes = kSharedBytes, .timeout = std::chrono::milliseconds(300)});
    const int missing = ranks.size() - 1;
    ranks.OnAll([&](TestRank& rank) {
      if (rank.collectives->rank() == missing) return;
      auto* const y = reinterpret_cast<__nv_bfloat16*>(rank.collectives->shared_memory());
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < 20; ++i) {  // the first waits, the others know
        ASSERT_TRUE(rank.collectives
                        ->GatherOutput({.exchange = {},
                                        .output = {.y = y},
                                        .columns = Parts(ranks.size(), 1024, 128),
                                        .num_tokens = tokens,
                                        .y = y},
                                       *rank.stream)
                        .ok());
        rank.collectives->EndStep(*rank.stream);
      }
      ASSERT_TRUE(rank.stream->Synchronize().ok());
      EXPECT_LT(Seconds(std::chrono::steady_clock::now() - begin), 2.0);
      ExpectMissingIsNamed(*rank.collectives, missing);
    });
  }
}

constexpr int64_t kBoundaryHidden = 4096;

// Of these the last three are boundary_large.h's.
constexpr int64_t kBoundaryTokens[] = {1, 2, 3, 8, 11, 16, 17, 40, 64};
constexpr int64_t kAddedTokens[] = {1, 2, 3, 8, 11, 16};

// A boundary that completes its input itself has the bits of one whose input is complete.
TEST_P(CudaPeersTest, ABoundaryGathersItself) {
  TestRanks ranks = Make(kOptions);
  const kernels::RankParts columns = Parts(ranks.size(), kBoundaryHidden, 128);
  for (const int64_t tokens : kBoundaryTokens) {
    for (const int chosen : {0, 6}) {
      const Output output(tokens, kBoundaryHidden, chosen, 7);
      ranks.OnAll([&](TestRank& rank) {
        const auto own = rank.Upload(output.Own(columns, rank.collectives->rank()));
        const auto whole = rank.Upload(output.rows), pairs = rank.Upload(output.pair_of);
        const auto gather =
            rank.collectives->GatherInBoundary(columns, OutputExchange::Sent::kNothing);
        ASSERT_EQ(gather.exchange.peers.size, ranks.size()) << tokens << " tokens";
        const auto actual =
            RunBoundary(rank, tokens, kBoundaryHidden, output.OnGpu(own, pairs), gather);
        ExpectSameBits(actual,
                       RunBoundary(rank, tokens, kBoundaryHidden, output.OnGpu(whole, pairs), {}),
                       tokens);
        EXPECT_TRUE(rank.collectives->Check().ok());
      });
    }
  }
}

// A product that reads so many columns, the same on every rank.
struct TestProduct {
  device::Buffer tiles, scales, x, x_scales;
  kernels::CudaGemmParams params;

  TestProduct(const TestRank& rank, int64_t cols, int64_t tokens) {
    const int64_t padded = kernels::PaddedTokens(tokens);
    std::mt19937 random(static_cast<uint32_t>(cols));
    const auto bytes = [&](int64_t count, uint32_t mask, uint32_t base) {
      std::vector<uint32_t> words(static_cast<size_t>(count / 4));
      for (uint32_t& word : words) word = (static_cast<uint32_t>(random()) & mask) + base;
      return rank.Upload(words);
    };
    tiles = bytes(kBoundaryHidden * cols, 0xf7f7f7f7, 0);  // codes that are numbers
    scales = bytes(kBoundaryHidden / 128 * cols / 128, 0x07070707, 0x6e6e6e6e);
    x = bytes(padded * cols, 0xf7f7f7f7, 0);
    x_scales = rank.Upload(std::vector<float>(static_cast<size_t>(padded * cols / 128), 0x1p-6f));
    params.num_problems = 1;
    params.num_tokens = tokens;
    params.problems[0] = {.w = {.kind = kernels::TileKind::kFp8,
                                .rows = kBoundaryHidden,
                                .cols = cols,
                                .tiles = tiles.data(),
                                .scales = As<uint8_t>(scales)},
                          .x_fp8 = {As<uint8_t>(x), As<float>(x_scales), padded / 8},
                          .x_bf16 = {},
                          .y_stride = kBoundaryHidden,
                          .y_fp8 = {}};
  }
  kernels::CudaGemmParams Whole(void* y) const {
    kernels::CudaGemmParams whole = params;
    whole.problems[0].y = y;
    return whole;
  }
  kernels::CudaGemmParams Part(int index, int parts, float* sums) const {
    kernels::CudaGemmParams part = params;
    kernels::GemmProblem& p = part.problems[0];
    const int64_t block = p.w.col_blocks() / parts * index;
    p.w.matrix_cols = p.w.cols;
    p.w.cols /= parts;
    p.w.tiles += block * kernels::TileMatrixBytes(p.w.kind);
    p.w.scales += block;
    p.x_fp8.codes += block * p.x_fp8.row_groups * kernels::kTileBytes;
    p.x_fp8.scales += block * p.x_fp8.row_groups * kernels::kTileRows;
    p.output = kernels::GemmOutput::kF32;
    p.y = sums;
    return part;
  }
};

// Each rank multiplies some of the columns: the bits of one that multiplies all.
TEST_P(CudaPeersTest, ABoundaryAddsUpWhatAllRanksMultiply) {
  TestRanks ranks = Make(kOptions);
  const kernels::RankParts columns = Parts(ranks.size(), kBoundaryHidden, 128);
  for (const int64_t tokens : kAddedTokens) {
    ranks.OnAll([&](TestRank& rank) {
      for (const int64_t cols : {4096, 8192}) {
        const TestProduct product(rank, cols, tokens);
        const auto sums = rank.Poisoned(tokens * kBoundaryHidden * 4);
        const auto none = rank.Poisoned(tokens * kBoundaryHidden * 2);
        const auto y = rank.Poisoned(tokens * kBoundaryHidden * 2);
        const OutputExchange add =
            rank.collectives->GatherInBoundary(columns, OutputExchange::Sent::kSums);
        kernels::Launch(kernels::CudaColumnSumsParams{product.Part(rank.collectives->rank(),
                                                                   ranks.size(), As<float>(sums)),
                                                      add.exchange},
                        *rank.stream);
        const auto actual =
            RunBoundary(rank, tokens, kBoundaryHidden, {.y = As<__nv_bfloat16>(none)}, add);
        kernels::Launch(product.Whole(y.data()), *rank.stream);
        ExpectSameBits(actual,
                       RunBoundary(rank, tokens, kBoundaryHidden, {.y = As<__nv_bfloat16>(y)}, {}),
                       tokens);
        EXPECT_TRUE(rank.collectives->Check().ok());
      }
    });
  }
}

class CudaLoneRankTest : public testing::Test {
 protected:
  void SetUp() override {
    if (device::CountGpus() == 0) GTEST_SKIP() << "a GPU is needed";
  }
};

TEST_F(CudaLoneRankTest, GathersNothingAndReadsFiniteValues) {
  auto lone = MakeLoneRank(1, 8, 0, kOptions);
  ASSERT_TRUE(lone.ok()) << lone.status().message();
  TestRanks ranks(CudaGroup{*lone});
  ranks.OnAll([](TestRank& rank) {
    std::byte* const shared = rank.collectives->shared_memory();
    const kernels::CudaGatherTilesParams tiles{
        .exchange = {},
        .tiles = {reinterpret_cast<uint8_t*>(shared), reinterpret_cast<float*>(shared), 1},
        .blocks = Parts(8, 16, 1),
        .num_tokens = 8,
        .num_rows = 8};
    EXPECT_EQ(rank.collectives->rank(), 1);
    EXPECT_EQ(rank.collectives->size(), 8);
    ASSERT_TRUE(rank.collectives->GatherTiles(tiles, *rank.stream).ok());
    rank.collectives->EndStep(*rank.stream);
    for (const float value : rank.Download<float>(shared, kSharedBytes / 4)) {
      ASSERT_TRUE(std::isfinite(value) && value != 0);
    }
    EXPECT_TRUE(rank.collectives->Check().ok());
  });
  EXPECT_EQ(MakeLoneRank(0, 9, 0, kOptions).status().code(), StatusCode::kDevice);
}

TEST_F(CudaLoneRankTest, HearsItsOwnColumnsFromTheOthers) {
  constexpr int kRank = 3, kSize = 8;
  auto lone = MakeLoneRank(kRank, kSize, 0, kOptions);
  ASSERT_TRUE(lone.ok()) << lone.status().message();
  TestRanks ranks(CudaGroup{*lone});
  const kernels::RankParts columns = Parts(kSize, kBoundaryHidden, 128);
  for (const int64_t tokens : kBoundaryTokens) {
    for (const int chosen : {0, 6}) {
      Output output(tokens, kBoundaryHidden, chosen, 7);
      output.Repeat(columns, kRank, kSize);
      ranks.OnAll([&](TestRank& rank) {
        const auto own = rank.Upload(output.Own(columns, kRank));
        const auto whole = rank.Upload(output.rows), pairs = rank.Upload(output.pair_of);
        const auto gather =
            rank.collectives->GatherInBoundary(columns, OutputExchange::Sent::kNothing);
        ASSERT_EQ(gather.exchange.peers.size, kSize);
        ExpectSameBits(RunBoundary(rank, tokens, kBoundaryHidden, output.OnGpu(own, pairs), gather),
                       RunBoundary(rank, tokens, kBoundaryHidden, output.OnGpu(whole, pairs), {}),
                       tokens);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaPeersTest, testing::Values(2, kMaxRanks));

}  // namespace
}  // namespace fathom::comm
