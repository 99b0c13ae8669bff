// Routing of decodes in one launch against the CPU's of exact products, and its plan: at Pro's
// widths, where clusters share the gate's columns, and at others.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <utility>

#include "kernels/cuda_testing.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/moe_route/moe_route.h"
#include "kernels/moe_route/moe_route_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int kChosen = 6;
constexpr int kVocabulary = 5;
constexpr float kScaling = 2.5f;

struct Layer {
  int64_t hidden;
  int num_experts;
};

class RouteDecodeCudaTest : public CudaTest {
 protected:
  void SetUpLayer(const Layer& layer) {
    kept_.clear();
    layer_ = layer;
    gate_ = RandomMatrix(WeightDType::kBF16, layer.num_experts, layer.hidden, 5);
    WeightMatrix view = gate_.view;
    view.data = Keep(Upload(gate_.data));
    const int64_t bytes = TiledBytes(TileKind::kBf16, layer.num_experts, layer.hidden);
    tiles_ = LaunchTileWeights(view, TileKind::kBf16, Keep(Poisoned(bytes)), *gpu_stream_);
    bias_ = RandomFloats(layer.num_experts, 6);
    table_.clear();
    for (int i = 0; i < kVocabulary * kChosen; ++i) table_.push_back(i * 7 % layer.num_experts);
    route_board_ = KeepAs<RouteBoard>(Upload(std::vector<std::byte>(sizeof(RouteBoard))));
    plan_board_ = Upload(std::vector<std::byte>(sizeof(PlanBoard)));
  }

  // Exact products, and how far FP32 sums of them may be off: half a unit in the last place of what
  // is added up for each addition that one of its terms goes through, which are fewer than 128.
  void Products(const std::vector<BFloat16>& x, int64_t tokens, std::vector<float>& logits,
                std::vector<float>& errors) const {
    const auto cols = static_cast<size_t>(layer_.hidden);
    for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
      for (size_t e = 0; e < static_cast<size_t>(layer_.num_experts); ++e) {
        double sum = 0, size = 0;
        for (size_t k = 0; k < cols; ++k) {
          const double product = double{gate_.values[e * cols + k]} * ToFloat(x[t * cols + k]);
          sum += product, size += std::fabs(product);
        }
        logits.push_back(static_cast<float>(sum));
        errors.push_back(static_cast<float>(size * 128 * 0x1p-24));
      }
    }
  }

  void Check(int64_t tokens, bool hash) {
    const auto experts = static_cast<size_t>(layer_.num_experts);
    const auto pairs = static_cast<size_t>(tokens * kChosen);
    const auto x =
        RandomActivations<BFloat16>(tokens * layer_.hidden, static_cast<uint32_t>(tokens), 0.05f);
    std::vector<float> s, errors;
    Products(x, tokens, s, errors);
    std::vector<int32_t> token_ids, token_seq, ids(pairs);
    std::vector<float> weights(pairs);
    for (int64_t t = 0; t < tokens; ++t) {
      token_ids.push_back(static_cast<int32_t>(t % kVocabulary));
      token_seq.push_back(t == 3 ? -1 : 0);
    }
    Launch(MoeRouteParams{.logits = s.data(),
                          .num_tokens = tokens,
                          .num_experts = layer_.num_experts,
                          .num_chosen = kChosen,
                          .bias = hash ? nullptr : bias_.data(),
                          .tid2eid = hash ? table_.data() : nullptr,
                          .token_ids = token_ids.data(),
                          .scaling = kScaling,
                          .expert_ids = ids.data(),
                          .weights = weights.data()},
           *cpu_stream_);

    const int64_t rows = PaddedTokens(tokens);
    const int64_t pair_rows = MaxPairRows(tokens, layer_.num_experts, kChosen);
    const auto progress =
        Poisoned(NumProgress(tokens, layer_.num_experts, kChosen) * int64_t{sizeof(int32_t)});
    const auto scores = Poisoned(tokens * layer_.num_experts * 4);
    const auto gpu_ids = Poisoned(tokens * kChosen * 4),
               gpu_weights = Poisoned(tokens * kChosen * 4);
    const auto pair_of = Poisoned(tokens * kChosen * 4), pair_weight = Poisoned(pair_rows * 4);
    Launch(
        CudaMoeRouteParams{
            .gate = tiles_,
            .h = {KeepAs<__nv_bfloat16>(Upload(MakeBf16Tiles(x, tokens, layer_.hidden, rows))),
                  rows / 8},
            .scores = As<float>(scores),
            .board = route_board_,
            .num_tokens = tokens,
            .num_experts = layer_.num_experts,
            .num_chosen = kChosen,
            .bias = hash ? nullptr : KeepAs<float>(Upload(bias_)),
            .tid2eid = hash ? KeepAs<int32_t>(Upload(table_)) : nullptr,
            .token_ids = KeepAs<int32_t>(Upload(token_ids)),
            .token_seq = KeepAs<int32_t>(Upload(token_seq)),
            .scaling = kScaling,
            .expert_ids = As<int32_t>(gpu_ids),
            .weights = As<float>(gpu_weights),
            .plan = {.pair_of = As<int32_t>(pair_of),
                     .pair_weight = As<float>(pair_weight),
                     .progress = As<int32_t>(progress),
                     .board = As<PlanBoard>(plan_board_)},
            .hidden = layer_.hidden},
        *gpu_stream_);

    const auto actual = Download<float>(scores);
    for (size_t i = 0; i < static_cast<size_t>(tokens) * experts; ++i) {
      // Of sqrt(softplus(x)) the slope is below 1/2 (at x = -0.5, where it is steepest, 0.45).
      ASSERT_NEAR(actual[i], s[i], errors[i] / 2 + 1e-6f) << "token " << i / experts;
    }
    EXPECT_EQ(Download<int32_t>(gpu_ids), ids);
    const auto actual_weights = Download<float>(gpu_weights);
    for (size_t i = 0; i < pairs; ++i) EXPECT_NEAR(actual_weights[i], weights[i], 1e-5f);
    const auto rows_of_pairs = Download<int32_t>(pair_of);
    const auto row_weights = Download<float>(pair_weight);
    if (tokens <= kDirectTokens) {
      ExpectPlan(token_seq, ids, actual_weights, rows_of_pairs, row_weights);
    } else {
      ExpectNamedTokens(token_seq, ids, actual_weights, rows_of_pairs, row_weights);
    }
    const int64_t counters = NumProgress(tokens, layer_.num_experts, kChosen);
    EXPECT_EQ(Download<int32_t>(progress), std::vector<int32_t>(static_cast<size_t>(counters)));
  }

  // A tile for each expert that one of eight tokens chose, in which each of them has its row.
  void ExpectPlan(const std::vector<int32_t>& token_seq, const std::vector<int32_t>& ids,
                  const std::vector<float>& weights, const std::vector<int32_t>& pair_of,
                  const std::vector<float>& pair_weight) {
    const PlanBoard board = Download<PlanBoard>(plan_board_)[0];
    const size_t groups = (token_seq.size() + 7) / 8;
    std::map<std::pair<size_t, int32_t>, uint32_t> users;  // of each tile, a bit each
    for (size_t i = 0; i < ids.size(); ++i) {
      const size_t token = i / kChosen;
      if (token_seq[token] >= 0) users[{token / 8, ids[i]}] |= 1u << token % 8;
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      const size_t token = i / kChosen;
      if (token_seq[token] < 0) continue;
      const auto row = static_cast<size_t>(pair_of[i]);
      ASSERT_GE(row / 8, groups);
      const PlanBoard::Word& tile = board.tiles[row / 8 - groups];
      EXPECT_EQ(tile.launch, board.launch);
      const DirectTile expected{ids[i], static_cast<int>(token / 8), users.at({token / 8, ids[i]})};
      EXPECT_EQ(tile.value, expected.word());
      EXPECT_EQ(row % 8, token % 8);
      EXPECT_EQ(pair_weight[row], weights[i]);
    }
    EXPECT_EQ(board.num_tiles.launch, board.launch);
    EXPECT_EQ(board.num_tiles.value, users.size());
  }

  // In order of experts, tiles of eight of its tokens in their order, the last one of those left.
  void ExpectNamedTokens(const std::vector<int32_t>& token_seq, const std::vector<int32_t>& ids,
                         const std::vector<float>& weights, const std::vector<int32_t>& pair_of,
                         const std::vector<float>& pair_weight) {
    const PlanBoard board = Download<PlanBoard>(plan_board_)[0];
    std::map<int32_t, std::vector<size_t>> pairs;  // of each expert
    for (size_t i = 0; i < ids.size(); ++i) {
      if (token_seq[i / kChosen] >= 0) pairs[ids[i]].push_back(i);
    }
    size_t tile = 0;
    const auto first_row = static_cast<size_t>(SharedPairRows(std::ssize(token_seq)));
    for (const auto& [expert, of_expert] : pairs) {
      for (size_t begin = 0; begin < of_expert.size(); begin += 8, ++tile) {
        const PlanBoard::Tile& told = board.more_tiles[tile];
        EXPECT_EQ(told.first.launch, board.launch);
        EXPECT_EQ(told.second.launch, board.launch);
        const size_t count = std::min<size_t>(8, of_expert.size() - begin);
        EXPECT_EQ(told.first.value & 0xfff, static_cast<uint32_t>(expert) | (count - 1) << 9);
        const uint64_t named = told.first.value >> 12 | uint64_t{told.second.value} << 18;
        for (size_t i = 0; i < count; ++i) {
          const size_t pair = of_expert[begin + i], row = first_row + tile * 8 + i;
          EXPECT_EQ(named >> (6 * i) & 63, pair / kChosen);
          EXPECT_EQ(pair_of[pair], static_cast<int32_t>(row));
          EXPECT_EQ(pair_weight[row], weights[pair]);
        }
      }
    }
    EXPECT_EQ(board.num_tiles.launch, board.launch);
    EXPECT_EQ(board.num_tiles.value, tile);
  }

  Layer layer_{};
  TestMatrix gate_;
  TiledMatrix tiles_;
  std::vector<float> bias_;
  std::vector<int32_t> table_;
  RouteBoard* route_board_ = nullptr;
  device::Buffer plan_board_;
};

TEST_F(RouteDecodeCudaTest, MatchesTheCpu) {
  // Three clusters, of seven and of three blocks of 64 columns a block; blocks apart, whose last
  // one has no expert for all of its places; one cluster.
  const Layer pro{7168, 384}, narrow{3072, 384}, apart{1024, 300}, cluster{1024, 50};
  for (const Layer& layer : Sweep<Layer>({pro, narrow, apart, cluster}, {narrow, apart})) {
    SetUpLayer(layer);
    for (const int64_t tokens : Sweep<int64_t>({1, 2, 7, 8, 9, 12}, {8, 12})) {
      Check(tokens, false);
      Check(tokens, true);
    }
  }
}

// A table of five tokens' experts makes tiles of eight, and tiles of those that are left.
TEST_F(RouteDecodeCudaTest, OfMoreTokensMatchesTheCpu) {
  const Layer pro{7168, 384}, flash{4096, 256}, narrow{1024, 128};
  for (const Layer& layer : Sweep<Layer>({pro, flash, narrow}, {narrow})) {
    SetUpLayer(layer);
    for (const int64_t tokens : Sweep<int64_t>({13, 16, 17, 32, 33, 63, 64}, {16, 32, 64})) {
      ASSERT_TRUE(RoutesAtOnce(tokens, false, layer.num_experts, layer.hidden));
      Check(tokens, false);
      Check(tokens, true);
    }
  }
}

}  // namespace
}  // namespace fathom::kernels
