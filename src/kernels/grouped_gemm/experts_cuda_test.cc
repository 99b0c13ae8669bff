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
  std::byte* Keep(device::Buffer buffer) {
    kept_.push_back(std::move(buffer));
    return kept_.back().data();
  }
  template <typename U>
  U* KeepAs(device::Buffer buffer) {
    return reinterpret_cast<U*>(Keep(std::move(buffer)));
  }

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
    std::vector<uint8_t> gate_up_scales, down_scales;
    for (int64_t e = 0; e < count; ++e) {
      const auto& [w1, w2, w3] = experts[static_cast<size_t>(e)];
      const auto put = [&](const TestMatrix& w, std::byte* to, int interleave) {
        WeightMatrix view = w.view;
        view.data = Keep(Upload(w.data));
        view.scales = KeepAs<uint8_t>(Upload(w.scales));
        LaunchTileWeights(view, kind, to, *gpu_stream_, interleave);
      };
      put(w1, gate_up_tiles + e * gate_up, 2);
      put(w3, gate_up_tiles + e * gate_up + 2 * s.hidden / 128 * TileMatrixBytes(kind), 2);
      put(w2, down_tiles + e * down, 1);
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

  void Check(const Sizes& s, int64_t tokens, WeightDType dtype, bool hash) {
    kept_.clear();
    std::vector<std::array<TestMatrix, 3>> experts, shared;
    for (int e = 0; e < s.num_experts; ++e) {
      experts.push_back(MakeExpert(dtype, s, static_cast<uint32_t>(100 + 10 * e)));
    }
    shared.push_back(MakeExpert(WeightDType::kFp8, s, 7));
    const auto x = RandomActivations<BFloat16>(tokens * s.hidden, 1, 0.05f);
    const int64_t rows = PaddedTokensOf(tokens);
    const HostFp8Tiles x_tiles = MakeFp8Tiles(x, tokens, s.hidden, rows);
    const TestMatrix gate = RandomMatrix(WeightDType::kBF16, s.num_experts, s.hidden, 2);
    std::vector<float> logits = Logits(gate, x, tokens);
    const auto bias = RandomFloats(s.num_experts, 3);
    std::vector<int32_t> token_ids(static_cast<size_t>(tokens)), tid2eid;
    for (int64_t t = 0; t < tokens; ++t)
      token_ids[static_cast<size_t>(t)] = static_cast<int32_t>(t % 5);
    for (int i = 0; i < 5 * s.num_chosen; ++i) {
      tid2eid.push_back((i * 3 + i / s.num_chosen) % s.num_experts);
    }

    // The CPU.
    const auto pairs = static_cast<size_t>(tokens * s.num_chosen);
    std::vector<int32_t> ids(pairs);
    std::vector<float> weights(pairs);
    Launch(MoeRouteParams{.logits = logits.data(),
                          .num_tokens = tokens,
                          .num_experts = s.num_experts,
                          .num_chosen = s.num_chosen,
                          .bias = hash ? nullptr : bias.data(),
                          .tid2eid = hash ? tid2eid.data() : nullptr,
                          .token_ids = token_ids.data(),
                          .scaling = 1.5f,
                          .expert_ids = ids.data(),
                          .weights = weights.data()},
           *cpu_stream_);
    std::vector<BFloat16> x_values = Rounded(x_tiles.values), expected(x_values.size());
    RunOnCpu(s, tokens, experts, shared, x_values, ids, weights, expected);

    // The GPU.
    const int64_t pair_rows = MaxPairRows(tokens, s.num_experts, s.num_chosen);
    const std::vector<int32_t> token_seq(static_cast<size_t>(tokens), 0);
    const ExpertPlan plan{
        .num_tiles = KeepAs<int32_t>(Poisoned(4)),
        .tiles = KeepAs<ExpertTile>(Poisoned(MaxExpertTiles(tokens, s.num_experts, s.num_chosen) *
                                             int64_t{sizeof(ExpertTile)})),
        .pair_of = KeepAs<int32_t>(Poisoned(static_cast<int64_t>(pairs) * 4)),
        .pair_weight = KeepAs<float>(Poisoned(pair_rows * 4))};
    const Fp8Tiles gpu_x{KeepAs<uint8_t>(Upload(x_tiles.codes)),
                         KeepAs<float>(Upload(x_tiles.scales)), rows / 8};
    const Fp8Tiles gathered{KeepAs<uint8_t>(Poisoned(pair_rows * s.hidden)),
                            KeepAs<float>(Poisoned(pair_rows * s.hidden / 32)), pair_rows / 8};
    const auto gpu_ids = Poisoned(static_cast<int64_t>(pairs) * 4);
    const auto gpu_weights = Poisoned(static_cast<int64_t>(pairs) * 4);
    WeightMatrix gate_on_gpu = gate.view;
    gate_on_gpu.data = Keep(Upload(gate.data));
    const std::vector<uint32_t> zero{0};
    auto* const counter = KeepAs<uint32_t>(Upload(zero));
    const auto scores = Poisoned(tokens * s.num_experts * 4);
    Launch(
        CudaMoeRouteParams{
            .gate = LaunchTileWeights(
                gate_on_gpu, TileKind::kBf16,
                Keep(Poisoned(TiledBytes(TileKind::kBf16, s.num_experts, s.hidden))), *gpu_stream_),
            .h = {KeepAs<__nv_bfloat16>(Upload(MakeBf16Tiles(x, tokens, s.hidden, rows))),
                  rows / 8},
            .scores = As<float>(scores),
            .counter = counter,
            .num_tokens = tokens,
            .num_experts = s.num_experts,
            .num_chosen = s.num_chosen,
            .bias = hash ? nullptr : KeepAs<float>(Upload(bias)),
            .tid2eid = hash ? KeepAs<int32_t>(Upload(tid2eid)) : nullptr,
            .token_ids = KeepAs<int32_t>(Upload(token_ids)),
            .token_seq = KeepAs<int32_t>(Upload(token_seq)),
            .scaling = 1.5f,
            .expert_ids = As<int32_t>(gpu_ids),
            .weights = As<float>(gpu_weights),
            .plan = plan,
            .hidden = s.hidden,
            .x = gpu_x,
            .gathered = gathered},
        *gpu_stream_);
    const auto y = Poisoned(pair_rows * s.hidden * 2);
    Launch(
        CudaExpertParams{
            .num_tokens = tokens,
            .hidden = s.hidden,
            .intermediate = s.intermediate,
            .num_experts = s.num_experts,
            .num_chosen = s.num_chosen,
            .swiglu_limit = 10.0f,
            .routed =
                MakeTiles(experts, dtype == WeightDType::kFp4 ? TileKind::kFp4 : TileKind::kFp8, s),
            .shared = MakeTiles(shared, TileKind::kFp8, s),
            .x = gpu_x,
            .gathered = gathered,
            .plan = plan,
            .t = {KeepAs<uint8_t>(Poisoned(pair_rows * s.intermediate)),
                  KeepAs<float>(Poisoned(pair_rows * s.intermediate / 32)), pair_rows / 8},
            .y = As<__nv_bfloat16>(y)},
        *gpu_stream_);

    EXPECT_EQ(Download<int32_t>(gpu_ids), ids);
    ExpectWeights(s, tokens, Download<float>(scores), ids, weights, Download<float>(gpu_weights));
    ExpectOutputs(s, tokens, Download<BFloat16>(y), plan.pair_of, expected);
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
  static void ExpectWeights(const Sizes& s, int64_t tokens, std::vector<float> scores,
                            const std::vector<int32_t>& ids, const std::vector<float>& exact,
                            const std::vector<float>& actual) {
    if (tokens > kDirectTokens) {  // they are logits
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
                     const int32_t* gpu_pair_of, const std::vector<BFloat16>& expected) {
    std::vector<int32_t> pair_of(static_cast<size_t>(tokens * s.num_chosen));
    ASSERT_TRUE(
        gpu_stream_->Copy(pair_of.data(), gpu_pair_of, static_cast<int64_t>(pair_of.size() * 4))
            .ok());
    ASSERT_TRUE(gpu_stream_->Synchronize().ok());
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

  std::vector<device::Buffer> kept_;
};

TEST_F(ExpertsCudaTest, MatchTheCpu) {
  const Sizes small{256, 128, 8, 2}, more{512, 256, 16, 6};
  for (const int64_t tokens : {1, 5, 8, 9, 40, 70, 200}) {
    Check(small, tokens, WeightDType::kFp4, false);
    Check(more, tokens, WeightDType::kFp4, tokens % 2 == 0);
  }
  // Many tokens: tiles of 256, some experts with more, some with less.
  Check(small, 600, WeightDType::kFp4, false);
  Check(more, 777, WeightDType::kFp4, true);
  Check(more, 520, WeightDType::kFp8, false);
  Check({1024, 384, 32, 4}, 1500, WeightDType::kFp4, false);
  Check(more, 3, WeightDType::kFp8, false);
  Check(more, 100, WeightDType::kFp8, false);
  Check({4096, 512, 8, 6}, 2, WeightDType::kFp4, true);
}

}  // namespace
}  // namespace fathom::kernels
