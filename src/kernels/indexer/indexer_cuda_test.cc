// Index selection against the CPU's. Scores are summed in another order and the tensor core keeps
// about 13 bits of a dot product, so entries within that of the last chosen score may be exchanged.
#include "kernels/indexer/indexer_cuda.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "kernels/cuda_batch_testing.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/indexer/index_vector.h"
#include "kernels/indexer/indexer.h"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_cuda.h"

namespace fathom::kernels {
namespace {

using config::IndexKeyDType;

struct Shape {
  int num_heads;
  int topk;
  IndexKeyDType dtype;
  std::vector<TestSequence> sequences;
  int rounds = 1;         // the workspace holds the scores of 1 / rounds of the tokens
  float weight = 1;       // of all heads
  int padding = 3;        // tokens behind the step's
  int table_entries = 0;  // that the tables are for, where these are more than there are
  int strong_pages = 0;   // every so many-th page has larger keys
};

class IndexSelectCudaTest : public CudaTest {
 protected:
  void Run(const Shape& shape, bool equal_keys = false) {
    int longest = 0;
    for (const TestSequence& s : shape.sequences) {
      longest = std::max(longest, s.num_computed + s.num_tokens);
    }
    TestBatch batch(static_cast<int>(shape.sequences.size()), longest, 11);
    batch.SetStep(shape.sequences);
    const int tokens = batch.num_tokens(), heads = shape.num_heads, padding = shape.padding;
    const BatchView view = batch.view();
    std::vector<uint8_t> pool(static_cast<size_t>(batch.num_blocks() * TestPools::kBlockBytes));
    const PagedEntries keys =
        TestPools::Index(reinterpret_cast<std::byte*>(pool.data()), shape.dtype);
    FillKeys(keys, batch.num_blocks(), shape.dtype, equal_keys, shape.strong_pages);
    auto q = RandomActivations<BFloat16>(int64_t{tokens} * heads * 128, 21, 3.0f);
    auto projected = RandomActivations<BFloat16>(int64_t{tokens} * heads, 22);
    const auto frequencies = [] {
      std::vector<float> f;
      for (int i = 0; i < 32; ++i) f.push_back(std::pow(10000.0f, -i / 32.0f));
      return f;
    }();
    std::vector<float> angles(static_cast<size_t>((tokens + padding) * 64));
    for (int t = 0; t < tokens; ++t) {
      RopeAngles(view.positions[static_cast<size_t>(t)], frequencies, angles.data() + t * 64);
    }
    const float scale = shape.weight / std::sqrt(128.0f * static_cast<float>(heads));
    const int max_entries = std::max(longest / 4 + 1, shape.table_entries);

    std::vector<device::Buffer> keep;
    const auto upload = [this](const auto& v) { return Upload(v); };
    const auto gpu_pool = Upload(pool), gpu_q = Upload(q), gpu_projected = Upload(projected);
    const auto gpu_angles = Upload(angles);
    const auto selected = Poisoned(int64_t{tokens + padding} * shape.topk * 4);
    const auto counts = Poisoned((tokens + padding) * 4);
    const int64_t least = MinIndexWorkspaceBytes(tokens + padding, heads, max_entries);
    const int64_t most = IndexWorkspaceBytes(tokens + padding, heads, max_entries);
    const auto workspace = Poisoned(std::max(least, least + (most - least) / shape.rounds));
    const auto lists = Upload(std::vector<uint8_t>(IndexListsBytes(), 0));
    CudaIndexSelectParams p;
    p.batch = batch.OnDevice(upload, keep, padding);
    p.q = As<const __nv_bfloat16>(gpu_q);
    p.projected = As<const __nv_bfloat16>(gpu_projected);
    p.projected_stride = heads;
    p.weight_scale = scale;
    p.num_heads = heads;
    p.angles = As<const float>(gpu_angles);
    p.topk = shape.topk;
    p.keys = TestPools::Index(gpu_pool.data(), shape.dtype);
    p.dtype = shape.dtype;
    p.max_entries = max_entries;
    p.workspace = workspace.data();
    p.workspace_bytes = workspace.bytes();
    p.lists = lists.data();
    p.selected = As<int32_t>(selected);
    p.counts = As<int32_t>(counts);
    p.prefill = true;
    LaunchNumbered(p);
    const auto gpu_selected = Download<int32_t>(selected), gpu_counts = Download<int32_t>(counts);

    Launch(IndexQueryParams<BFloat16>{.q = q.data(),
                                      .num_tokens = tokens,
                                      .num_heads = heads,
                                      .dim = 128,
                                      .rope_dim = 64,
                                      .angles = angles.data(),
                                      .dtype = shape.dtype},
           *cpu_stream_);
    std::vector<uint64_t> scratch(static_cast<size_t>(4 * max_entries));
    std::vector<int32_t> cpu_selected(static_cast<size_t>(tokens * shape.topk)), cpu_counts(tokens);
    Launch(IndexSelectParams<BFloat16>{.batch = view,
                                       .q = q.data(),
                                       .projected = projected.data(),
                                       .weight_scale = scale,
                                       .num_heads = heads,
                                       .dim = 128,
                                       .topk = shape.topk,
                                       .keys = keys,
                                       .dtype = shape.dtype,
                                       .scratch = scratch.data(),
                                       .max_entries = max_entries,
                                       .selected = cpu_selected.data(),
                                       .counts = cpu_counts.data()},
           *cpu_stream_);
    size_t exchanged = 0, chosen = 0;
    for (int t = 0; t < tokens; ++t) {
      const int32_t* cpu = cpu_selected.data() + t * shape.topk;
      const int32_t* gpu = gpu_selected.data() + t * shape.topk;
      const int n = cpu_counts[static_cast<size_t>(t)];
      ASSERT_EQ(gpu_counts[static_cast<size_t>(t)], n) << "token " << t;
      for (int i = 0; i + 1 < n; ++i) ASSERT_LT(gpu[i], gpu[i + 1]) << t << ' ' << i;
      std::vector<int32_t> only_cpu, only_gpu;
      std::set_difference(cpu, cpu + n, gpu, gpu + n, std::back_inserter(only_cpu));
      std::set_difference(gpu, gpu + n, cpu, cpu + n, std::back_inserter(only_gpu));
      exchanged += only_cpu.size(), chosen += static_cast<size_t>(n);
      ASSERT_TRUE(!equal_keys || only_cpu.empty()) << "token " << t;
      for (size_t i = 0; i < only_cpu.size(); ++i) {
        const auto [a, a_size] = Score(view, keys, shape, q, projected, scale, t, only_cpu[i]);
        const auto [b, b_size] = Score(view, keys, shape, q, projected, scale, t, only_gpu[i]);
        ASSERT_LE(std::fabs(a - b), 0x1p-11 * (a_size + b_size)) << "token " << t;
      }
    }
    EXPECT_LE(exchanged * 100, chosen) << exchanged << " of " << chosen;
    p.prefill = false;
    LaunchNumbered(p);
    auto of_decode = Download<int32_t>(selected);
    for (int t = 0; t < tokens; ++t) {
      const auto begin = of_decode.begin() + t * shape.topk;
      const int entries = (view.positions[static_cast<size_t>(t)] + 1) / 4;
      // Several blocks have selected; not clusters.
      for (int i = 0; tokens < 4 && entries > 4096 && i + 1 < shape.topk; ++i) {
        const auto [a, a_size] = Score(view, keys, shape, q, projected, scale, t, begin[i]);
        const auto [b, b_size] = Score(view, keys, shape, q, projected, scale, t, begin[i + 1]);
        ASSERT_GE(a, b - 0x1p-11 * (a_size + b_size)) << "token " << t << ", the best " << i;
        ASSERT_TRUE(!equal_keys || begin[i] < begin[i + 1]) << "token " << t;
      }
      std::sort(begin, begin + cpu_counts[static_cast<size_t>(t)]);
    }
    EXPECT_TRUE(of_decode == gpu_selected);
    if (max_entries > shape.topk && (!kIsRacecheck || tokens < 3)) {
      ExpectSameBesideProducts(p, selected);
    }
    for (int t = tokens; t < tokens + padding; ++t) {
      EXPECT_EQ(gpu_counts[static_cast<size_t>(t)], -1) << "a padding token was written";
    }
  }

  // As the only launch of a step.
  void LaunchNumbered(CudaIndexSelectParams p) {
    numbers_.push_back(Upload(std::vector<uint32_t>{2 * ++launches_}));
    p.number = {As<uint32_t>(numbers_.back())};
    Launch(p, *gpu_stream_);
  }

  // Entries are the same whether they are selected behind the queries' product, beside it, or by
  // who makes the queries, step after step.
  void ExpectSameBesideProducts(CudaIndexSelectParams p, const device::Buffer& selected) {
    const int64_t tokens = p.batch.num_tokens, rows = p.num_heads * 128;
    const int64_t cols = tokens == 1 ? 1024 : 256;
    const TestMatrix w = RandomMatrix(WeightDType::kFp8, rows, cols, 41);
    const auto data = Upload(w.data), scales = Upload(w.scales);
    const auto tiles = Poisoned(TiledBytes(TileKind::kFp8, rows, cols));
    WeightMatrix on_gpu = w.view;
    on_gpu.data = data.data(), on_gpu.scales = As<uint8_t>(scales);
    const auto w_tiles = LaunchTileWeights(on_gpu, TileKind::kFp8, tiles.data(), *gpu_stream_);
    CudaGemmParams products{.num_problems = 2, .num_tokens = tokens};
    products.problems[0].w = w_tiles;
    const bool makes = MakesIndexQueries(products, p.num_heads, p.max_entries);
    if (!makes && !AwaitsWords(products, p.num_heads, p.max_entries)) return;
    const HostFp8Tiles x =
        MakeFp8Tiles(RandomActivations<BFloat16>(tokens * cols, 42), tokens, cols, kTileRows);
    const auto codes = Upload(x.codes), x_scales = Upload(x.scales);
    const auto q = Poisoned(tokens * rows * 2), other = Poisoned(tokens * rows * 2),
               again = Poisoned(tokens * rows * 2);
    GemmProblem problem;
    problem.w = w_tiles;
    problem.x_fp8 = {As<uint8_t>(codes), As<float>(x_scales), 1};
    problem.y = q.data(), problem.y_stride = rows;
    products.problems[0] = products.problems[1] = problem;
    products.problems[1].y = other.data();
    Launch(products, *gpu_stream_);
    p.q = As<const __nv_bfloat16>(q);
    LaunchNumbered(p);
    const auto behind = Download<int32_t>(selected);
    const auto others = Download<uint16_t>(other);

    const auto words = Upload(std::vector<uint2>(static_cast<size_t>(tokens * rows / 2)));
    const auto packets = Upload(std::vector<uint4>(kQueryPackets));
    const auto entries = Upload(std::vector<uint2>(static_cast<size_t>(tokens * p.topk)));
    const auto number = Upload(std::vector<uint32_t>{2 * ++launches_}),
               frequencies = Upload(RandomFloats(32, 43));
    const auto unused = Poisoned(tokens * 64 * 4), begun = Poisoned(4);
    products.problems[0].output = GemmOutput::kNumbered;
    products.problems[0].y = words.data();
    products.number = p.number = {As<uint32_t>(number), 1, As<uint32_t>(begun)};
    p.q = nullptr;
    if (makes) {
      p.product = problem, p.query_packets = As<uint4>(packets);
      products.problems[1].y = again.data();
    } else {
      p.q_words = As<const uint2>(words);
    }
    const auto begin_step = [&] {
      Launch(CudaRopeAnglesParams{.positions = p.batch.positions,
                                  .num_tokens = p.batch.num_tokens,
                                  .frequencies_plain = As<float>(frequencies),
                                  .frequencies_compressed = As<float>(frequencies),
                                  .angles_plain = As<float>(unused),
                                  .angles_compressed = As<float>(unused),
                                  .number = As<uint32_t>(number),
                                  .num_numbers = 2},
             *gpu_stream_);
    };
    for (int step = 0; step < (kIsRacecheck ? 1 : 3); ++step) {
      begin_step();
      if (!makes) Launch(products, *gpu_stream_);
      p.selected_words = makes && step != 1 ? As<uint2>(entries) : nullptr;
      Launch(p, *gpu_stream_);
      if (makes) {
        Launch(ProductsBehindSelection(products, {}, p.max_entries), *gpu_stream_);
        EXPECT_TRUE(Download<uint16_t>(again) == others) << "step " << step;
      }
      if (p.selected_words != nullptr) {
        ExpectTold(behind, entries, Download<uint32_t>(number)[0] + 3);
      } else {
        EXPECT_TRUE(Download<int32_t>(selected) == behind) << "step " << step;
      }
    }
    p.selected_words = nullptr;
    if (!makes || !spread_) return;
    for (const int ranks : {2, 3, 4, 8}) {
      if (!RanksShareEntries(RanksOnThisGpu(ranks), p.max_entries)) continue;
      for (const int rank : Sweep({0, ranks - 1}, {1})) {
        begin_step();
        ExpectSameOfRank(p, rank, ranks, selected, behind);
      }
    }
  }

  static PeerView RanksOnThisGpu(int ranks) {
    PeerView peers;
    peers.size = ranks;
    cudaDeviceGetAttribute(&peers.num_multiprocessors, cudaDevAttrMultiProcessorCount, 0);
    return peers;
  }
  // The ranks, one after the other on this GPU: each tells all what is best of its part and awaits
  // the others in vain, but the last one, `rank`, for which all is there.
  void ExpectSameOfRank(CudaIndexSelectParams p, int rank, int ranks,
                        const device::Buffer& selected, const std::vector<int32_t>& expected) {
    PeerView peers = RanksOnThisGpu(ranks);
    std::vector<device::Buffer> lists;
    for (int r = 0; r < ranks; ++r) {
      lists.push_back(
          Upload(std::vector<uint8_t>(static_cast<size_t>(SharedIndexListsBytes()), 0)));
      peers.memory[r] = lists.back().data();
    }
    const auto select = [&](int r) {
      const auto state = Upload(std::vector<uint32_t>(64, 0));
      peers.timeout_ns = r == rank ? 60'000'000'000 : kIsRacecheck ? 2'000'000'000 : 10'000'000;
      peers.rank = r, peers.failed = As<uint32_t>(state), peers.timed_out = peers.failed + 32;
      p.peers = peers, p.lists = peers.memory[r];
      Launch(p, *gpu_stream_);
      return Download<uint32_t>(state)[32];
    };
    for (int r = 0; r < ranks; ++r) {
      if (r == rank) continue;
      const uint32_t in_vain = select(r);
      EXPECT_TRUE(in_vain > static_cast<uint32_t>(r) + 1 ||
                  in_vain == static_cast<uint32_t>(rank) + 1)
          << "rank " << r << " waited for " << in_vain;
      for (const int32_t entry : Download<int32_t>(selected)) {
        ASSERT_TRUE(entry >= 0 && entry < p.max_entries) << entry;
      }
    }
    EXPECT_EQ(select(rank), 0u) << "rank " << rank << " of " << ranks;
    EXPECT_TRUE(Download<int32_t>(selected) == expected) << "rank " << rank << " of " << ranks;
  }

  void ExpectTold(const std::vector<int32_t>& expected, const device::Buffer& words,
                  uint32_t number) {
    const auto told = Download<uint2>(words);
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(static_cast<int32_t>(told[i].x), expected[i]) << "word " << i;
      ASSERT_EQ(told[i].y, number) << "word " << i;
    }
  }

  // The score in double, and the sum of its terms' magnitudes.
  static std::pair<double, double> Score(const BatchView& view, const PagedEntries& keys,
                                         const Shape& shape, const std::vector<BFloat16>& q,
                                         const std::vector<BFloat16>& projected, float scale, int t,
                                         int entry) {
    const auto seq = static_cast<size_t>(view.token_seq[static_cast<size_t>(t)]);
    const int32_t block = view.block_tables[seq * static_cast<size_t>(view.max_blocks) +
                                            static_cast<size_t>(entry / 64)];
    float key[128];
    LoadIndexKey(keys.At(block, entry % 64), 128, shape.dtype, key);
    double score = 0, size = 0;
    for (int h = 0; h < shape.num_heads; ++h) {
      const int row_of_head = t * shape.num_heads + h;
      const auto row = static_cast<size_t>(row_of_head);
      double dot = 0, terms = 0;
      for (size_t i = 0; i < 128; ++i) {
        const double product = double{ToFloat(q[row * 128 + i])} * key[i];
        dot += product, terms += std::fabs(product);
      }
      const double weight = RoundToBFloat16(ToFloat(projected[row]) * scale);
      score += std::max(dot, 0.0) * weight;
      size += terms / 4 * std::fabs(weight);
    }
    return {score, size};
  }

  static void FillKeys(const PagedEntries& keys, int blocks, IndexKeyDType dtype, bool equal,
                       int strong_pages = 0) {
    const auto noise = RandomFloats(1 << 17, 31);
    std::mt19937 random(32);
    for (int b = 0; b < blocks; ++b) {
      for (int e = 0; e < 64; ++e) {
        float values[128];
        const size_t start = equal ? 0 : random() % (noise.size() - 128);
        for (size_t i = 0; i < 128; ++i) {
          // Blocks of different sizes, so that their scales differ.
          float size = 1.0f + static_cast<float>((i / 32 + start) % 4 * (start % 3));
          if (strong_pages > 0 && b % strong_pages == 0) size *= 8;
          values[i] = RoundToBFloat16(noise[start + i] * size);
        }
        StoreIndexKey(values, 128, dtype, keys.At(b, e));
      }
    }
  }

  bool spread_ = true;  // the best entries: ranks select in one round
  uint32_t launches_ = 0;
  std::vector<device::Buffer> numbers_;
};

// Steps of a prompt: few tokens are selected for by other kernels than many.
class IndexStepsCudaTest : public IndexSelectCudaTest {
 protected:
  static constexpr int kBefore = kIsRacecheck ? 2600 : 7000, kHeads = 64, kTopk = 512,
                       kTotal = kBefore + kWholeStep;

  void SetUp() override {
    IndexSelectCudaTest::SetUp();
    if (gpu_ == nullptr) return;
    q_ = RandomActivations<BFloat16>(int64_t{kWholeStep} * kHeads * 128, 21, 3.0f);
    projected_ = RandomActivations<BFloat16>(int64_t{kWholeStep} * kHeads, 22);
  }

  std::vector<int32_t> Run(IndexKeyDType dtype, const device::Buffer& pool, const TestStep& step) {
    batch_.SetStep({{kBefore + step.first, step.num_tokens}});
    const int tokens = step.num_tokens, max_entries = (kBefore + step.first + tokens) / 4;
    std::vector<float> angles(static_cast<size_t>(tokens * 64)), frequencies;
    for (int i = 0; i < 32; ++i) frequencies.push_back(std::pow(10000.0f, -i / 32.0f));
    for (int t = 0; t < tokens; ++t) {
      RopeAngles(kBefore + step.first + t, frequencies, angles.data() + t * 64);
    }
    const auto rows = [&](const std::vector<BFloat16>& all, int64_t width) {
      const auto begin = all.begin() + step.first * width;
      return Upload(std::vector<BFloat16>(begin, begin + tokens * width));
    };
    std::vector<device::Buffer> keep;
    const auto upload = [this](const auto& v) { return Upload(v); };
    const auto q = rows(q_, kHeads * 128), projected = rows(projected_, kHeads);
    const auto gpu_angles = Upload(angles), selected = Poisoned(int64_t{tokens} * kTopk * 4);
    const auto counts = Poisoned(tokens * 4);
    const auto workspace = Poisoned(IndexWorkspaceBytes(tokens, kHeads, max_entries));
    const auto lists = Upload(std::vector<uint8_t>(IndexListsBytes(), 0));
    CudaIndexSelectParams p;
    p.batch = batch_.OnDevice(upload, keep);
    p.q = As<const __nv_bfloat16>(q);
    p.projected = As<const __nv_bfloat16>(projected);
    p.projected_stride = kHeads;
    p.weight_scale = 1 / std::sqrt(128.0f * kHeads);
    p.num_heads = kHeads;
    p.angles = As<const float>(gpu_angles);
    p.topk = kTopk;
    p.keys = TestPools::Index(pool.data(), dtype);
    p.dtype = dtype;
    p.max_entries = max_entries;
    p.workspace = workspace.data();
    p.workspace_bytes = workspace.bytes();
    p.lists = lists.data();
    p.selected = As<int32_t>(selected);
    p.counts = As<int32_t>(counts);
    p.prefill = true;
    LaunchNumbered(p);
    return Download<int32_t>(selected);
  }

  TestBatch batch_{1, kTotal, 11};
  std::vector<BFloat16> q_, projected_;
};

TEST_F(IndexStepsCudaTest, ATokenSelectsTheSameInEveryStep) {
  for (const IndexKeyDType dtype : {IndexKeyDType::kFp4, IndexKeyDType::kFp8}) {
    std::vector<uint8_t> pool(static_cast<size_t>(batch_.num_blocks() * TestPools::kBlockBytes));
    FillKeys(TestPools::Index(reinterpret_cast<std::byte*>(pool.data()), dtype),
             batch_.num_blocks(), dtype, false);
    const auto gpu_pool = Upload(pool);
    const auto whole = Run(dtype, gpu_pool, {0, kWholeStep});
    for (const TestStep& step : TestSteps()) {
      const auto part = Run(dtype, gpu_pool, step);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + step.first * kTopk))
          << step.num_tokens << " tokens";
    }
  }
}

TEST_F(IndexSelectCudaTest, DecodeMatchesTheCpu) {
  for (const IndexKeyDType dtype : {IndexKeyDType::kFp4, IndexKeyDType::kFp8}) {
    Run({64, 512, dtype, {{8191, 1}}});
    Run({64, 512, dtype, {{2048, 1}, {2052, 1}, {4099, 1}, {100, 1}, {16380, 1}}});
    Run({32, 512, dtype, {{4098, 3}}});
    Run({64, 512, dtype, {{2048, 1}, {2052, 4}, {100, 2}, {9000, 3}}});
    Run({64, 512, dtype, {{2048, 1}, {2052, 4}, {100, 2}, {9000, 8}, {2047, 1}}});
    Run({64, 1024, dtype, {{4100, 1}, {6052, 4}, {100, 2}, {9000, 8}, {4099, 1}, {5000, 8}}});
  }
}

TEST_F(IndexSelectCudaTest, LongContextsMatchTheCpu) {
  // Alone it makes its queries itself, beside a token of padding it does not.
  const auto run_one = [this](IndexKeyDType dtype, int computed, int table_entries = 0) {
    Shape alone{64, 512, dtype, {{computed, 1}}};
    alone.table_entries = table_entries;
    Run(alone);
    alone.padding = 0;
    Run(alone);
  };
  for (const int computed : {16384, 40000, 131071, 262143}) run_one(IndexKeyDType::kFp4, computed);
  // On some of the multiprocessors, and on all, beside the products behind it.
  run_one(IndexKeyDType::kFp8, 40000);
  run_one(IndexKeyDType::kFp8, 140000, 1 << 18);
  run_one(IndexKeyDType::kFp4, 270000, 1 << 18);
  Run({64, 512, IndexKeyDType::kFp4, {{199999, 1}, {70003, 2}}});
  Run({64, 1024, IndexKeyDType::kFp4, {{65535, 1}, {4090, 10}}});
}

// A block for each, which cannot keep the scores of as many entries as of shorter tables.
TEST_F(IndexSelectCudaTest, ManyTokensOfTablesForAMillionMatchTheCpu) {
  for (const IndexKeyDType dtype : {IndexKeyDType::kFp4, IndexKeyDType::kFp8}) {
    Shape shape{64, 512, dtype, {{64400, 1}, {2100, 69}}};
    shape.table_entries = 1 << 18;
    Run(shape);
  }
}

TEST_F(IndexSelectCudaTest, PrefillMatchesTheCpu) {
  Run({64, 512, IndexKeyDType::kFp4, {{1900, 301}, {3000, 100}}});
  Run({64, 512, IndexKeyDType::kFp8, {{4000, 99}}});
  Run({64, 512, IndexKeyDType::kFp4, {{6000, 77}, {2500, 50}}, 7});
}

TEST_F(IndexSelectCudaTest, FewHeadsMatchTheCpu) {
  Run({4, 128, IndexKeyDType::kFp4, {{0, 600}, {511, 30}}});
  Run({4, 128, IndexKeyDType::kFp4, {{900, 1}, {600, 1}, {512, 1}}});
  Run({4, 128, IndexKeyDType::kFp8, {{600, 30}}});
}

TEST_F(IndexSelectCudaTest, EqualScoresGoToTheLowerEntry) {
  Run({64, 512, IndexKeyDType::kFp4, {{30000, 1}, {9000, 3}}}, true);
  Run({64, 512, IndexKeyDType::kFp4, {{250000, 1}}}, true);
  for (const int computed : {100000, 200000}) {
    Run({64, 512, IndexKeyDType::kFp4, {{computed, 1}}, 1, 1, 0}, true);
  }
  Run({64, 512, IndexKeyDType::kFp4, {{2052, 1}, {16380, 1}, {4100, 2}}}, true);
}

// Some blocks have most of the chosen entries, others none.
TEST_F(IndexSelectCudaTest, ChosenEntriesNextToEachOtherMatchTheCpu) {
  for (const int pages : Sweep({7, 40, 100}, {40})) {
    Shape shape{64, 512, IndexKeyDType::kFp4, {{131071, 1}}};
    shape.padding = 0, shape.strong_pages = pages, spread_ = false;
    Run(shape);
    shape.sequences = {{90000, 1}, {80001, 1}};
    Run(shape);
  }
}

TEST_F(IndexSelectCudaTest, TinyScoresMatchTheCpu) {
  // All in the bin of the smallest scores.
  for (const int computed : {3000, 12000, 60000}) {
    Run({64, 512, IndexKeyDType::kFp4, {{computed, 1}}, 1, 0x1p-40f});
  }
}

}  // namespace
}  // namespace fathom::kernels
