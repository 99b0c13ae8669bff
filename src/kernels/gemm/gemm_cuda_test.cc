// Weight products on a GPU against FP64 sums of the same values. The bound: one rounding to the
// output's type, and for FP8 what the tensor core's accumulator drops, at most 4 * 2^-13 of a
// block's magnitudes (its fraction has 13 bits; four steps a block).
#include "kernels/gemm/gemm_cuda.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda_testing.h"
#include "kernels/gemm/output_alone_cuda.h"
#include "kernels/gemm/output_batch_cuda.h"
#include "kernels/gemm/output_rows_cuda.h"

namespace fathom::kernels {
namespace {

WeightDType DTypeOf(TileKind kind) {
  if (kind == TileKind::kBf16) return WeightDType::kBF16;
  return kind == TileKind::kFp4 ? WeightDType::kFp4 : WeightDType::kFp8;
}

struct Case {
  TileKind kind;
  int64_t rows, cols;
  int groups = 1;
  GemmOutput output = GemmOutput::kBf16;
};

class GemmCudaTest : public CudaTest {
 protected:
  // A product with everything it needs on the GPU.
  struct Problem {
    TestMatrix w;
    std::vector<float> x;  // [tokens, groups * cols]
    std::vector<device::Buffer> buffers;
    GemmProblem gemm;
    device::Buffer y, y_scales;
  };

  device::Buffer& Keep(Problem& p, device::Buffer buffer) {
    p.buffers.push_back(std::move(buffer));
    return p.buffers.back();
  }

  Problem Make(const Case& c, int64_t tokens, uint32_t seed) {
    Problem p = MakeWeights(c, seed);
    SetActivations(c, RandomActivations<BFloat16>(tokens * c.cols * c.groups, seed + 1), tokens,
                   PaddedTokens(tokens), p);
    return p;
  }

  Problem MakeWeights(const Case& c, uint32_t seed) {
    Problem p;
    p.w = RandomMatrix(DTypeOf(c.kind), c.rows, c.cols, seed);
    WeightMatrix on_gpu = p.w.view;
    on_gpu.data = Keep(p, Upload(p.w.data)).data();
    on_gpu.scales = p.w.scales.empty() ? nullptr : As<uint8_t>(Keep(p, Upload(p.w.scales)));
    const device::Buffer& tiles = Keep(p, Poisoned(TiledBytes(c.kind, c.rows, c.cols)));
    p.gemm.w = LaunchTileWeights(on_gpu, c.kind, tiles.data(), *gpu_stream_);
    p.gemm.groups = c.groups;
    p.gemm.output = c.output;
    return p;
  }

  // x [tokens, groups * cols], in tiles of `rows` rows, and memory for y.
  void SetActivations(const Case& c, const std::vector<BFloat16>& x, int64_t tokens, int64_t rows,
                      Problem& p) {
    const int64_t x_cols = c.cols * c.groups;
    if (c.kind == TileKind::kFp8 || c.kind == TileKind::kFp4) {
      const HostFp8Tiles host = MakeFp8Tiles(x, tokens, x_cols, rows);
      p.x = host.values;
      p.gemm.x_fp8 = {As<uint8_t>(Keep(p, Upload(host.codes))),
                      As<float>(Keep(p, Upload(host.scales))), rows / 8};
    } else {
      p.x = Floats(x);
      p.gemm.x_bf16 = {As<__nv_bfloat16>(Keep(p, Upload(MakeBf16Tiles(x, tokens, x_cols, rows)))),
                       rows / 8};
    }
    p.y = Poisoned(rows * c.rows * 4);
    p.y_scales = Poisoned(rows * c.rows / 128 * 4 + 16);
    p.gemm.y = p.y.data();
    p.gemm.y_stride = c.rows;
    p.gemm.y_fp8 = {As<uint8_t>(p.y), As<float>(p.y_scales), rows / 8};
  }

  // The bits of y of each token: of the whole step's x those from `step.first` on.
  std::vector<std::vector<uint8_t>> Prefill(const Case& c, const std::vector<BFloat16>& x,
                                            const TestStep& step, Problem& p) {
    const int64_t width = c.cols * c.groups, rows = PaddedTokens(step.num_tokens, true);
    const size_t kept = p.buffers.size();
    const auto begin = x.begin() + step.first * width;
    SetActivations(c, {begin, begin + step.num_tokens * width}, step.num_tokens, rows, p);
    Launch(
        {.problems = {p.gemm}, .num_problems = 1, .num_tokens = step.num_tokens, .prefill = true},
        *gpu_stream_);
    const auto bytes = Download<uint8_t>(p.y), scales = Download<uint8_t>(p.y_scales);
    p.buffers.resize(kept);
    std::vector<std::vector<uint8_t>> tokens;
    for (int64_t t = 0; t < step.num_tokens; ++t) {
      std::vector<uint8_t>& out = tokens.emplace_back();
      if (c.output != GemmOutput::kFp8Tiles) {
        const int64_t size = c.rows * (c.output == GemmOutput::kF32 ? 4 : 2);
        out.assign(bytes.begin() + t * size, bytes.begin() + (t + 1) * size);
        continue;
      }
      for (int64_t n = 0; n < c.rows; ++n) {
        out.push_back(bytes[static_cast<size_t>(Fp8TileOffset(t, n, rows / 8))]);
      }
      for (int64_t block = 0; block < c.rows / 128; ++block) {
        const auto scale = scales.begin() + (block * rows + t) * 4;
        out.insert(out.end(), scale, scale + 4);
      }
    }
    return tokens;
  }

  void ExpectSameInEveryStep(const Case& c) {
    Problem p = MakeWeights(c, 3);
    const auto x = RandomActivations<BFloat16>(kWholeStep * c.cols * c.groups, 4);
    const auto whole = Prefill(c, x, {0, kWholeStep}, p);
    for (const TestStep& step : TestSteps()) {
      const auto tokens = Prefill(c, x, step, p);
      for (int t = 0; t < step.num_tokens; ++t) {
        ASSERT_EQ(tokens[static_cast<size_t>(t)], whole[static_cast<size_t>(step.first + t)])
            << "token " << t << " of " << step.num_tokens << ", kind " << static_cast<int>(c.kind);
      }
    }
  }

  // The bits of y, row after row of all tokens, of the matrix cut into `parts` by its rows: what as
  // many tensor ranks compute.
  std::vector<uint8_t> RowBits(const Case& c, const Problem& p, int64_t tokens, int parts,
                               bool few_rows) {
    const int64_t rows = c.rows / parts, padded = PaddedTokens(tokens);
    std::vector<uint8_t> bits;
    for (int i = 0; i < parts; ++i) {
      GemmProblem part = p.gemm;
      part.w.rows = rows;
      part.w.tiles += i * TiledBytes(c.kind, rows, c.cols);
      if (part.w.scales != nullptr) part.w.scales += i * rows / 128 * (c.cols / 128);
      part.groups = std::max(1, c.groups / parts);
      if (c.groups > 1) part.x_bf16.values += i * part.groups * c.cols * padded;
      const device::Buffer y = Poisoned(padded * rows * 4);
      const device::Buffer scales = Poisoned(padded * rows / 128 * 4);
      part.y = y.data(), part.y_stride = rows;
      part.y_fp8 = {As<uint8_t>(y), As<float>(scales), padded / 8};
      Launch({.problems = {part}, .num_problems = 1, .num_tokens = tokens, .few_rows = few_rows},
             *gpu_stream_);
      const auto bytes = Download<uint8_t>(y), scale_bytes = Download<uint8_t>(scales);
      for (int64_t n = 0; n < rows; ++n) {
        for (int64_t t = 0; t < tokens; ++t) {
          if (c.output == GemmOutput::kFp8Tiles) {
            bits.push_back(bytes[static_cast<size_t>(Fp8TileOffset(t, n, padded / 8))]);
            const auto scale = scale_bytes.begin() + (n / 128 * padded + t) * 4;
            bits.insert(bits.end(), scale, scale + 4);
          } else {
            const int64_t size = c.output == GemmOutput::kF32 ? 4 : 2;
            const auto value = bytes.begin() + (t * rows + n) * size;
            bits.insert(bits.end(), value, value + size);
          }
        }
      }
    }
    return bits;
  }

  void ExpectSameOnAnyNumberOfRanks(const Case& c, bool few_rows = false,
                                    const std::vector<int64_t>& token_counts = Sweep<int64_t>(
                                        {1, 9, 32, 33, 64, 65, 128, 129, 300, 511, 512},
                                        {1, 512})) {
    for (const int64_t tokens : token_counts) {
      const Problem p = Make(c, tokens, 5);
      const std::vector<uint8_t> whole = RowBits(c, p, tokens, 1, few_rows);
      for (const int parts : {2, 4}) {
        EXPECT_TRUE(RowBits(c, p, tokens, parts, few_rows) == whole)
            << tokens << " tokens, " << parts << " parts, kind " << static_cast<int>(c.kind);
      }
    }
  }

  // Sums of parts of the columns, added as a tree, are those of the whole matrix.
  void ExpectSumOfColumns(const Case& c, int64_t tokens, bool few_rows) {
    const Problem p = Make(c, tokens, 5);
    const auto sums = [&](int64_t first, int64_t blocks) {
      GemmProblem part = p.gemm;
      part.w.cols = blocks * 128;
      part.w.matrix_cols = c.cols;
      part.w.tiles += first * TileMatrixBytes(c.kind);
      part.w.scales += first;
      part.x_fp8.codes += first * part.x_fp8.row_groups * kTileBytes;
      part.x_fp8.scales += first * part.x_fp8.row_groups * kTileRows;
      const device::Buffer y = Poisoned(tokens * c.rows * 4);
      part.y = y.data();
      Launch(CudaColumnSumsParams{.product = {.problems = {part},
                                              .num_problems = 1,
                                              .num_tokens = tokens,
                                              .few_rows = few_rows},
                                  .exchange = {}},
             *gpu_stream_);
      return Download<float>(y);
    };
    const int64_t blocks = c.cols / 128;
    const std::vector<float> whole = sums(0, blocks);
    for (const int parts : {2, 4}) {
      std::vector<std::vector<float>> tree;
      for (int i = 0; i < parts; ++i) tree.push_back(sums(i * blocks / parts, blocks / parts));
      for (; tree.size() > 1; tree.resize(tree.size() / 2)) {
        for (size_t i = 0; i < tree.size() / 2; ++i) {
          for (size_t j = 0; j < whole.size(); ++j) {
            tree[i][j] = tree[2 * i][j] + tree[2 * i + 1][j];
          }
        }
      }
      EXPECT_TRUE(tree[0] == whole) << tokens << " tokens, " << parts << " parts";
    }
  }

  // Both output products, of which a rank has so many rows, and columns: of 8,192.
  void ExpectSameWhenResident(int64_t rows, int64_t tokens) {
    constexpr int64_t kOutputs = 576;
    const Problem first =
        Make({TileKind::kFp8AsBf16, rows, 4096, 4, GemmOutput::kFp8Tiles}, tokens, 5);
    const Problem second = Make({TileKind::kFp8, kOutputs, 8192, 1, GemmOutput::kF32}, tokens, 7);
    GemmProblem grouped = first.gemm, sums = second.gemm;
    sums.w.cols = rows;
    sums.w.matrix_cols = 8192;
    const bool is_batch = HaveBatchProducts(grouped.w, sums.w, tokens);
    ASSERT_TRUE(is_batch || (tokens == 1 && HaveAloneProducts(grouped.w, sums.w)));
    const int64_t padded = PaddedTokens(tokens);
    const auto run = [&](bool resident) {
      const device::Buffer codes = Poisoned(padded * rows), y = Poisoned(tokens * kOutputs * 4);
      const device::Buffer scales = Poisoned(rows / 128 * padded * 4);
      const device::Buffer parts = Poisoned(kGroupedParts * rows * 4);
      grouped.y_fp8 = sums.x_fp8 = {As<uint8_t>(codes), As<float>(scales), padded / 8};
      sums.y = y.data();
      if (!resident) {
        Launch({.problems = {grouped}, .num_problems = 1, .num_tokens = tokens}, *gpu_stream_);
        Launch(
            CudaColumnSumsParams{{.problems = {sums}, .num_problems = 1, .num_tokens = tokens}, {}},
            *gpu_stream_);
      } else if (is_batch) {
        const auto count = static_cast<int>(tokens);
        Launch(CudaGroupedBatchParams{grouped, count}, *gpu_stream_);
        Launch(CudaSumsBatchParams{sums, count, {}}, *gpu_stream_);
      } else {
        Launch(CudaGroupedAloneParams{grouped, As<float>(parts)}, *gpu_stream_);
        Launch(CudaSumsAloneParams{sums, As<float>(parts), {}}, *gpu_stream_);
      }
      return Download<uint32_t>(y);
    };
    EXPECT_TRUE(run(true) == run(false)) << rows << " rows, " << tokens << " tokens";
  }

  // Both of one of Pro's eight ranks, a quarter of the rows of each.
  void ExpectSameWhenResidentOfFewRows(int64_t tokens) {
    constexpr int64_t kRows = 512, kOutputs = 192;
    const Problem first =
        Make({TileKind::kFp8AsBf16, kRows, 4096, 2, GemmOutput::kFp8Tiles}, tokens, 5);
    const Problem second = Make({TileKind::kFp8, kOutputs, 16384, 1, GemmOutput::kBf16}, tokens, 7);
    ASSERT_TRUE(HaveRowsProducts(first.gemm.w, second.gemm.w, tokens));
    const int64_t padded = PaddedTokens(tokens);
    const auto run = [&](bool resident) {
      GemmProblem grouped = first.gemm, rows = second.gemm;
      const device::Buffer codes = Poisoned(padded * kRows), y = Poisoned(tokens * kOutputs * 2);
      const device::Buffer scales = Poisoned(kRows / 128 * padded * 4);
      grouped.y_fp8 = {As<uint8_t>(codes), As<float>(scales), padded / 8};
      rows.y = y.data();
      if (resident) {
        const auto count = static_cast<int>(tokens);
        Launch(CudaGroupedBatchParams{grouped, count, /*few_rows=*/true}, *gpu_stream_);
        Launch(CudaOutputRowsParams{rows, count}, *gpu_stream_);
      } else {
        for (const GemmProblem& p : {grouped, rows}) {
          Launch({.problems = {p}, .num_problems = 1, .num_tokens = tokens, .few_rows = true},
                 *gpu_stream_);
        }
      }
      return std::tuple(Download<uint8_t>(codes), Download<uint32_t>(scales),
                        Download<uint16_t>(y));
    };
    EXPECT_TRUE(run(true) == run(false)) << tokens << " tokens";
  }

  void Expect(const Case& c, Problem& p, int64_t tokens) {
    const auto bytes = Download<uint8_t>(p.y);
    const auto scales = Download<float>(p.y_scales);
    const auto* y = bytes.data();
    const double tensor_core =
        c.kind == TileKind::kFp8 || c.kind == TileKind::kFp4 ? 0x1p-11 : 0x1p-20;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t n = 0; n < c.rows; ++n) {
        const int64_t group = n / (c.rows / c.groups);
        double sum = 0, magnitude = 0;
        for (int64_t k = 0; k < c.cols; ++k) {
          const double product =
              double{p.x[static_cast<size_t>((t * c.groups + group) * c.cols + k)]} *
              p.w.values[static_cast<size_t>(n * c.cols + k)];
          sum += product;
          magnitude += std::fabs(product);
        }
        double actual = 0, rounding = 0x1p-24;
        if (c.output == GemmOutput::kF32) {
          actual = reinterpret_cast<const float*>(y)[t * c.rows + n];
        } else if (c.output == GemmOutput::kBf16) {
          actual = ToFloat(reinterpret_cast<const BFloat16*>(y)[t * c.rows + n]);
          rounding = 0x1p-8;
        } else {
          const int64_t row_groups = PaddedTokens(tokens) / 8;
          const float scale = scales[static_cast<size_t>(n / 128 * row_groups * 8 + t)];
          actual = Float8ToFloat(y[Fp8TileOffset(t, n, row_groups)]) * scale;
          rounding = 0x1p-8 + 0x1p-4;
          magnitude += scale * 0x1p-9 / tensor_core;  // half of the smallest code
        }
        ASSERT_LE(std::fabs(actual - sum), std::fabs(sum) * rounding + magnitude * tensor_core)
            << "token " << t << " row " << n << " of " << tokens << " tokens, " << c.rows << " x "
            << c.cols << " kind " << static_cast<int>(c.kind) << ": " << actual << " for " << sum;
      }
    }
  }

  void Check(const std::vector<Case>& cases, int64_t tokens, bool few_rows = false) {
    std::vector<Problem> problems;
    for (size_t i = 0; i < cases.size(); ++i) {
      problems.push_back(Make(cases[i], tokens, static_cast<uint32_t>(7 * i + 1)));
    }
    CudaGemmParams params{.few_rows = few_rows};
    for (const Problem& p : problems) params.problems[params.num_problems++] = p.gemm;
    params.num_tokens = tokens;
    Launch(params, *gpu_stream_);
    for (size_t i = 0; i < cases.size(); ++i) Expect(cases[i], problems[i], tokens);
  }
};

std::vector<int64_t> TokenCounts() {
  return Sweep<int64_t>({1, 7, 8, 9, 16, 17, 33, 64, 65, 128, 200, 300}, {1, 9, 17, 33, 65, 300});
}

// More than a launch takes, of all kinds and of different sizes.
TEST_F(GemmCudaTest, TilesOfManyMatricesAreThoseOfEach) {
  constexpr Case kCases[] = {{TileKind::kFp8, 192, 256},
                             {TileKind::kFp4, 128, 384},
                             {TileKind::kBf16, 65, 128},
                             {TileKind::kFp8AsBf16, 320, 128}};
  std::vector<Problem> alone;
  std::vector<MatrixToTile> all;
  std::vector<device::Buffer> tiles;
  for (uint32_t i = 0; i < 70; ++i) {
    const Case& c = kCases[i % std::size(kCases)];
    Problem& p = alone.emplace_back(MakeWeights(c, i));
    WeightMatrix on_gpu = p.w.view;
    on_gpu.data = p.buffers[0].data();
    on_gpu.scales = p.w.scales.empty() ? nullptr : As<uint8_t>(p.buffers[1]);
    tiles.push_back(Poisoned(TiledBytes(c.kind, c.rows, c.cols)));
    all.push_back({on_gpu, c.kind, tiles.back().data()});
  }
  LaunchTileWeights(all, *gpu_stream_);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(Download<uint8_t>(tiles[i]), Download<uint8_t>(alone[i].buffers.back())) << i;
  }
}

TEST_F(GemmCudaTest, Fp8TimesFp8) {
  for (const int64_t tokens : TokenCounts()) {
    Check({{TileKind::kFp8, 128, 256}}, tokens);
    Check({{TileKind::kFp8, 192, 1024}}, tokens);  // an odd number of row tiles, split columns
  }
  Check({{TileKind::kFp8, 512, 4096}}, 3);
  Check({{TileKind::kFp8, 256, 1152}}, 5);  // columns that do not split evenly
  for (const int64_t tokens : {1, 8}) Check({{TileKind::kFp8, 192, 8192}}, tokens);  // slim blocks
}

TEST_F(GemmCudaTest, Bf16TimesBf16) {
  for (const int64_t tokens : TokenCounts()) {
    Check({{TileKind::kBf16, 4, 256, 1, GemmOutput::kF32}}, tokens);
    Check({{TileKind::kBf16, 320, 1024, 1, GemmOutput::kF32}}, tokens);
  }
}

TEST_F(GemmCudaTest, InputsOfLongColumns) {
  for (const int64_t tokens : {1, 9, 16}) {
    Check({{TileKind::kFp8, 192, 7168}, {TileKind::kBf16, 320, 7168, 1, GemmOutput::kF32}}, tokens);
  }
}

TEST_F(GemmCudaTest, FewRows) {
  for (const int64_t tokens : {1, 9, 16, 17, 33, 64}) {  // slim blocks
    Check({{TileKind::kFp8, 192, 8192}}, tokens, /*few_rows=*/true);
  }
  for (const int64_t tokens : {1, 9, 32, 33, 128, 200}) {
    Check({{TileKind::kFp8, 192, 2048}}, tokens, /*few_rows=*/true);
    Check({{TileKind::kBf16, 320, 2048, 1, GemmOutput::kF32}}, tokens, /*few_rows=*/true);
    Check({{TileKind::kFp8AsBf16, 256, 2048, 2, GemmOutput::kFp8Tiles}}, tokens, /*few_rows=*/true);
  }
}

TEST_F(GemmCudaTest, GroupsOfFp8TimesBf16) {
  for (const int64_t tokens : TokenCounts()) {
    Check({{TileKind::kFp8AsBf16, 256, 512, 2}}, tokens);
    Check({{TileKind::kFp8AsBf16, 512, 1024, 4, GemmOutput::kFp8Tiles}}, tokens);
  }
  Check({{TileKind::kFp8AsBf16, 256, 384, 2}}, 3);  // an odd number of column blocks
}

TEST_F(GemmCudaTest, SeveralProductsInOneLaunch) {
  for (const int64_t tokens : {1, 20, 150}) {
    Check({{TileKind::kFp8, 128, 1024},
           {TileKind::kBf16, 64, 1024},
           {TileKind::kBf16, 320, 1024, 1, GemmOutput::kF32},
           {TileKind::kFp8, 64, 1024}},
          tokens);
  }
}

TEST_F(GemmCudaTest, NumberedWordsHoldTheBitsOfBf16) {
  const auto step = Upload(std::vector<uint32_t>{40}), begun = Poisoned(4);
  for (const int64_t rows : {64, 1024, 17024}) {
    for (const int64_t tokens : Sweep<int64_t>({1, 3, 8}, {3})) {
      const Case first{TileKind::kFp8, rows, 128}, second{TileKind::kFp8, 2240, 128};
      Problem a = Make(first, tokens, 3), b = Make(second, tokens, 13);
      CudaGemmParams params{.problems = {a.gemm, b.gemm}, .num_problems = 2, .num_tokens = tokens};
      Launch(params, *gpu_stream_);
      const auto pairs = Download<uint32_t>(a.y);
      params.problems[0].output = GemmOutput::kNumbered;
      params.number = {As<uint32_t>(step), 3, As<uint32_t>(begun)};
      const auto words = Poisoned(tokens * rows * 4);
      params.problems[0].y = words.data();
      Launch(params, *gpu_stream_);
      const auto numbered = Download<uint32_t>(words);
      for (size_t i = 0; i < static_cast<size_t>(tokens * rows / 2); ++i) {
        ASSERT_EQ(numbered[2 * i], pairs[i]) << rows << " rows, word " << i;
        ASSERT_EQ(numbered[2 * i + 1], 47u) << rows << " rows, word " << i;
      }
      EXPECT_EQ(Download<uint32_t>(begun)[0], 47u);
      Expect(second, b, tokens);
    }
  }
}

TEST_F(GemmCudaTest, EarlyInputGivesTheSameBits) {
  const auto step = Upload(std::vector<uint32_t>{40});
  for (const Case shape : {Case{TileKind::kFp8, 192, 256}, Case{TileKind::kFp8, 12864, 1024}}) {
    for (const int64_t tokens : Sweep<int64_t>({1, 3, 8}, {3})) {
      Problem a = Make(shape, tokens, 7);
      CudaGemmParams params{.problems = {a.gemm}, .num_problems = 1, .num_tokens = tokens};
      Launch(params, *gpu_stream_);
      auto expected = Download<uint16_t>(a.y);
      expected.resize(static_cast<size_t>(tokens * shape.rows));
      params.x_is_early = true;
      for (const int max_blocks : {0, 66}) {
        const auto y = Poisoned(tokens * shape.rows * 2);
        params.problems[0].y = y.data();
        params.max_blocks = max_blocks;
        Launch(params, *gpu_stream_);
        EXPECT_TRUE(Download<uint16_t>(y) == expected) << tokens << " tokens, " << max_blocks;
        CudaGemmParams told = params;
        const auto words = Poisoned(tokens * shape.rows * 4);
        told.problems[0].output = GemmOutput::kNumbered, told.problems[0].y = words.data();
        told.number = {As<uint32_t>(step), 3};
        Launch(told, *gpu_stream_);
        const auto numbered = Download<uint32_t>(words);
        for (size_t i = 0; i < numbered.size(); i += 2) {
          ASSERT_EQ(numbered[i], expected[i] | uint32_t{expected[i + 1]} << 16) << "word " << i / 2;
          ASSERT_EQ(numbered[i + 1], 47u) << "word " << i / 2;
        }
      }
    }
  }
}

// As the input products of a decode step. Of one token blocks hold all of their weights, and the
// last case has more than there is room for at once.
TEST_F(GemmCudaTest, SeveralProductsOfLongColumns) {
  const Case narrow{TileKind::kBf16, 64, 4096},
      wide{TileKind::kBf16, 256, 4096, 1, GemmOutput::kF32};
  for (const int64_t tokens : Sweep<int64_t>({1, 2, 8}, {1})) {
    Check({{TileKind::kFp8, 256, 4096}, {TileKind::kFp8, 128, 4096}}, tokens);
    Check({{TileKind::kFp8, 256, 4096}, wide, wide, narrow}, tokens);
  }
  const Case widest{TileKind::kBf16, 1536, 4096, 1, GemmOutput::kF32};
  Check({{TileKind::kFp8, 1024, 4096}, {TileKind::kFp8, 512, 4096}, widest, widest, narrow}, 1);
  Check({{TileKind::kFp8, 256, 4096}, {TileKind::kFp8, 128, 4096}, wide, wide, narrow}, 600);
}

TEST_F(GemmCudaTest, PrefillGivesATokenTheSameBitsInEveryStep) {
  ExpectSameInEveryStep({TileKind::kFp8, 576, 4096});
  ExpectSameInEveryStep({TileKind::kBf16, 320, 4096, 1, GemmOutput::kF32});
  ExpectSameInEveryStep({TileKind::kBf16, 64, 1024});
  ExpectSameInEveryStep({TileKind::kFp8AsBf16, 512, 1024, 4, GemmOutput::kFp8Tiles});
}

// So many rows that the largest tiles, of 256 tokens, are done soonest.
TEST_F(GemmCudaTest, PrefillOfManyRowsGivesATokenTheSameBitsInEveryStep) {
  ExpectSameInEveryStep({TileKind::kFp8, 2048, 384});
  ExpectSameInEveryStep({TileKind::kBf16, 2048, 384, 1, GemmOutput::kF32});
  ExpectSameInEveryStep({TileKind::kFp8AsBf16, 4096, 384, 4, GemmOutput::kFp8Tiles});
}

// Of a step of a prompt, as they stand in the memory of another rank.
TEST_F(GemmCudaTest, MirrorsHoldTheSame) {
  constexpr int64_t kTokens = 140;
  // Enough rows for large tiles without mirrors, too.
  for (const Case& c : {Case{TileKind::kFp8, 3072, 384},
                        Case{TileKind::kFp8AsBf16, 3072, 384, 2, GemmOutput::kFp8Tiles}}) {
    const int64_t rows = PaddedTokens(kTokens, true), values = rows * c.rows * 2;
    const int64_t bytes = values + rows * c.rows / 128 * 4;
    Problem p = MakeWeights(c, 3);
    SetActivations(c, RandomActivations<BFloat16>(kTokens * c.cols * c.groups, 4), kTokens, rows,
                   p);
    const auto run = [&](const Mirrors& mirrors) {
      const auto y = Poisoned(2 * bytes);
      p.gemm.y = y.data();
      p.gemm.y_fp8 = {As<uint8_t>(y), reinterpret_cast<float*>(y.data() + values), rows / 8};
      Launch({.problems = {p.gemm},
              .num_problems = 1,
              .num_tokens = kTokens,
              .prefill = true,
              .mirrors = mirrors},
             *gpu_stream_);
      return Download<uint8_t>(y);
    };
    const auto alone = run({}), both = run({1, {bytes}});
    EXPECT_TRUE(std::equal(both.begin(), both.begin() + bytes, alone.begin()));
    EXPECT_TRUE(std::equal(both.begin(), both.begin() + bytes, both.begin() + bytes));
  }
}

// As the input products of a prompt: FP8 and BF16 in one launch.
TEST_F(GemmCudaTest, ProductsOfBothKindsHaveTheBitsOfEachAlone) {
  const Case cases[] = {{TileKind::kFp8, 1024, 384},
                        {TileKind::kFp8, 512, 384},
                        {TileKind::kBf16, 1024, 384, 1, GemmOutput::kF32},
                        {TileKind::kBf16, 256, 384, 1, GemmOutput::kF32},
                        {TileKind::kBf16, 64, 384}};
  for (const int64_t tokens : {256, 700}) {
    const auto x = RandomActivations<BFloat16>(tokens * 384, 5);
    std::vector<Problem> problems;
    std::vector<int64_t> begin = {0};  // of each one's y, in bytes
    for (const Case& c : cases) {
      Problem& p = problems.emplace_back(MakeWeights(c, static_cast<uint32_t>(problems.size())));
      SetActivations(c, x, tokens, PaddedTokens(tokens, true), p);
      begin.push_back(begin.back() + tokens * c.rows * (c.output == GemmOutput::kF32 ? 4 : 2));
    }
    const auto run = [&](size_t first, size_t end) {
      const auto y = Poisoned(begin.back());
      CudaGemmParams params{.num_tokens = tokens, .prefill = true};
      for (size_t i = first; i < end; ++i) {
        problems[i].gemm.y = y.data() + begin[i];
        params.problems[params.num_problems++] = problems[i].gemm;
      }
      Launch(params, *gpu_stream_);
      return Download<uint8_t>(y);
    };
    const auto together = run(0, problems.size());
    for (size_t i = 0; i < problems.size(); ++i) {
      const auto alone = run(i, i + 1);
      EXPECT_TRUE(std::equal(alone.begin() + begin[i], alone.begin() + begin[i + 1],
                             together.begin() + begin[i]))
          << i;
    }
  }
}

TEST_F(GemmCudaTest, ARanksRowsHaveTheBitsOfTheWholeMatrix) {
  ExpectSameOnAnyNumberOfRanks({TileKind::kFp8, 512, 1024});
  ExpectSameOnAnyNumberOfRanks({TileKind::kFp8, 256, 4096});
  ExpectSameOnAnyNumberOfRanks({TileKind::kFp8, 512, 8192});
  ExpectSameOnAnyNumberOfRanks({TileKind::kFp8, 512, 4096}, /*few_rows=*/true);
  ExpectSameOnAnyNumberOfRanks({TileKind::kFp8AsBf16, 512, 2048, 4, GemmOutput::kFp8Tiles},
                               /*few_rows=*/true);
  ExpectSameOnAnyNumberOfRanks({TileKind::kBf16, 256, 4096, 1, GemmOutput::kF32});
  ExpectSameOnAnyNumberOfRanks({TileKind::kFp8AsBf16, 512, 2048, 4, GemmOutput::kFp8Tiles});
}

// Two, four and eight blocks share the columns, with four, two parts and one each.
TEST_F(GemmCudaTest, BlocksWithSeveralPartsOfTheColumnsGiveTheBitsOfBlocksWithOne) {
  ExpectSameOnAnyNumberOfRanks({TileKind::kFp8, 2560, 8192}, false, Sweep<int64_t>({1, 8}, {8}));
  // Of few rows a rank's alone are slim.
  ExpectSameOnAnyNumberOfRanks({TileKind::kFp8, 2560, 8192}, true, Sweep<int64_t>({9, 64}, {16}));
}

// A whole matrix has a block for two pairs of warpgroups, a rank's few rows one for each.
TEST_F(GemmCudaTest, BlocksOfOnePairGiveTheBitsOfBlocksOfTwo) {
  ExpectSameOnAnyNumberOfRanks({TileKind::kFp8AsBf16, 5120, 2048, 4, GemmOutput::kFp8Tiles},
                               /*few_rows=*/false,
                               Sweep<int64_t>({1, 8, 9, 16, 17, 32}, {8, 16, 32}));
}

// Half and a quarter of both output products (output_alone_cuda.h), half of no more than eight
// tokens (output_batch_cuda.h).
TEST_F(GemmCudaTest, ResidentOutputProductsOfOneTokenGiveTheBitsOfOthers) {
  for (const int64_t rows : {4096, 2048}) ExpectSameWhenResident(rows, 1);
}
TEST_F(GemmCudaTest, ResidentOutputProductsOfTokensGiveTheBitsOfOthers) {
  for (const int64_t tokens : Sweep<int64_t>({2, 8, 9, 16}, {8, 12})) {
    ExpectSameWhenResident(2048, tokens);
    if (tokens <= 8) ExpectSameWhenResident(4096, tokens);
  }
}

TEST_F(GemmCudaTest, ResidentOutputProductsOfFewRowsGiveTheBitsOfOthers) {
  for (const int64_t tokens : Sweep<int64_t>({1, 2, 7, 8, 9, 15, 16}, {8, 9})) {
    ExpectSameWhenResidentOfFewRows(tokens);
  }
}

TEST_F(GemmCudaTest, SumsOfColumnsAddUpToTheWholeMatrixs) {
  ExpectSumOfColumns({TileKind::kFp8, 576, 4096, 1, GemmOutput::kF32}, 3, /*few_rows=*/true);
  for (const int64_t tokens : Sweep<int64_t>({1, 8, 9, 16}, {8, 16})) {
    const Case c{TileKind::kFp8, 576, 8192, 1, GemmOutput::kF32};
    ExpectSumOfColumns(c, tokens, /*few_rows=*/false);
    ExpectSumOfColumns(c, tokens, /*few_rows=*/true);
  }
}

// Tiles of 256 tokens by 128 rows, and what is left of them.
TEST_F(GemmCudaTest, ManyTokens) {
  for (const int64_t tokens : Sweep<int64_t>({512, 513, 700}, {513})) {
    Check({{TileKind::kFp8, 192, 640}, {TileKind::kFp8, 1280, 256}}, tokens);
    Check({{TileKind::kBf16, 4, 256, 1, GemmOutput::kF32},
           {TileKind::kBf16, 320, 704, 1, GemmOutput::kF32},
           {TileKind::kFp8, 64, 1024}},
          tokens);
    Check({{TileKind::kFp8AsBf16, 256, 512, 2}}, tokens);
    Check({{TileKind::kFp8AsBf16, 1024, 384, 4, GemmOutput::kFp8Tiles}}, tokens);
  }
}

}  // namespace
}  // namespace fathom::kernels
