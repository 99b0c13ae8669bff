// Routing and experts on a GPU against the CPU's: the same choices; outputs within what FP8 codes
// of the intermediate activations that fall on the other side of a rounding can move: an eighth of
// a token's output at most, where one value makes all of it, and hardly anything for most tokens.
#include "kernels/grouped_gemm/experts_cuda.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda_testing.h"
#include "kernels/grouped_gemm/experts_large.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/moe_route/moe_route.h"
#include "kernels/moe_route/moe_route_cuda.h"

namespace fathom::kernels {
namespace {

struct Sizes {
  int64_t hidden, intermediate;
  int num_experts, num_chosen;
};

class ExpertsCudaTest : public CudaTest {
 protected:
  const uint8_t* Largest(const std::byte* tiles, int64_t rows, int64_t cols) {
    auto* const largest = KeepAs<uint8_t>(Poisoned(rows));
    LaunchLargestScales(tiles, rows / 64, cols / 128, largest, *gpu_stream_);
    return largest;
  }

  // The tiles of `experts`, one after the other.
  ExpertTiles MakeTiles(const std::vector<std::array<TestMatrix, 3>>& experts, TileKind kind,
                        const Sizes& s) {
    const int64_t gate_up = TiledBytes(kind, 2 * s.intermediate, s.hidden);
    const int64_t down = TiledBytes(kind, s.hidden, s.intermediate);
    const auto count = static_cast<int64_t>(experts.size());
    ExpertTiles tiles{.kind = kind};
    std::byte* const gate_up_tiles = Keep(Poisoned(count * gate_up));
    std::byte* const down_tiles = Keep(Poisoned(count * down));
    // All in two copies: each takes long under compute-sanitizer.
    std::vector<std::byte> all_data;
    std::vector<uint8_t> all_scales;
    for (const auto& matrices : experts) {
      for (const TestMatrix& w : matrices) {
        all_data.insert(all_data.end(), w.data.begin(), w.data.end());
        all_scales.insert(all_scales.end(), w.scales.begin(), w.scales.end());
      }
    }
    const std::byte* data = Keep(Upload(all_data));
    const uint8_t* scales = KeepAs<uint8_t>(Upload(all_scales));
    std::vector<uint8_t> gate_up_scales, down_scales;
    for (int64_t e = 0; e < count; ++e) {
      const auto& [w1, w2, w3] = experts[static_cast<size_t>(e)];
      const auto put = [&](const TestMatrix& w, std::byte* to, int interleave) {
        WeightMatrix view = w.view;
        view.data = data, view.scales = scales;
        LaunchTileWeights(view, kind, to, *gpu_stream_, interleave);
        data += w.data.size(), scales += w.scales.size();
      };
      put(w1, gate_up_tiles + e * gate_up, 2);
      put(w2, down_tiles + e * down, 1);
      put(w3, gate_up_tiles + e * gate_up + 2 * s.hidden / 128 * TileMatrixBytes(kind), 2);
      if (kind == TileKind::kFp4) continue;
      const int64_t blocks = s.hidden / 128;
      for (int64_t r = 0; r < s.intermediate / 128; ++r) {
        for (const TestMatrix* w : {&w1, &w3}) {
          const auto row = w->scales.begin() + r * blocks;
          gate_up_scales.insert(gate_up_scales.end(), row, row + blocks);
        }
      }
      down_scales.insert(down_scales.end(), w2.scales.begin(), w2.scales.end());
    }
    tiles.gate_up = gate_up_tiles;
    tiles.down = down_tiles;
    if (kind == TileKind::kFp4) {
      tiles.gate_up_largest = Largest(gate_up_tiles, count * 2 * s.intermediate, s.hidden);
      tiles.down_largest = Largest(down_tiles, count * s.hidden, s.intermediate);
    } else {
      tiles.gate_up_scales = KeepAs<uint8_t>(Upload(gate_up_scales));
      tiles.down_scales = KeepAs<uint8_t>(Upload(down_scales));
    }
    return tiles;
  }

  static std::array<TestMatrix, 3> MakeExpert(WeightDType dtype, const Sizes& s, uint32_t seed) {
    return {RandomMatrix(dtype, s.intermediate, s.hidden, seed),
            RandomMatrix(dtype, s.hidden, s.intermediate, seed + 1),
            RandomMatrix(dtype, s.intermediate, s.hidden, seed + 2)};
  }

  // Of a layer: experts, gate, and what routes besides it.
  struct Layer {
    Sizes sizes;
    WeightDType dtype;
    bool hash;
    std::vector<std::array<TestMatrix, 3>> experts, shared;
    TestMatrix gate;
    std::vector<float> bias;
    std::vector<int32_t> tid2eid;
  };
  Layer MakeLayer(const Sizes& s, WeightDType dtype, bool hash) {
    Layer layer{s,
                dtype,
                hash,
                {},
                {},
                RandomMatrix(WeightDType::kBF16, s.num_experts, s.hidden, 2),
                RandomFloats(s.num_experts, 3),
                {}};
    for (int e = 0; e < s.num_experts; ++e) {
      layer.experts.push_back(MakeExpert(dtype, s, static_cast<uint32_t>(100 + 10 * e)));
    }
    layer.shared.push_back(MakeExpert(WeightDType::kFp8, s, 7));
    for (int i = 0; i < 5 * s.num_chosen; ++i) {
      layer.tid2eid.push_back((i * 3 + i / s.num_chosen) % s.num_experts);
    }
    return layer;
  }

  // Its weights there.
  struct GpuLayer {
    TiledMatrix gate;
    const float* bias;
    const int32_t* tid2eid;
    ExpertTiles routed, shared;
  };
  GpuLayer UploadLayer(const Layer& layer) {
    const Sizes& s = layer.sizes;
    WeightMatrix gate = layer.gate.view;
    gate.data = Keep(Upload(layer.gate.data));
    const TileKind kind = layer.dtype == WeightDType::kFp4 ? TileKind::kFp4 : TileKind::kFp8;
    return {.gate = LaunchTileWeights(
                gate, TileKind::kBf16,
                Keep(Poisoned(TiledBytes(TileKind::kBf16, s.num_experts, s.hidden))), *gpu_stream_),
            .bias = layer.hash ? nullptr : KeepAs<float>(Upload(layer.bias)),
            .tid2eid = layer.hash ? KeepAs<int32_t>(Upload(layer.tid2eid)) : nullptr,
            .routed = MakeTiles(layer.experts, kind, s),
            .shared = MakeTiles(layer.shared, TileKind::kFp8, s)};
  }

  struct GpuOutput {
    std::vector<int32_t> ids, pair_of;
    std::vector<float> weights, scores;
    std::vector<BFloat16> y;  // rows of pairs
  };
  // x [tokens, hidden] and its FP8 form. apart: a launch for each product, and in prefill for the
  // plan.
  GpuOutput RunOnGpu(const Sizes& s, const GpuLayer& layer, const std::vector<BFloat16>& x,
                     const HostFp8Tiles& x_tiles, const std::vector<int32_t>& token_ids,
                     bool prefill, bool apart = false) {
    const size_t kept = kept_.size();
    const auto tokens = static_cast<int64_t>(token_ids.size());
    const int64_t pairs = tokens * s.num_chosen, rows = PaddedTokensOf(tokens);
    const int64_t pair_rows = MaxPairRows(tokens, s.num_experts, s.num_chosen);
    const std::vector<int32_t> token_seq(token_ids.size(), 0);
    const auto pair_of = Poisoned(pairs * 4);
    const auto dtype =
        layer.routed.kind == TileKind::kFp4 ? config::ExpertDType::kFp4 : config::ExpertDType::kFp8;
    const bool is_large = AreLargeExperts(tokens, prefill, dtype);
    const ExpertPlan plan{
        .num_tiles = KeepAs<int32_t>(Poisoned(8)),
        .tiles = KeepAs<ExpertTile>(Poisoned(MaxExpertTiles(tokens, s.num_experts, s.num_chosen) *
                                             int64_t{sizeof(ExpertTile)})),
        .pair_of = As<int32_t>(pair_of),
        .pair_weight = KeepAs<float>(Poisoned(pair_rows * 4)),
        .progress = KeepAs<int32_t>(Poisoned(NumProgress(tokens, s.num_experts, s.num_chosen) * 4)),
        .board = KeepAs<PlanBoard>(Upload(std::vector<std::byte>(sizeof(PlanBoard)))),
        .as_words = RoutesAtOnce(tokens, prefill, s.num_experts, s.hidden),
        .is_large = is_large,
        .has_narrow = is_large && dtype == config::ExpertDType::kFp4};
    const Fp8Tiles gpu_x{KeepAs<uint8_t>(Upload(x_tiles.codes)),
                         KeepAs<float>(Upload(x_tiles.scales)), rows / 8};
    const Fp8Tiles gathered{KeepAs<uint8_t>(Poisoned(pair_rows * s.hidden)),
                            KeepAs<float>(Poisoned(pair_rows * s.hidden / 32)), pair_rows / 8};
    const auto ids = Poisoned(pairs * 4), weights = Poisoned(pairs * 4);
    const auto board = Upload(std::vector<std::byte>(sizeof(RouteBoard)));
    const auto scores = Poisoned(tokens * s.num_experts * 4);
    CudaMoeRouteParams route{
        .gate = layer.gate,
        .h = {KeepAs<__nv_bfloat16>(Upload(MakeBf16Tiles(x, tokens, s.hidden, rows))), rows / 8},
        .scores = As<float>(scores),
        .board = As<RouteBoard>(board),
        .num_tokens = tokens,
        .prefill = prefill,
        .num_experts = s.num_experts,
        .num_chosen = s.num_chosen,
        .bias = layer.bias,
        .tid2eid = layer.tid2eid,
        .token_ids = KeepAs<int32_t>(Upload(token_ids)),
        .token_seq = KeepAs<int32_t>(Upload(token_seq)),
        .scaling = 1.5f,
        .expert_ids = As<int32_t>(ids),
        .weights = As<float>(weights),
        .plan = plan,
        .hidden = s.hidden,
        .x = gpu_x,
        .gathered = gathered};
    const auto y = Poisoned(pair_rows * s.hidden * 2);
    // Codes and scales of t; prefill writes them to another rank's, too.
    const int64_t code_bytes = pair_rows * s.intermediate, t_bytes = code_bytes + code_bytes / 32;
    const auto t = Poisoned(2 * t_bytes);
    CudaExpertParams experts{
        .num_tokens = tokens,
        .hidden = s.hidden,
        .intermediate = s.intermediate,
        .num_experts = s.num_experts,
        .num_chosen = s.num_chosen,
        .swiglu_limit = 10.0f,
        .routed = layer.routed,
        .shared = layer.shared,
        .x = gpu_x,
        .gathered = gathered,
        .plan = plan,
        .t = {As<uint8_t>(t), reinterpret_cast<float*>(t.data() + code_bytes), pair_rows / 8},
        .t_packets = KeepAs<uint4>(Upload(std::vector<std::byte>(
            static_cast<size_t>(NumPackets(s.num_chosen, s.intermediate)) * sizeof(uint4)))),
        .y = As<__nv_bfloat16>(y),
        .y_stride = s.hidden};
    if (prefill) experts.mirrors = {1, {t_bytes}};
    const auto others = RandomActivations<BFloat16>(tokens * s.hidden, 2, 0.05f);
    CudaMoeRouteParams before = route;
    before.h.values = KeepAs<__nv_bfloat16>(Upload(MakeBf16Tiles(others, tokens, s.hidden, rows)));
    // A step with another plan just before, which nothing may take for its own.
    if (!prefill) Run(before, experts, apart);
    if (apart && prefill) {
      route.plans = false;
      Launch(route, *gpu_stream_);
      route.plans = route.is_chosen = true;
    }
    Run(route, experts, apart);
    GpuOutput out{Download<int32_t>(ids), Download<int32_t>(pair_of), Download<float>(weights),
                  Download<float>(scores), Download<BFloat16>(y)};
    const auto both = Download<uint8_t>(t);
    EXPECT_TRUE(!prefill ||
                std::equal(both.begin(), both.begin() + t_bytes, both.begin() + t_bytes));
    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(kept), kept_.end());
    return out;
  }

  void Run(const CudaMoeRouteParams& route, const CudaExpertParams& experts, bool apart) {
    Launch(route, *gpu_stream_);
    if (apart) {
      LaunchGateUp(experts, *gpu_stream_);
      LaunchDown(experts, *gpu_stream_);
    } else {
      Launch(experts, *gpu_stream_);
    }
  }

  static std::vector<int32_t> TokenIds(int64_t first, int64_t tokens) {
    std::vector<int32_t> ids;
    for (int64_t t = first; t < first + tokens; ++t) ids.push_back(static_cast<int32_t>(t % 5));
    return ids;
  }

  // Every third group of 32 columns gets a scale that is 2^-1 to 2^-28 of its row's largest.
  static void SpreadScales(Layer& layer) {
    for (auto& matrices : layer.experts) {
      for (TestMatrix& w : matrices) {
        for (size_t i = 0; i < w.scales.size(); i += 3) {
          w.scales[i] = static_cast<uint8_t>(124 - i % 27);
        }
      }
    }
  }

  // Products of every block's first and third group of 32 columns, the large ones, cancel each
  // other, so that the order in which groups are added shows.
  static void CancelGroups(Layer& layer) {
    const auto blocks = static_cast<size_t>(layer.sizes.hidden / 128);
    for (auto& [w1, w2, w3] : layer.experts) {
      for (TestMatrix* const w : {&w1, &w3}) {
        for (size_t i = 0; i < w->scales.size() / 4; ++i) {
          const auto codes = w->data.begin() + static_cast<std::ptrdiff_t>(i * 64);
          std::copy_n(codes, 16, codes + 32);
          w->scales[4 * i] = w->scales[4 * i + 2] = 127 + 12;
        }
        ASSERT_EQ(w->scales.size(), static_cast<size_t>(w->view.rows) * blocks * 4);
      }
    }
  }
  static void CancelGroups(std::vector<BFloat16>& x) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (i % 128 / 32 == 2) x[i] = BFloat16(-ToFloat(x[i - 64]));
    }
  }

  void Check(const Sizes& s, int64_t tokens, WeightDType dtype, bool hash, bool prefill = false) {
    CheckLayer(MakeLayer(s, dtype, hash), tokens, prefill);
  }

  void CheckLayer(const Layer& layer, int64_t tokens, bool prefill) {
    kept_.clear();
    const Sizes& s = layer.sizes;
    const bool hash = layer.hash;
    const auto x = RandomActivations<BFloat16>(tokens * s.hidden, 1, 0.05f);
    const HostFp8Tiles x_tiles = MakeFp8Tiles(x, tokens, s.hidden, PaddedTokensOf(tokens));
    std::vector<float> logits = Logits(layer.gate, x, tokens);
    const std::vector<int32_t> token_ids = TokenIds(0, tokens);

    const auto pairs = static_cast<size_t>(tokens * s.num_chosen);
    std::vector<int32_t> ids(pairs);
    std::vector<float> weights(pairs);
    Launch(MoeRouteParams{.logits = logits.data(),
                          .num_tokens = tokens,
                          .num_experts = s.num_experts,
                          .num_chosen = s.num_chosen,
                          .bias = hash ? nullptr : layer.bias.data(),
                          .tid2eid = hash ? layer.tid2eid.data() : nullptr,
                          .token_ids = token_ids.data(),
                          .scaling = 1.5f,
                          .expert_ids = ids.data(),
                          .weights = weights.data()},
           *cpu_stream_);
    std::vector<BFloat16> x_values = Rounded(x_tiles.values), expected(x_values.size());
    RunOnCpu(s, tokens, layer.experts, layer.shared, x_values, ids, weights, expected);

    const GpuLayer gpu_layer = UploadLayer(layer);
    const GpuOutput gpu = RunOnGpu(s, gpu_layer, x, x_tiles, token_ids, prefill);
    EXPECT_EQ(gpu.ids, ids);
    const bool are_scores = !prefill && (tokens <= kDirectTokens ||
                                         RoutesAtOnce(tokens, false, s.num_experts, s.hidden));
    ExpectWeights(s, !are_scores, gpu.scores, ids, weights, gpu.weights);
    ExpectOutputs(s, tokens, gpu.y, gpu.pair_of, expected);
    const GpuOutput apart = RunOnGpu(s, gpu_layer, x, x_tiles, token_ids, prefill, /*apart=*/true);
    for (int64_t t = 0; t < tokens; ++t) {
      const auto rows = RowsOf(s, gpu, t), same = RowsOf(s, apart, t);
      ASSERT_EQ(0, std::memcmp(rows.data(), same.data(), rows.size() * 2)) << "token " << t;
    }
  }

  // The rows of a token: the shared expert's, then those of its pairs.
  static std::vector<BFloat16> RowsOf(const Sizes& s, const GpuOutput& out, int64_t token) {
    std::vector<BFloat16> rows;
    for (int k = -1; k < s.num_chosen; ++k) {
      const int64_t row =
          k < 0 ? token : out.pair_of[static_cast<size_t>(token * s.num_chosen + k)];
      const auto begin = out.y.begin() + row * s.hidden;
      rows.insert(rows.end(), begin, begin + s.hidden);
    }
    return rows;
  }

  void ExpectSameInEveryStep(const Sizes& s, WeightDType dtype) {
    kept_.clear();
    const GpuLayer layer = UploadLayer(MakeLayer(s, dtype, false));
    const auto x = RandomActivations<BFloat16>(kWholeStep * s.hidden, 1, 0.05f);
    const auto run = [&](const TestStep& step) {
      const auto begin = x.begin() + step.first * s.hidden;
      const std::vector<BFloat16> rows(begin, begin + step.num_tokens * s.hidden);
      return RunOnGpu(
          s, layer, rows,
          MakeFp8Tiles(rows, step.num_tokens, s.hidden, PaddedTokensOf(step.num_tokens)),
          TokenIds(step.first, step.num_tokens), /*prefill=*/true);
    };
    const GpuOutput whole = run({0, kWholeStep});
    for (const TestStep& step : TestSteps()) {
      const GpuOutput out = run(step);
      const auto same = [&](const auto& part, const auto& all) {
        const auto at = all.begin() + int64_t{step.first} * s.num_chosen;
        return std::equal(part.begin(), part.end(), at);
      };
      EXPECT_TRUE(same(out.ids, whole.ids)) << step.num_tokens;
      EXPECT_TRUE(same(out.weights, whole.weights)) << step.num_tokens;
      for (int64_t t = 0; t < step.num_tokens; ++t) {
        const auto rows = RowsOf(s, out, t), expected = RowsOf(s, whole, step.first + t);
        ASSERT_EQ(0, std::memcmp(rows.data(), expected.data(), rows.size() * 2))
            << "token " << t << " of " << step.num_tokens;
      }
    }
  }

  static std::vector<float> Logits(const TestMatrix& gate, const std::vector<BFloat16>& x,
                                   int64_t tokens) {
    const auto rows = static_cast<size_t>(gate.view.rows),
               cols = static_cast<size_t>(gate.view.cols);
    std::vector<float> logits;
    for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
      for (size_t e = 0; e < rows; ++e) {
        double sum = 0;
        for (size_t k = 0; k < cols; ++k) {
          sum += double{gate.values[e * cols + k]} * ToFloat(x[t * cols + k]);
        }
        logits.push_back(static_cast<float>(sum));
      }
    }
    return logits;
  }

  // Of the gate's scores as the GPU has them the weights follow closely; those of exact products
  // are as far off as FP32 sums of the gate's products are.
  static void ExpectWeights(const Sizes& s, bool are_logits, std::vector<float> scores,
                            const std::vector<int32_t>& ids, const std::vector<float>& exact,
                            const std::vector<float>& actual) {
    if (are_logits) {
      for (float& x : scores)
        x = std::sqrt(std::fmax(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))));
    }
    const auto k = static_cast<size_t>(s.num_chosen), e = static_cast<size_t>(s.num_experts);
    for (size_t i = 0; i < ids.size(); ++i) {
      const float* const row = scores.data() + i / k * e;
      float sum = 0;
      for (size_t j = 0; j < k; ++j) sum += row[ids[i / k * k + j]];
      EXPECT_NEAR(actual[i], row[ids[i]] / sum * 1.5f, 1e-6f);
      EXPECT_NEAR(actual[i], exact[i], 1e-5f);
    }
  }

  // The sum of a token's rows, as the next boundary takes it.
  void ExpectOutputs(const Sizes& s, int64_t tokens, const std::vector<BFloat16>& y,
                     const std::vector<int32_t>& pair_of, const std::vector<BFloat16>& expected) {
    std::vector<double> errors;  // of each token, relative
    for (int64_t t = 0; t < tokens; ++t) {
      double error = 0, norm = 0;
      for (int64_t i = 0; i < s.hidden; ++i) {
        float sum = 0;
        for (int j = 0; j < s.num_chosen; ++j) {
          const int64_t row = pair_of[static_cast<size_t>(t * s.num_chosen + j)];
          sum += ToFloat(y[static_cast<size_t>(row * s.hidden + i)]);
        }
        sum += ToFloat(y[static_cast<size_t>(t * s.hidden + i)]);
        const double e = ToFloat(expected[static_cast<size_t>(t * s.hidden + i)]);
        error += (sum - e) * (sum - e);
        norm += e * e;
      }
      errors.push_back(std::sqrt(error / norm));
    }
    std::sort(errors.begin(), errors.end());
    EXPECT_LE(errors[errors.size() / 2], 0.01) << tokens << " tokens";
    EXPECT_LE(errors.back(), 0.125) << tokens << " tokens";
  }

  void RunOnCpu(const Sizes& s, int64_t tokens,
                const std::vector<std::array<TestMatrix, 3>>& experts,
                const std::vector<std::array<TestMatrix, 3>>& shared,
                const std::vector<BFloat16>& x, const std::vector<int32_t>& ids,
                const std::vector<float>& weights, std::vector<BFloat16>& y) {
    const auto slots = static_cast<size_t>(tokens * (s.num_chosen + 1));
    std::vector<ExpertMatrices> matrices;
    for (const auto& [w1, w2, w3] : experts) matrices.push_back({w1.view, w2.view, w3.view});
    const ExpertMatrices shared_matrices{shared[0][0].view, shared[0][1].view, shared[0][2].view};
    std::vector<BFloat16> t(slots * static_cast<size_t>(s.intermediate));
    std::vector<BFloat16> outputs(slots * static_cast<size_t>(s.hidden));
    std::vector<int32_t> pair_token(slots), pair_of(slots);
    std::vector<int32_t> first_pair(static_cast<size_t>(s.num_experts) + 2);
    std::vector<float> pair_weight(slots);
    Launch(ExpertParams<BFloat16>{.x = x.data(),
                                  .num_tokens = tokens,
                                  .hidden = s.hidden,
                                  .experts = matrices,
                                  .shared = &shared_matrices,
                                  .num_chosen = s.num_chosen,
                                  .expert_ids = ids.data(),
                                  .weights = weights.data(),
                                  .swiglu_limit = 10.0f,
                                  .y = y.data(),
                                  .workspace = {.max_tokens = tokens,
                                                .max_intermediate = s.intermediate,
                                                .t = t.data(),
                                                .y = outputs.data(),
                                                .pair_token = pair_token.data(),
                                                .pair_of = pair_of.data(),
                                                .first_pair = first_pair.data(),
                                                .pair_weight = pair_weight.data()}},
           *cpu_stream_);
  }

  static std::vector<BFloat16> Rounded(const std::vector<float>& values) {
    std::vector<BFloat16> out;
    for (const float v : values) out.push_back(BFloat16(v));
    return out;
  }
  // Room for the widest tile of the shared expert.
  static int64_t PaddedTokensOf(int64_t tokens) { return (tokens + 63) / 64 * 64; }
};

constexpr Sizes kSmall{256, 128, 8, 2}, kMore{512, 256, 16, 6};

// Which do not wait for routing to end.
TEST_F(ExpertsCudaTest, FewTokensMatchTheCpu) {
  for (const int64_t tokens : Sweep<int64_t>({1, 5, 8, 9, 12}, {1, 12})) {
    if (!kIsRacecheck) Check(kSmall, tokens, WeightDType::kFp4, false);
    Check(kMore, tokens, WeightDType::kFp4, tokens % 2 == 0);
  }
  Check(kMore, 3, WeightDType::kFp8, false);
  Check({kIsRacecheck ? 1024 : 4096, 512, 8, 6}, 2, WeightDType::kFp4, true);
  Check({1024, 512, 32, 4}, 7, WeightDType::kFp4, false);
}

// Tiles of one or two users are multiplied otherwise than those of more.
TEST_F(ExpertsCudaTest, ATokenHasTheSameBitsWhoeverElseChoosesItsExperts) {
  const Sizes s{1024, 512, 8, 4};
  Layer layer = MakeLayer(s, WeightDType::kFp4, true);
  for (int i = 0; i < 2 * s.num_chosen; ++i) layer.tid2eid[static_cast<size_t>(i)] = i;
  CancelGroups(layer);
  const GpuLayer gpu_layer = UploadLayer(layer);
  for (const int64_t tokens : {8, 12}) {
    auto x = RandomActivations<BFloat16>(tokens * s.hidden, 1, 0.05f);
    CancelGroups(x);
    const HostFp8Tiles x_tiles = MakeFp8Tiles(x, tokens, s.hidden, PaddedTokensOf(tokens));
    // Of the first token when so many choose its experts, and the others four others.
    const auto rows_among = [&](int64_t users) {
      std::vector<int32_t> ids(static_cast<size_t>(tokens), 1);
      std::fill_n(ids.begin(), users, 0);
      return RowsOf(s, RunOnGpu(s, gpu_layer, x, x_tiles, ids, /*prefill=*/false), 0);
    };
    const auto alone = rows_among(1);
    for (const int64_t users : Sweep<int64_t>({2, 3, tokens}, {2, 3})) {
      const auto rows = rows_among(users);
      EXPECT_EQ(0, std::memcmp(rows.data(), alone.data(), rows.size() * 2))
          << users << " of " << tokens << " tokens";
    }
  }
}

TEST_F(ExpertsCudaTest, MoreTokensMatchTheCpu) {
  for (const int64_t tokens : Sweep<int64_t>({13, 40, 64, 70, 192}, {13, 192})) {
    Check(kSmall, tokens, WeightDType::kFp4, false);
    Check(kMore, tokens, WeightDType::kFp4, tokens % 2 == 0);
  }
  for (const int64_t tokens : Sweep<int64_t>({100, 200, 512}, {200})) {
    Check(kMore, tokens, WeightDType::kFp8, false);
  }
}

// Which are not gathered. Few experts in a table, so that tiles are of up to eight tokens.
TEST_F(ExpertsCudaTest, TokensThatLieApartMatchTheCpu) {
  const Sizes sizes{1024, 128, 128, 6};
  ASSERT_TRUE(RoutesAtOnce(13, false, sizes.num_experts, sizes.hidden));
  for (const WeightDType dtype : {WeightDType::kFp4, WeightDType::kFp8}) {
    Layer layer = MakeLayer(sizes, dtype, false);
    for (const int64_t tokens : Sweep<int64_t>({13, 16, 31, 64}, {16, 64})) {
      layer.hash = tokens % 2 == 0;
      CheckLayer(layer, tokens, /*prefill=*/false);
    }
  }
}

// Tiles of up to 64, 224 (FP4) or 256 (FP8), some experts with more, some with less.
TEST_F(ExpertsCudaTest, ManyTokensMatchTheCpu) {
  for (const int64_t tokens : Sweep<int64_t>({193, 200, 300}, {193})) {
    Check({512, 256, 32, 6}, tokens, WeightDType::kFp4, tokens % 2 == 0);
  }
  Check(kSmall, 600, WeightDType::kFp4, false);
  Check(kMore, 520, WeightDType::kFp8, false);
  // 66 an expert: some in a wide tile, others in a narrow one.
  Check({256, 128, 32, 6}, 350, WeightDType::kFp4, false);
  if (kIsRacecheck) return;
  Check(kMore, 777, WeightDType::kFp4, true);
  Check({1024, 384, 32, 4}, 1500, WeightDType::kFp4, false);
}

TEST_F(ExpertsCudaTest, PrefillMatchesTheCpu) {
  for (const int64_t tokens : Sweep<int64_t>({1, 8, 70}, {1, 70})) {
    Check(kMore, tokens, WeightDType::kFp4, false, /*prefill=*/true);
  }
  Check(kSmall, 3, WeightDType::kFp8, true, /*prefill=*/true);
}

// Up to 256 experts and few tokens: routing's blocks are a cluster.
TEST_F(ExpertsCudaTest, RoutingOfAClusterMatchesTheCpu) {
  const Sizes some{512, 128, 40, 6}, most{256, 128, kIsRacecheck ? 128 : 256, 6};
  for (const int64_t tokens : Sweep<int64_t>({1, 5, 8, 12}, {1, 5})) {
    Check(some, tokens, WeightDType::kFp4, tokens % 2 == 0);
  }
  for (const int64_t tokens : Sweep<int64_t>({1, 12}, {12})) {
    Check(most, tokens, WeightDType::kFp4, false);
  }
}

TEST_F(ExpertsCudaTest, RoutingToMoreExpertsMatchesTheCpu) {
  for (const int64_t tokens : {2, 9, 33, 64}) {
    Check({256, 128, 264, 6}, tokens, WeightDType::kFp4, false);
  }
}

TEST_F(ExpertsCudaTest, ATableMayNameAnExpertTwice) {
  Layer layer = MakeLayer({512, 256, 16, 4}, WeightDType::kFp4, true);
  for (size_t i = 0; i < layer.tid2eid.size(); i += 4) layer.tid2eid[i + 2] = layer.tid2eid[i];
  for (const int64_t tokens : {3, 20, 70}) CheckLayer(layer, tokens, /*prefill=*/false);
  // Tokens lie apart.
  layer = MakeLayer({1024, 128, 128, 4}, WeightDType::kFp4, true);
  for (size_t i = 0; i < layer.tid2eid.size(); i += 4) layer.tid2eid[i + 2] = layer.tid2eid[i];
  for (const int64_t tokens : {20, 64}) CheckLayer(layer, tokens, /*prefill=*/false);
}

// Columns in whole stages; intermediates of four and of sixteen column blocks, as packets.
TEST_F(ExpertsCudaTest, OneTokensKernelMatchesTheCpu) {
  for (const int64_t intermediate : {512, 2048}) {
    Check({kIsRacecheck ? 512 : 1024, intermediate, 8, 6}, 1, WeightDType::kFp4, false);
  }
  // Few enough items to be slim; the products apart have others.
  Check({1024, 1024, 8, 2}, 1, WeightDType::kFp4, false);
}

TEST_F(ExpertsCudaTest, ScalesOfARowMayBeFarApart) {
  Layer layer = MakeLayer({512, 256, 8, 4}, WeightDType::kFp4, false);
  SpreadScales(layer);
  for (const int64_t tokens : {20, 700}) CheckLayer(layer, tokens, /*prefill=*/true);
}

TEST_F(ExpertsCudaTest, PrefillGivesATokenTheSameBitsInEveryStep) {
  if (kIsRacecheck) return ExpectSameInEveryStep({512, 256, 16, 6}, WeightDType::kFp4);
  ExpectSameInEveryStep({1024, 384, 32, 4}, WeightDType::kFp4);
  ExpectSameInEveryStep({512, 256, 16, 6}, WeightDType::kFp8);
}

}  // namespace
}  // namespace fathom::kernels
