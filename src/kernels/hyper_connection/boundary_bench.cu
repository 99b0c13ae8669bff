// Time of the boundary between two sub-layers and of routing, at the widths of V4 Flash or Pro, and
// what the memory would take (4.55 TB/s, each byte once). A graph of 16 launches, each behind the
// one before, as in a step. `boundary_bench [flash|pro] [tokens...]`; a number with a p behind it:
// a prompt's.
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda_bench.cuh"
#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "kernels/moe_route/moe_route_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int kLayers = 16;
constexpr int kChosen = 6;

struct Model {
  int hidden, num_experts;
};
constexpr Model kFlash{4096, 256}, kPro{7168, 384};

class Bench {
 public:
  Bench(const Model& model, int64_t tokens, bool prefill)
      : hidden_(model.hidden), num_experts_(model.num_experts), tokens_(tokens), prefill_(prefill) {
    groups_ = (tokens + 255) / 256 * 32;
    streams_ = Bf16(tokens * kNumStreams * hidden_);
    pairs_ = Bf16((1 + kChosen) * tokens * hidden_);
    h_ = Bf16(groups_ * 8 * hidden_);
    for (auto& state : states_)
      state = {Floats(tokens * 4), Floats(tokens * 16), Floats(tokens * 16)};
    for (int i = 0; i < kLayers; ++i) {
      fn_.push_back(Floats(int64_t{kNumMixes} * kNumStreams * hidden_, 0.01f));
      gates_.push_back(Bf16(int64_t{num_experts_} * hidden_));
    }
    norm_ = Bf16(hidden_);
    base_ = Floats(kNumMixes);
    codes_ = bench_.Zeros<uint8_t>(groups_ * 8 * hidden_);
    gathered_ = bench_.Zeros<uint8_t>(MaxPairRows(tokens, num_experts_, kChosen) * hidden_);
    gathered_scales_ = Floats(MaxPairRows(tokens, num_experts_, kChosen) * hidden_ / 128);
    scales_ = Floats(groups_ * 8 * hidden_ / 128);
    scratch_ = Floats(BoundaryScratchFloats(tokens, hidden_));
    scores_ = Floats(tokens * num_experts_);
    bias_ = Floats(num_experts_);
    weights_ = Floats(tokens * kChosen);
    std::vector<int32_t> pair_of, seq;
    std::mt19937 random(1);
    for (int64_t t = 0; t < tokens; ++t) {
      seq.push_back(static_cast<int32_t>(t));
      for (int i = 0; i < kChosen; ++i)
        pair_of.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(kChosen * tokens) +
                                               static_cast<uint32_t>(tokens)));
    }
    pair_of_ = bench_.Upload(pair_of);
    token_seq_ = bench_.Upload(seq);
    expert_ids_ = bench_.Zeros<int32_t>(tokens * kChosen);
    board_ = bench_.Zeros<RouteBoard>(1);
    plan_ = {.num_tiles = bench_.Zeros<int32_t>(2),
             .tiles = bench_.Zeros<ExpertTile>(MaxExpertTiles(tokens, num_experts_, kChosen)),
             .pair_of = bench_.Zeros<int32_t>(tokens * kChosen),
             .pair_weight = Floats(MaxPairRows(tokens, num_experts_, kChosen)),
             .progress = bench_.Zeros<int32_t>(NumProgress(tokens, num_experts_, kChosen)),
             .board = bench_.Zeros<PlanBoard>(1)};
  }

  void Run() {
    const double attention = bench_.Time(kLayers, [this](int i) { Boundary(i, false); });
    const double experts = bench_.Time(kLayers, [this](int i) { Boundary(i, true); });
    const double routing = bench_.Time(kLayers, [this](int i) { Route(i); });
    const auto n = static_cast<double>(tokens_);
    const double mixers = kNumMixes * kNumStreams * hidden_ * 4.0;
    const auto floor = [&](double rows) { return (n * rows * hidden_ * 2 + mixers) / kBytesPerUs; };
    std::printf(
        "%6lld %-7s boundary %7.1f us (%5.1f), after experts %7.1f us (%5.1f), routing %7.1f us\n",
        static_cast<long long>(tokens_), prefill_ ? "prompt" : "decode", attention, floor(10.5),
        experts, floor(16.5), routing);
  }

 private:
  float* Floats(int64_t count, float scale = 1) {
    auto* const out = bench_.Allocate<float>(count);
    bench_.Fill(out, count, ++seed_, UniformValue{scale});
    return out;
  }
  __nv_bfloat16* Bf16(int64_t count) {
    auto* const out = bench_.Allocate<__nv_bfloat16>(count);
    bench_.Fill(out, count, ++seed_, UniformValue{});
    return out;
  }

  void Boundary(int i, bool experts) {
    SublayerOutput output{.y = pairs_};
    if (experts) output = {pairs_, pair_of_, kChosen};
    Launch(CudaHyperConnectionParams{.streams = streams_,
                                     .num_tokens = tokens_,
                                     .prefill = prefill_,
                                     .hidden = hidden_,
                                     .output = output,
                                     .before = states_[i % 2],
                                     .fn = fn_[static_cast<size_t>(i)],
                                     .scale = base_,
                                     .base = base_,
                                     .norm_weight = norm_,
                                     .constants = {1e-6f, 1e-6f, 20},
                                     .after = states_[1 - i % 2],
                                     .h = {h_, groups_},
                                     .h_fp8 = {codes_, scales_, groups_},
                                     .scratch = scratch_},
           bench_.stream());
  }
  void Route(int i) {
    Launch(
        CudaMoeRouteParams{
            .gate = {.kind = TileKind::kBf16,
                     .rows = num_experts_,
                     .cols = hidden_,
                     .tiles = reinterpret_cast<const std::byte*>(gates_[static_cast<size_t>(i)])},
            .h = {h_, groups_},
            .scores = scores_,
            .board = board_,
            .num_tokens = tokens_,
            .prefill = prefill_,
            .num_experts = num_experts_,
            .num_chosen = kChosen,
            .bias = bias_,
            .token_seq = token_seq_,
            .expert_ids = expert_ids_,
            .weights = weights_,
            .plan = plan_,
            .hidden = hidden_,
            .x = {codes_, scales_, groups_},
            .gathered = {gathered_, gathered_scales_,
                         MaxPairRows(tokens_, num_experts_, kChosen) / 8}},
        bench_.stream());
  }

  CudaBench bench_;
  const int hidden_, num_experts_;
  const int64_t tokens_;
  const bool prefill_;
  uint32_t seed_ = 0;
  int64_t groups_ = 0;
  __nv_bfloat16 *streams_, *pairs_, *h_, *norm_;
  std::vector<float*> fn_;
  std::vector<__nv_bfloat16*> gates_;
  HyperConnectionState states_[2];
  float *base_, *scales_, *gathered_scales_, *scratch_, *scores_, *bias_, *weights_;
  uint8_t *codes_, *gathered_;
  int32_t *pair_of_, *token_seq_, *expert_ids_;
  RouteBoard* board_;
  ExpertPlan plan_;
};

}  // namespace
}  // namespace fathom::kernels

int main(int argc, char** argv) {
  using namespace fathom::kernels;
  const bool names_model = argc > 1 && std::isalpha(argv[1][0]) != 0;
  const Model& model = names_model && std::strcmp(argv[1], "pro") == 0 ? kPro : kFlash;
  std::vector<const char*> cases(argv + (names_model ? 2 : 1), argv + argc);
  if (cases.empty()) {
    cases = {"1",   "2",  "8",   "12",  "16",   "32",   "64",    "128",
             "256", "2p", "16p", "64p", "128p", "512p", "2048p", "8192p"};
  }
  for (const char* tokens : cases) {
    Bench(model, std::atoi(tokens), std::strchr(tokens, 'p') != nullptr).Run();
  }
}
