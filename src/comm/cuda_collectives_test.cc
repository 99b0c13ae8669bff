// Sums and gathers between GPUs against the host's, over fresh random values and poisoned memory,
// in all three kinds; long chains of replayed graphs; a rank that does not come.
#include "comm/cuda_collectives.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <random>

#include "base/float_types.h"
#include "comm/cuda_testing.h"
#include "comm/memory_transport.h"
#include "comm/next_values.h"
#include "kernels/hyper_connection/boundary_large.h"

namespace fathom::comm {
namespace {

constexpr int kMaxRanks = 4;
constexpr CudaGroupOptions kOptions{.hidden = 4096, .max_tokens = 8192, .max_row_values = 20'000};

float ToFloat(BFloat16 value) { return static_cast<float>(value); }

std::vector<BFloat16> RandomValues(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<BFloat16> values(static_cast<size_t>(count));
  for (BFloat16& v : values)
    v = BFloat16(static_cast<float>(static_cast<int32_t>(random())) * 0x1p-30f);
  return values;
}

enum class Kind { kPeers, kNccl, kHost };

Result<CudaGroup> MakeGroup(Kind kind, int size, const CudaGroupOptions& options) {
  const std::vector<int> gpus = FirstGpus(size);
  if (kind == Kind::kPeers) return MakePeerGroup(gpus, options);
  if (kind == Kind::kNccl) {
    ASSIGN_OR_RETURN(const NcclLibrary nccl, LoadNccl());
    return MakeNcclGroup(nccl, gpus, options);
  }
  CudaGroup group;
  for (auto& transport : MakeMemoryTransports(size, options.timeout)) {
    ASSIGN_OR_RETURN(auto collectives, MakeHostCollectives(std::move(transport), options));
    group.push_back(std::move(collectives));
  }
  return group;
}

__nv_bfloat16* Bf16(const device::Buffer& buffer) {
  return reinterpret_cast<__nv_bfloat16*>(buffer.data());
}

// A rank's part of a sum: a row a token, or the shared expert's row and routed experts' elsewhere.
struct Part {
  std::vector<BFloat16> rows;
  std::vector<int32_t> pair_of;  // [tokens, k]
  int k = 0;

  Part(int64_t tokens, int64_t hidden, int num_chosen, uint32_t seed)
      : rows(RandomValues(tokens * (num_chosen + 1) * hidden, seed)), k(num_chosen) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < tokens * k; ++i) {
      pair_of.push_back(
          static_cast<int32_t>(tokens + random() % static_cast<uint32_t>(tokens * k)));
    }
  }
  // Of token t, column c: rounded once.
  float Value(int64_t t, int64_t c, int64_t hidden) const {
    float sum = 0;
    for (int i = 0; i < k; ++i) {
      sum +=
          ToFloat(rows[static_cast<size_t>(pair_of[static_cast<size_t>(t * k + i)] * hidden + c)]);
    }
    const float own = ToFloat(rows[static_cast<size_t>(t * hidden + c)]);
    return k == 0 ? own : ToFloat(BFloat16(sum + own));
  }
};

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
  // NCCL adds up more than two in BF16 and in its own order.
  float Tolerance() const {
    const auto [kind, size] = GetParam();
    return kind == Kind::kNccl && size > 2 ? 0x1p-6f : 0.0f;
  }

  void ExpectSum(int64_t tokens, int64_t hidden, int k) {
    std::vector<Part> parts;
    for (int r = 0; r < ranks_->size(); ++r) {
      parts.emplace_back(tokens, hidden, k, static_cast<uint32_t>(tokens * 100 + r));
    }
    std::vector<std::vector<BFloat16>> sums(parts.size());
    ranks_->OnAll([&](TestRank& rank) {
      const auto r = static_cast<size_t>(rank.collectives->rank());
      const auto rows = rank.Upload(parts[r].rows), y = rank.Poisoned(tokens * hidden * 2);
      const auto pair_of = rank.Upload(parts[r].pair_of);
      kernels::CudaCombineParams combine{
          .output = {.y = Bf16(rows)}, .num_tokens = tokens, .hidden = hidden, .y = Bf16(y)};
      if (k > 0) {
        combine.output.pair_of = reinterpret_cast<const int32_t*>(pair_of.data());
        combine.output.num_chosen = k;
      }
      const auto sum = rank.collectives->Sum(combine, *rank.stream);
      ASSERT_TRUE(sum.ok()) << sum.status().message();
      ASSERT_EQ(sum->pair_of, nullptr);
      rank.collectives->EndStep(*rank.stream);
      sums[r] = rank.Download<BFloat16>(sum->y, static_cast<size_t>(tokens * hidden));
      EXPECT_TRUE(rank.collectives->Check().ok());
    });
    for (size_t r = 0; r < sums.size(); ++r) {
      for (int64_t i = 0; i < tokens * hidden; ++i) {
        float expected = 0;
        for (const Part& part : parts) expected += part.Value(i / hidden, i % hidden, hidden);
        expected = ToFloat(BFloat16(expected));
        const float actual = ToFloat(sums[r][static_cast<size_t>(i)]);
        ASSERT_LE(std::fabs(actual - expected), Tolerance() * 4)
            << "rank " << r << " value " << i << " of " << tokens << " tokens";
      }
    }
  }

  std::unique_ptr<TestRanks> ranks_;
};

TEST_P(CudaCollectivesTest, SumsAreTheHosts) {
  for (const int64_t tokens : {1, 2, 3, 16, 17, 64, 255, 256, 300, 1000}) {
    ExpectSum(tokens, 256, 0);
    ExpectSum(tokens, 4096, 0);
  }
  ExpectSum(8192, 4096, 0);
  ExpectSum(1, 4096, 0);
}

TEST_P(CudaCollectivesTest, SumsOfExpertsAreTheHosts) {
  for (const int64_t tokens : {1, 7, 65, 255, 256, 700}) ExpectSum(tokens, 1024, 6);
}

TEST_P(CudaCollectivesTest, ColumnsOfAllRanksMeet) {
  kernels::GatheredColumns columns;
  for (int r = 0; r < ranks_->size(); ++r) {
    columns.begin[r + 1] = columns.begin[r] + 4096 + 64 * (r % 2);
  }
  const int64_t width = columns.begin[ranks_->size()];
  for (const int64_t rows : {1, 3, 64, 300}) {
    const auto value = [&](int64_t i) { return static_cast<float>(i % 100'003) - 50'000.0f; };
    ranks_->OnAll([&](TestRank& rank) {
      const int r = rank.collectives->rank();
      std::vector<float> own(static_cast<size_t>(rows * width), std::nanf(""));
      for (int64_t i = 0; i < rows * width; ++i) {
        const bool mine = i % width >= columns.begin[r] && i % width < columns.begin[r + 1];
        if (mine) own[static_cast<size_t>(i)] = value(i);
      }
      const auto buffer = rank.Upload(own);
      auto* const values = reinterpret_cast<float*>(buffer.data());
      ASSERT_TRUE(rank.collectives->GatherColumns(values, rows, columns, *rank.stream).ok());
      rank.collectives->EndStep(*rank.stream);
      const auto all = rank.Download<float>(values, own.size());
      for (int64_t i = 0; i < rows * width; ++i) {
        ASSERT_EQ(all[static_cast<size_t>(i)], value(i)) << "rank " << r << " value " << i;
      }
    });
  }
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

// An odd number of exchanges a step, of both kinds, thousands of times, no rank waiting for another
// but in them.
TEST_P(CudaPeersTest, AReplayedChainOfSumsIsTheHosts) {
  constexpr int kReplays = 2000;
  constexpr int64_t kHidden = 256, kSizes[] = {1, 256, 5};
  TestRanks ranks = Make({.hidden = kHidden, .max_tokens = 256, .max_row_values = 0});
  std::vector<std::vector<BFloat16>> sums(static_cast<size_t>(ranks.size()));
  ranks.OnAll([&](TestRank& rank) {
    const int r = rank.collectives->rank();
    const auto x = rank.Poisoned(256 * kHidden * 2), y = rank.Poisoned(256 * kHidden * 2);
    CHECK_EQ(cudaMemset(y.data(), 0, static_cast<size_t>(y.bytes())), cudaSuccess);
    LaunchNextValues(Bf16(y), 256 * kHidden, r, Bf16(x), *rank.stream);
    const cudaGraphExec_t graph = Capture(rank, [&] {
      for (const int64_t tokens : kSizes) {
        const auto sum = rank.collectives->Sum(
            {.output = {.y = Bf16(x)}, .num_tokens = tokens, .hidden = kHidden, .y = Bf16(y)},
            *rank.stream);
        LaunchNextValues(sum->y, tokens * kHidden, r, Bf16(x), *rank.stream);
      }
      rank.collectives->EndStep(*rank.stream);
    });
    for (int i = 0; i < kReplays; ++i) {
      ASSERT_EQ(cudaGraphLaunch(graph, rank.cuda_stream()), cudaSuccess);
    }
    sums[static_cast<size_t>(r)] = rank.Download<BFloat16>(x.data(), 256 * kHidden);
    EXPECT_TRUE(rank.collectives->Check().ok()) << rank.collectives->Check().message();
    cudaGraphExecDestroy(graph);
  });
  std::vector<std::vector<float>> x(static_cast<size_t>(ranks.size()));
  for (int r = 0; r < ranks.size(); ++r) {
    for (int64_t i = 0; i < 256 * kHidden; ++i) {
      x[static_cast<size_t>(r)].push_back(NextValue(0, i, r));
    }
  }
  for (int n = 0; n < kReplays; ++n) {
    for (const int64_t tokens : kSizes) {
      for (int64_t i = 0; i < tokens * kHidden; ++i) {
        float sum = 0;
        for (const auto& values : x) sum += values[static_cast<size_t>(i)];
        const uint32_t bits = BFloat16(sum).bits;
        for (int r = 0; r < ranks.size(); ++r) {
          x[static_cast<size_t>(r)][static_cast<size_t>(i)] = NextValue(bits, i, r);
        }
      }
    }
  }
  for (int r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < x[0].size(); ++i) {
      ASSERT_EQ(ToFloat(sums[static_cast<size_t>(r)][i]), x[static_cast<size_t>(r)][i])
          << "rank " << r << " value " << i;
    }
  }
}

TEST_P(CudaPeersTest, ARankThatDoesNotComeIsNamed) {
  for (const int64_t tokens : {1, 300}) {
    TestRanks ranks = Make({.hidden = 256,
                            .max_tokens = 300,
                            .max_row_values = 0,
                            .timeout = std::chrono::milliseconds(300)});
    const int missing = ranks.size() - 1;
    ranks.OnAll([&](TestRank& rank) {
      if (rank.collectives->rank() == missing) return;
      const auto x = rank.Poisoned(tokens * 256 * 2), y = rank.Poisoned(tokens * 256 * 2);
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < 20; ++i) {  // the first waits, the others know
        const auto sum = rank.collectives->Sum(
            {.output = {.y = Bf16(x)}, .num_tokens = tokens, .hidden = 256, .y = Bf16(y)},
            *rank.stream);
        ASSERT_TRUE(sum.ok());
        rank.collectives->EndStep(*rank.stream);
      }
      ASSERT_TRUE(rank.stream->Synchronize().ok());
      EXPECT_LT(Seconds(std::chrono::steady_clock::now() - begin), 2.0);
      const Status status = rank.collectives->Check();
      EXPECT_EQ(status.code(), StatusCode::kPeer);
      EXPECT_NE(status.message().find("rank " + std::to_string(missing) + " (GPU"),
                std::string::npos)
          << status.message();
    });
  }
}

// A boundary that makes the sum itself against a sum and a boundary.
TEST_P(CudaPeersTest, ABoundaryMakesTheSumItself) {
  constexpr int64_t kHidden = 4096;
  constexpr int kChosen = 6;
  TestRanks ranks = Make({.hidden = kHidden, .max_tokens = 16, .max_row_values = 0});
  for (const int64_t tokens : {1, 2, 3, 8}) {
    for (const bool experts : {false, true}) {
      ranks.OnAll([&](TestRank& rank) {
        const int r = rank.collectives->rank();
        const Part part(tokens, kHidden, experts ? kChosen : 0, static_cast<uint32_t>(r + 7));
        const auto rows = rank.Upload(part.rows), pair_of = rank.Upload(part.pair_of);
        const auto streams = RandomValues(tokens * 4 * kHidden, 5);
        const auto floats = [&rank](int64_t count, float scale, uint32_t seed) {
          std::vector<float> values;
          for (const BFloat16 v : RandomValues(count, seed)) values.push_back(scale * ToFloat(v));
          return rank.Upload(values);
        };
        const auto fn = floats(24 * 4 * kHidden, 0.01f, 6), scale = floats(3, 1, 7);
        const auto base = floats(24, 1, 8), post = floats(tokens * 4, 1, 9);
        const auto comb = floats(tokens * 16, 1, 10);
        const auto norm = rank.Upload(RandomValues(kHidden, 11));
        const auto post_out = rank.Poisoned(tokens * 16), comb_out = rank.Poisoned(tokens * 64);
        const auto h = rank.Poisoned(8 * kHidden * 2), codes = rank.Poisoned(8 * kHidden);
        const auto scales = rank.Poisoned(8 * kHidden / 32),
                   y = rank.Poisoned(tokens * kHidden * 2);
        const auto as_floats = [](const device::Buffer& b) {
          return reinterpret_cast<float*>(b.data());
        };
        std::vector<std::vector<BFloat16>> results;
        for (const bool fused : {true, false}) {
          const auto own_streams = rank.Upload(streams);
          kernels::CudaHyperConnectionParams p{
              .streams = Bf16(own_streams),
              .num_tokens = tokens,
              .hidden = kHidden,
              .output = {.y = Bf16(rows)},
              .before = {as_floats(post), as_floats(comb)},
              .fn = as_floats(fn),
              .scale = as_floats(scale),
              .base = as_floats(base),
              .norm_weight = Bf16(norm),
              .constants = {1e-6f, 1e-6f, 20},
              .after = {as_floats(post_out), as_floats(comb_out)},
              .h = {Bf16(h), 1},
              .h_fp8 = {reinterpret_cast<uint8_t*>(codes.data()), as_floats(scales), 1}};
          if (experts) {
            p.output.pair_of = reinterpret_cast<const int32_t*>(pair_of.data());
            p.output.num_chosen = kChosen;
          }
          if (fused) {
            p.exchange = rank.collectives->SumInBoundary(tokens);
            ASSERT_EQ(p.exchange.peers.size, ranks.size()) << tokens << " tokens";
          } else {
            p.output = *rank.collectives->Sum(
                {.output = p.output, .num_tokens = tokens, .hidden = kHidden, .y = Bf16(y)},
                *rank.stream);
          }
          kernels::Launch(p, *rank.stream);
          rank.collectives->EndStep(*rank.stream);
          results.push_back(rank.Download<BFloat16>(own_streams.data(),
                                                    static_cast<size_t>(tokens * 4 * kHidden)));
          results.push_back(rank.Download<BFloat16>(h.data(), static_cast<size_t>(8 * kHidden)));
        }
        EXPECT_TRUE(rank.collectives->Check().ok());
        // The compiler may fuse a product and a sum in one kernel and not in the other.
        for (const size_t i : {0, 1}) {
          size_t different = 0;
          for (size_t k = 0; k < results[i].size(); ++k) {
            different += results[i][k].bits == results[i + 2][k].bits ? 0 : 1;
          }
          EXPECT_LE(different, results[i].size() / 1000) << (i == 0 ? "streams" : "input");
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaPeersTest, testing::Values(2, kMaxRanks));

}  // namespace
}  // namespace fathom::comm
