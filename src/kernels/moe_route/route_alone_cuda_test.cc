// One token's routing, of the words that the boundary tells, against routing of what it writes: the
// same bits, and the same plan but for the order of its tiles.
#include <map>

#include "kernels/cuda_testing.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "kernels/hyper_connection/mixer_testing.h"
#include "kernels/moe_route/moe_route_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int kChosen = 6;

struct Layer {
  int64_t hidden;
  int num_experts;
};

class RouteAloneCudaTest : public CudaTest {
 protected:
  struct Output {
    std::vector<int32_t> ids;
    std::vector<float> weights, scores;
    std::map<uint32_t, float> tiles;  // weight of each expert's row
    std::vector<uint8_t> codes;
    std::vector<float> code_scales;
  };

  void SetUpLayer(int64_t hidden, int num_experts) {
    hidden_ = hidden, num_experts_ = num_experts;
    const TestMixer mixer = RandomMixer(24, hidden, 1);
    fn_ = KeepAs<float>(Upload(mixer.fn.data));
    scale_ = KeepAs<float>(Upload(mixer.scale));
    base_ = KeepAs<float>(Upload(mixer.base));
    norm_ = KeepAs<__nv_bfloat16>(Upload(mixer.norm));
    const TestMatrix gate = RandomMatrix(WeightDType::kBF16, num_experts, hidden, 5);
    WeightMatrix view = gate.view;
    view.data = Keep(Upload(gate.data));
    gate_ = LaunchTileWeights(view, TileKind::kBf16,
                              Keep(Poisoned(TiledBytes(TileKind::kBf16, num_experts, hidden))),
                              *gpu_stream_);
    bias_ = KeepAs<float>(Upload(RandomFloats(num_experts, 6)));
    route_board_ = KeepAs<RouteBoard>(Upload(std::vector<std::byte>(sizeof(RouteBoard))));
    plan_board_ = Upload(std::vector<std::byte>(sizeof(PlanBoard)));
    told_ = KeepAs<uint2>(Upload(std::vector<uint2>(static_cast<size_t>(ToldWords(hidden)))));
  }

  // The boundary and routing behind it.
  Output Run(bool told, uint32_t number, uint32_t seed, int seq) {
    const size_t kept = kept_.size();
    const auto codes = Poisoned(8 * hidden_), code_scales = Poisoned(hidden_ / 4);
    const auto ids = Poisoned(kChosen * 4), weights = Poisoned(kChosen * 4);
    const auto scores = Poisoned(num_experts_ * 4), pair_of = Poisoned(kChosen * 4);
    const auto pair_weight = Poisoned(MaxPairRows(1, num_experts_, kChosen) * 4);
    const LaunchNumber words{KeepAs<uint32_t>(Upload(std::vector<uint32_t>{number - 1})), 0,
                             nullptr};
    auto* const h = KeepAs<__nv_bfloat16>(Poisoned(16 * hidden_));
    CudaHyperConnectionParams boundary{
        .streams = KeepAs<__nv_bfloat16>(Upload(RandomActivations<BFloat16>(4 * hidden_, seed))),
        .num_tokens = 1,
        .hidden = hidden_,
        .output = {.y = KeepAs<__nv_bfloat16>(
                       Upload(RandomActivations<BFloat16>(hidden_, seed + 1)))},
        .before = {KeepAs<float>(Upload(RandomFloats(4, seed + 2))),
                   KeepAs<float>(Upload(RandomFloats(16, seed + 3)))},
        .fn = fn_,
        .scale = scale_,
        .base = base_,
        .norm_weight = norm_,
        .constants = {1e-6f, 1e-6f, 20},
        .after = {KeepAs<float>(Poisoned(16)), KeepAs<float>(Poisoned(64))},
        .h = {h, 1},
        .h_fp8 = {As<uint8_t>(codes), As<float>(code_scales), 1}};
    CudaMoeRouteParams route{
        .gate = gate_,
        .h = {h, 1},
        .scores = As<float>(scores),
        .board = route_board_,
        .num_tokens = 1,
        .num_experts = num_experts_,
        .num_chosen = kChosen,
        .bias = bias_,
        .token_seq = KeepAs<int32_t>(Upload(std::vector<int32_t>{seq})),
        .scaling = 1.5f,
        .expert_ids = As<int32_t>(ids),
        .weights = As<float>(weights),
        .plan = {.pair_of = As<int32_t>(pair_of),
                 .pair_weight = As<float>(pair_weight),
                 .progress = KeepAs<int32_t>(Poisoned(NumProgress(1, num_experts_, kChosen) * 4)),
                 .board = As<PlanBoard>(plan_board_)},
        .hidden = hidden_,
        .x = boundary.h_fp8,
        .gathered = boundary.h_fp8};
    if (told) {
      boundary.told = {told_, words};
      route.input = {boundary.told, norm_, boundary.constants.norm_eps};
    }
    EXPECT_TRUE(gpu_stream_->Synchronize().ok());
    Launch(boundary, *gpu_stream_);
    Launch(route, *gpu_stream_);
    Output out{Download<int32_t>(ids),   Download<float>(weights),    Download<float>(scores), {},
               Download<uint8_t>(codes), Download<float>(code_scales)};
    const PlanBoard board = Download<PlanBoard>(plan_board_)[0];
    const auto rows = Download<float>(pair_weight);
    const auto places = Download<int32_t>(pair_of);
    EXPECT_EQ(board.num_tiles.launch, board.launch);
    EXPECT_EQ(board.input, board.launch);
    EXPECT_EQ(board.num_tiles.value, seq < 0 ? 0u : static_cast<uint32_t>(kChosen));
    for (uint32_t i = 0; i < board.num_tiles.value; ++i) {
      EXPECT_EQ(board.tiles[i].launch, board.launch);
      const size_t row = 8 * (1 + i);
      out.tiles[static_cast<uint32_t>(DirectTile::Of(board.tiles[i].value).expert)] = rows[row];
      EXPECT_EQ(rows[row + 1], -1.0f);
    }
    for (size_t k = 0; seq >= 0 && k < kChosen; ++k) {
      const auto tile = static_cast<size_t>(places[k] / 8 - 1);
      EXPECT_EQ(board.tiles[tile].value, (DirectTile{out.ids[k], 0, 1}.word()));
    }
    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(kept), kept_.end());
    return out;
  }

  void Check(int64_t hidden, int num_experts) {
    kept_.clear();
    SetUpLayer(hidden, num_experts);
    ASSERT_TRUE(RoutesAlone(num_experts, hidden));
    uint32_t number = 7;
    for (const int seq : Sweep({0, 0, 0, -1, 0}, {0})) {  // -1: padding
      number += 4;
      const Output written = Run(false, number - 2, number * 10, seq);
      const Output told = Run(true, number, number * 10, seq);
      EXPECT_EQ(told.ids, written.ids);
      EXPECT_EQ(told.weights, written.weights);
      EXPECT_EQ(told.scores, written.scores);
      EXPECT_EQ(told.tiles, written.tiles);
      EXPECT_EQ(told.codes, written.codes);
      EXPECT_EQ(std::memcmp(told.code_scales.data(), written.code_scales.data(),
                            told.code_scales.size() * 4),
                0);
    }
  }

  int64_t hidden_ = 0;
  int num_experts_ = 0;
  float *fn_ = nullptr, *scale_ = nullptr, *base_ = nullptr, *bias_ = nullptr;
  __nv_bfloat16* norm_ = nullptr;
  TiledMatrix gate_;
  RouteBoard* route_board_ = nullptr;
  device::Buffer plan_board_;
  uint2* told_ = nullptr;
};

TEST_F(RouteAloneCudaTest, GivesTheBitsOfRoutingBehindTheBoundary) {
  for (const Layer& layer : Sweep<Layer>({{4096, 256}, {1024, 50}, {256, 32}}, {{1024, 50}})) {
    Check(layer.hidden, layer.num_experts);
  }
}

}  // namespace
}  // namespace fathom::kernels
