// Experts of tensor ranks in one launch, which complete the intermediates for each other while they
// run: the bits of one GPU, and of the two products apart with a gather between them, again and
// again in a replayed graph; a rank that does not come. In two shapes.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "comm/boundary_testing.h"
#include "comm/cuda_testing.h"
#include "comm/missing_rank_testing.h"
#include "kernels/grouped_gemm/experts_cuda.h"

namespace fathom::comm {
namespace {

using kernels::ExpertTile;
using kernels::PlanBoard;
using kernels::RankParts;
using kernels::TileKind;

struct Shape {
  const char* name;
  int64_t hidden, intermediate;
  int experts, chosen;
};
// Of 5 and 7 blocks, of which ranks have more or less.
constexpr Shape kUneven{"Uneven", 640, 896, 16, 4};
// Whole stages of a kernel of one token: on two ranks its items are as many as of Flash on four.
constexpr Shape kSlim{"Slim", 2048, 1024, 8, 6};
constexpr int64_t kMaxTokens = 512;
constexpr int64_t kSharedBytes = int64_t{64} << 20;

template <typename U>
U* As(const device::Buffer& buffer) {
  return reinterpret_cast<U*>(buffer.data());
}

RankParts Parts(int size, int64_t total, int64_t unit) {
  RankParts parts;
  for (int r = 0; r < size; ++r) parts.begin[r + 1] = total / unit * (r + 1) / size * unit;
  return parts;
}

// Any code but NaN.
uint8_t RandomCode(std::mt19937& random) {
  const auto code = static_cast<uint8_t>(random());
  return (code & 0x7f) == 0x7f ? uint8_t{0x30} : code;
}

// Matrices of one shape, as tiles and scales lie.
struct Weights {
  TileKind kind;
  int64_t experts, rows, cols;
  std::vector<uint8_t> tiles, scales;

  Weights(TileKind tile_kind, int64_t count, int64_t num_rows, int64_t num_cols, uint32_t seed)
      : kind(tile_kind), experts(count), rows(num_rows), cols(num_cols) {
    std::mt19937 random(seed);
    const auto scale = [&random] { return static_cast<uint8_t>(118 + random() % 5); };
    for (int64_t tile = 0; tile < experts * rows / 64 * cols / 128; ++tile) {
      const int codes = kind == TileKind::kFp4 ? 4096 : 8192;
      for (int i = 0; i < codes; ++i) tiles.push_back(RandomCode(random));
      for (int i = 0; kind == TileKind::kFp4 && i < 256; ++i) tiles.push_back(scale());
    }
    for (int64_t i = 0; i < experts * rows / 128 * cols / 128; ++i) scales.push_back(scale());
  }
  // Of every expert the rows [begin, end), multiples of 128.
  Weights Rows(int64_t begin, int64_t end) const {
    Weights part = *this;
    part.rows = end - begin;
    part.tiles = Slices(tiles, begin / 64, end / 64, rows / 64);
    part.scales = Slices(scales, begin / 128, end / 128, rows / 128);
    return part;
  }

 private:
  std::vector<uint8_t> Slices(const std::vector<uint8_t>& all, int64_t begin, int64_t end,
                              int64_t count) const {
    const auto row = static_cast<int64_t>(all.size()) / (experts * count);
    std::vector<uint8_t> part;
    for (int64_t e = 0; e < experts; ++e) {
      part.insert(part.end(), all.begin() + (e * count + begin) * row,
                  all.begin() + (e * count + end) * row);
    }
    return part;
  }
};

// Of a layer, all ranks' rows; gate_up: 128 of w1 and 128 of w3 in turn.
struct Layer {
  Weights routed_gate_up, routed_down, shared_gate_up, shared_down;

  Layer(const Shape& s, TileKind kind, uint32_t seed)
      : routed_gate_up(kind, s.experts, 2 * s.intermediate, s.hidden, seed),
        routed_down(kind, s.experts, s.hidden, s.intermediate, seed + 1),
        shared_gate_up(TileKind::kFp8, 1, 2 * s.intermediate, s.hidden, seed + 2),
        shared_down(TileKind::kFp8, 1, s.hidden, s.intermediate, seed + 3) {}
};

// What a step's routing leaves (expert_plan.h), and its activations.
struct Step {
  Shape shape;
  int64_t tokens, rows, x_rows;
  int32_t num_tiles = 0;
  int32_t num_groups = 0;  // of eight rows, of pairs in order
  std::vector<ExpertTile> tiles;
  std::vector<PlanBoard::Tile> named_tiles;  // the same, as_words
  std::vector<int32_t> pair_of;
  std::vector<float> pair_weight;
  std::vector<uint8_t> x, gathered;
  std::vector<float> x_scales, gathered_scales;

  Step(const Shape& s, int64_t num_tokens, uint32_t seed)
      : shape(s),
        tokens(num_tokens),
        rows(kernels::MaxPairRows(num_tokens, s.experts, s.chosen)),
        x_rows((num_tokens + 63) / 64 * 64),
        pair_weight(static_cast<size_t>(rows), -1.0f) {
    std::mt19937 random(seed);
    const auto experts = static_cast<size_t>(s.experts), num_chosen = static_cast<size_t>(s.chosen);
    std::vector<std::vector<int64_t>> pairs_of(experts);  // of each expert
    for (int64_t t = 0; t < tokens; ++t) {
      std::set<size_t> chosen;
      while (chosen.size() < num_chosen) chosen.insert(random() % experts);
      for (const size_t e : chosen) {
        pairs_of[e].push_back(static_cast<int64_t>(pair_of.size()));
        pair_of.push_back(0);
      }
    }
    const auto add_pair = [&](int64_t pair, int32_t row) {
      pair_of[static_cast<size_t>(pair)] = row;
      pair_weight[static_cast<size_t>(row)] = static_cast<float>(1 + random() % 8) / 8;
    };
    const auto place = tokens <= kernels::kDirectTokens ? &Step::PlaceDirect : &Step::PlaceInOrder;
    for (int32_t e = 0; e < s.experts; ++e) {
      const std::vector<int64_t>& pairs = pairs_of[static_cast<size_t>(e)];
      (this->*place)(e, pairs, add_pair);
      if (as_words()) NameTokens(e, pairs);
    }
    num_tiles = static_cast<int32_t>(tiles.size());
    const auto fill = [&](std::vector<uint8_t>& codes, std::vector<float>& scales,
                          int64_t num_rows) {
      for (int64_t i = 0; i < num_rows * s.hidden; ++i) codes.push_back(RandomCode(random));
      for (int64_t i = 0; i < num_rows * s.hidden / 128; ++i) {
        scales.push_back(0x1p-8f * static_cast<float>(1 << random() % 3));
      }
    };
    fill(x, x_scales, x_rows);
    fill(gathered, gathered_scales, rows);
  }

  using AddPair = std::function<void(int64_t pair, int32_t row)>;
  // Whatever eight tokens one of which chose the expert: a group of their own.
  void PlaceDirect(int32_t expert, const std::vector<int64_t>& pairs, const AddPair& add_pair) {
    const auto groups = static_cast<int32_t>((tokens + 7) / 8);
    for (int32_t g = 0; g < groups; ++g) {
      const auto group = groups + static_cast<int32_t>(tiles.size());
      bool is_used = false;
      for (const int64_t pair : pairs) {
        const int64_t token = pair / shape.chosen;
        if (token / 8 != g) continue;
        add_pair(pair, static_cast<int32_t>(group * 8 + token % 8));
        is_used = true;
      }
      if (!is_used) continue;
      tiles.push_back(
          {expert, g, group, static_cast<int32_t>(std::min<int64_t>(8, tokens - g * 8))});
    }
  }
  // Whole groups, in the order of the tokens.
  void PlaceInOrder(int32_t expert, const std::vector<int64_t>& pairs, const AddPair& add_pair) {
    const int tile_rows = kernels::ExpertTileRows(tokens);
    const auto group = static_cast<int32_t>(x_rows / 8 + num_groups);
    const auto count = static_cast<int32_t>(pairs.size());
    for (int32_t i = 0; i < count; i += tile_rows) {
      const int32_t at = group + i / 8;
      tiles.push_back({expert, at, at, std::min(tile_rows, count - i)});
    }
    for (int32_t i = 0; i < count; ++i) add_pair(pairs[static_cast<size_t>(i)], group * 8 + i);
    num_groups += (count + 7) / 8;
  }

  bool as_words() const {
    return tokens > kernels::kDirectTokens && tokens <= kernels::kWordTokens;
  }
  void NameTokens(int32_t expert, const std::vector<int64_t>& pairs) {
    for (size_t i = 0; i < pairs.size(); i += 8) {
      const size_t count = std::min<size_t>(8, pairs.size() - i);
      uint64_t named = 0;
      for (size_t j = 0; j < count; ++j) {
        named |= static_cast<uint64_t>(pairs[i + j] / shape.chosen) << 6 * j;
      }
      const uint64_t first =
          static_cast<uint64_t>(expert) | (count - 1) << 9 | (named & 0x3ffff) << 12;
      named_tiles.push_back(
          {{static_cast<uint32_t>(first), 1}, {static_cast<uint32_t>(named >> 18), 1}});
    }
  }

  // As routing leaves it.
  PlanBoard Board() const {
    PlanBoard board{};
    board.launch = board.input = 1;
    board.num_tiles = {static_cast<uint32_t>(num_tiles), 1};
    std::copy(named_tiles.begin(), named_tiles.end(), board.more_tiles);
    if (tokens > kernels::kDirectTokens) return board;
    for (size_t i = 0; i < tiles.size(); ++i) {
      board.tiles[i] = {static_cast<uint32_t>(tiles[i].x_group << 16 | tiles[i].expert), 1};
    }
    return board;
  }

  // Rows that somebody reads.
  std::vector<int64_t> Used() const {
    std::vector<int64_t> used(pair_of.begin(), pair_of.end());
    for (int64_t t = 0; t < tokens; ++t) used.push_back(t);
    return used;
  }
};

// A step on one GPU, with some rows of both products.
class StepOnGpu {
 public:
  StepOnGpu(const TestRank& rank, const Layer& layer, const Step& step, int64_t first_block,
            int64_t end_block, int64_t first_row, int64_t end_row)
      : rank_(rank), step_(step), first_row_(first_row), own_rows_(end_row - first_row) {
    const int64_t begin = first_block * 256, end = end_block * 256;
    Put(layer.routed_gate_up.Rows(begin, end), p_.routed.gate_up, p_.routed.gate_up_scales);
    Put(layer.routed_down.Rows(first_row, end_row), p_.routed.down, p_.routed.down_scales);
    Put(layer.shared_gate_up.Rows(begin, end), p_.shared.gate_up, p_.shared.gate_up_scales);
    Put(layer.shared_down.Rows(first_row, end_row), p_.shared.down, p_.shared.down_scales);
    p_.routed.kind = layer.routed_gate_up.kind;
    p_.shared.kind = TileKind::kFp8;
    p_.num_tokens = step.tokens;
    p_.hidden = step_.shape.hidden;
    p_.intermediate = step_.shape.intermediate;
    p_.num_experts = step_.shape.experts;
    p_.num_chosen = step_.shape.chosen;
    p_.swiglu_limit = 10.0f;
    p_.x = {Keep<uint8_t>(rank.Upload(step.x)), Keep<float>(rank.Upload(step.x_scales)),
            step.x_rows / 8};
    p_.gathered = {Keep<uint8_t>(rank.Upload(step.gathered)),
                   Keep<float>(rank.Upload(step.gathered_scales)), step.rows / 8};
    p_.plan = {.num_tiles = Keep<int32_t>(rank.Upload(std::vector<int32_t>{step.num_tiles})),
               .tiles = Keep<ExpertTile>(rank.Upload(step.tiles)),
               .pair_of = Keep<int32_t>(rank.Upload(step.pair_of)),
               .pair_weight = Keep<float>(rank.Upload(step.pair_weight)),
               .progress = Keep<int32_t>(rank.Poisoned(progress_bytes())),
               .board = Keep<PlanBoard>(rank.Upload(std::vector<PlanBoard>{step.Board()})),
               .as_words = step.as_words()};
    y_ = Keep<__nv_bfloat16>(rank.Poisoned(step.rows * step_.shape.hidden * 2));
    p_.y = y_ + first_row;
    p_.y_stride = step_.shape.hidden;
  }

  kernels::CudaExpertParams& params() { return p_; }
  kernels::SublayerOutput output() const { return {y_, p_.plan.pair_of, step_.shape.chosen}; }

  // As routing does, before each launch.
  void ResetProgress() const {
    CHECK_EQ(cudaMemsetAsync(p_.plan.progress, 0, static_cast<size_t>(progress_bytes()),
                             rank_.cuda_stream()),
             cudaSuccess);
  }

  // Of the rows that are read, this GPU's columns: `expected` has them all.
  void ExpectColumnsOf(const std::vector<uint16_t>& expected, const char* what) const {
    const auto y = Outputs();
    for (const int64_t row : step_.Used()) {
      const int64_t at = row * step_.shape.hidden + first_row_;
      ASSERT_EQ(0, std::memcmp(y.data() + at, expected.data() + at,
                               static_cast<size_t>(own_rows_) * sizeof(uint16_t)))
          << what << ", rank " << rank_.collectives->rank() << ", row " << row << " of "
          << step_.tokens << " tokens";
    }
  }
  std::vector<uint16_t> Outputs() const {
    return rank_.Download<uint16_t>(y_, static_cast<size_t>(step_.rows * step_.shape.hidden));
  }
  void PoisonOutputs() const {
    CHECK_EQ(cudaMemsetAsync(y_, 0xff, static_cast<size_t>(step_.rows * step_.shape.hidden * 2),
                             rank_.cuda_stream()),
             cudaSuccess);
  }

 private:
  template <typename U>
  U* Keep(device::Buffer buffer) {
    kept_.push_back(std::move(buffer));
    return As<U>(kept_.back());
  }
  void Put(const Weights& weights, const std::byte*& tiles, const uint8_t*& scales) {
    tiles = Keep<std::byte>(rank_.Upload(weights.tiles));
    scales = Keep<uint8_t>(rank_.Upload(weights.scales));
  }
  int64_t progress_bytes() const {
    return kernels::NumProgress(step_.tokens, step_.shape.experts, step_.shape.chosen) *
           int64_t{sizeof(int32_t)};
  }

  const TestRank& rank_;
  const Step& step_;
  const int64_t first_row_, own_rows_;
  kernels::CudaExpertParams p_;
  __nv_bfloat16* y_ = nullptr;
  std::vector<device::Buffer> kept_;
};

// Where the intermediates of steps, their packets and flags, and an output are in shared memory: in
// the same places for all steps, for packets and flags stay from step to step.
struct Places {
  Places(const TestRank& rank, const Shape& s)
      : shape(s), rows(kernels::MaxPairRows(kMaxTokens, s.experts, s.chosen)) {
    std::byte* at = rank.collectives->shared_memory();
    codes = reinterpret_cast<uint8_t*>(at);
    scales = reinterpret_cast<float*>(at += rows * s.intermediate);
    arrived = reinterpret_cast<uint64_t*>(at += rows * s.intermediate / 128 * 4);
    at += kernels::NumArrivals(kMaxTokens, s.experts, s.chosen, s.intermediate) * 8;
    packets = reinterpret_cast<uint4*>(at += -reinterpret_cast<intptr_t>(at) & 15);
    at += kernels::NumPackets(s.chosen, s.intermediate) * int64_t{sizeof(uint4)};
    y = reinterpret_cast<__nv_bfloat16*>(at);
    CHECK_LE(at + s.hidden * 2 - rank.collectives->shared_memory(), kSharedBytes);
  }
  // Before any rank begins.
  void Poison() const {
    CHECK_EQ(cudaMemset(codes, 0xff, static_cast<size_t>(rows * shape.intermediate)), cudaSuccess);
    CHECK_EQ(cudaMemset(scales, 0xff, static_cast<size_t>(rows * shape.intermediate / 128 * 4)),
             cudaSuccess);
    CHECK_EQ(cudaMemset(y, 0, shape.hidden * 2), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  kernels::Fp8Tiles t() const { return {codes, scales, rows / 8}; }

  Shape shape;
  int64_t rows;
  uint8_t* codes;
  float* scales;
  uint64_t* arrived;
  uint4* packets;
  __nv_bfloat16* y;
};

class CudaRankExpertsTest : public testing::TestWithParam<std::tuple<Shape, int>> {
 protected:
  void SetUp() override {
    const int count = device::CountGpus();
    if (count < num_ranks_) GTEST_SKIP() << num_ranks_ << " GPUs are needed, there are " << count;
  }

  void MakeRanks(Duration timeout = std::chrono::seconds(5)) {
    blocks_ = Parts(num_ranks_, shape_.intermediate / 128, 1);
    columns_ = Parts(num_ranks_, shape_.hidden, 128);
    ranks_ = std::make_unique<TestRanks>(
        MakePeerGroup(FirstGpus(num_ranks_),
                      {.hidden = shape_.hidden, .shared_bytes = kSharedBytes, .timeout = timeout})
            .value());
  }

  // All rows on one GPU.
  std::vector<uint16_t> Expected(TestRank& rank, const Layer& layer, const Step& step) const {
    StepOnGpu alone(rank, layer, step, 0, shape_.intermediate / 128, 0, shape_.hidden);
    const auto codes = rank.Poisoned(step.rows * shape_.intermediate);
    const auto scales = rank.Poisoned(step.rows * shape_.intermediate / 128 * 4);
    const auto packets = rank.Upload(std::vector<uint4>(
        static_cast<size_t>(kernels::NumPackets(shape_.chosen, shape_.intermediate))));
    alone.params().t = {As<uint8_t>(codes), As<float>(scales), step.rows / 8};
    alone.params().t_packets = As<uint4>(packets);
    alone.ResetProgress();
    kernels::Launch(alone.params(), *rank.stream);
    return alone.Outputs();
  }

  StepOnGpu OnRank(const TestRank& rank, const Layer& layer, const Step& step,
                   const Places& places) const {
    const int r = rank.collectives->rank();
    StepOnGpu on_rank(rank, layer, step, blocks_.begin[r], blocks_.begin[r + 1], columns_.begin[r],
                      columns_.begin[r + 1]);
    on_rank.params().t = places.t();
    on_rank.params().t_packets = places.packets;
    return on_rank;
  }

  // sends: the outputs of one token, for a boundary with the exchange that is returned.
  kernels::OutputExchange Together(const TestRank& rank, StepOnGpu& step, const Places& places,
                                   bool sends = false) const {
    const int r = rank.collectives->rank();
    const kernels::PeerExchange exchange =
        rank.collectives->GatherInExperts(step.params().num_tokens, blocks_, columns_);
    CHECK_EQ(exchange.peers.size, num_ranks_);
    kernels::OutputExchange rows;
    if (sends) {
      rows = rank.collectives->GatherInBoundary(columns_, kernels::OutputExchange::Sent::kRows);
    }
    kernels::Launch(step.params(),
                    {.exchange = exchange,
                     .blocks = blocks_,
                     .down_rows = columns_.count(r),
                     .arrived = places.arrived,
                     .outputs = rows.exchange,
                     .first_output = columns_.begin[r]},
                    *rank.stream);
    return rows;
  }
  void Apart(const TestRank& rank, StepOnGpu& step, const Places& places) const {
    const int r = rank.collectives->rank();
    kernels::CudaExpertParams p = step.params();
    p.intermediate = blocks_.count(r) * 128;
    p.t.codes += blocks_.begin[r] * p.t.row_groups * kernels::kTileBytes;
    p.t.scales += blocks_.begin[r] * p.t.row_groups * kernels::kTileRows;
    kernels::LaunchGateUp(p, *rank.stream);
    CHECK(rank.collectives
              ->GatherTiles({.exchange = {},
                             .tiles = places.t(),
                             .blocks = blocks_,
                             .num_tokens = p.num_tokens,
                             .pair_of = p.plan.pair_of,
                             .num_chosen = shape_.chosen,
                             .num_rows = places.rows},
                            *rank.stream)
              .ok());
    p = step.params();
    p.hidden = columns_.count(r);
    kernels::LaunchDown(p, *rank.stream);
  }
  // What lies between two layers' experts.
  void Exchange(const TestRank& rank, const Places& places) const {
    CHECK(rank.collectives
              ->GatherOutput({.exchange = {},
                              .output = {.y = places.y},
                              .columns = columns_,
                              .num_tokens = 1,
                              .y = places.y},
                             *rank.stream)
              .ok());
  }

  const Shape shape_ = std::get<0>(GetParam());
  const int num_ranks_ = std::get<1>(GetParam());
  RankParts blocks_, columns_;
  std::unique_ptr<TestRanks> ranks_;
};

TEST_P(CudaRankExpertsTest, OneLaunchHasTheBitsOfOneGpu) {
  MakeRanks();
  for (const TileKind kind : {TileKind::kFp4, TileKind::kFp8}) {
    const Layer layer(shape_, kind, 1);
    for (const int64_t tokens : {1, 2, 5, 8, 9, 12, 13, 40, 200, 512}) {
      const Step step(shape_, tokens, static_cast<uint32_t>(tokens));
      std::vector<uint16_t> expected;
      ranks_->OnAll([&](TestRank& rank) {
        if (rank.collectives->rank() == 0) expected = Expected(rank, layer, step);
        Places(rank, shape_).Poison();
      });
      ranks_->OnAll([&](TestRank& rank) {
        const Places places(rank, shape_);
        StepOnGpu own = OnRank(rank, layer, step, places);
        for (const bool together : {true, false, true}) {
          own.PoisonOutputs();
          own.ResetProgress();
          if (together) {
            Together(rank, own, places);
          } else {
            Apart(rank, own, places);
          }
          Exchange(rank, places);
          rank.collectives->EndStep(*rank.stream);
          own.ExpectColumnsOf(expected, together ? "together" : "apart");
        }
        EXPECT_TRUE(rank.collectives->Check().ok()) << rank.collectives->Check().message();
      });
    }
  }
}

// Two steps take turns in the same memory, so that whoever read too early, or was written to too
// early, would have the other step's values.
TEST_P(CudaRankExpertsTest, AReplayedChainOfLayersHasTheBitsOfOneGpu) {
  constexpr int kRounds = 20, kReplays = 50;
  MakeRanks();
  const Layer layer(shape_, TileKind::kFp4, 1);
  for (const int64_t tokens : {1, 6, 30}) {
    const Step steps[] = {Step(shape_, tokens, 5), Step(shape_, tokens, 6)};
    std::vector<uint16_t> expected[2];
    ranks_->OnAll([&](TestRank& rank) {
      for (int i = 0; rank.collectives->rank() == 0 && i < 2; ++i) {
        expected[i] = Expected(rank, layer, steps[i]);
      }
      Places(rank, shape_).Poison();
    });
    ranks_->OnAll([&](TestRank& rank) {
      const Places places(rank, shape_);
      StepOnGpu own[] = {OnRank(rank, layer, steps[0], places),
                         OnRank(rank, layer, steps[1], places)};
      const cudaGraphExec_t graph = Capture(rank, [&] {
        for (StepOnGpu& step : own) step.ResetProgress();
        for (StepOnGpu& step : own) {
          Together(rank, step, places);
          Exchange(rank, places);
        }
        rank.collectives->EndStep(*rank.stream);
      });
      for (int round = 0; round < kRounds; ++round) {
        for (const StepOnGpu& step : own) step.PoisonOutputs();
        for (int i = 0; i < kReplays; ++i) {
          ASSERT_EQ(cudaGraphLaunch(graph, rank.cuda_stream()), cudaSuccess);
        }
        for (int i = 0; i < 2; ++i) own[i].ExpectColumnsOf(expected[i], "replayed");
      }
      EXPECT_TRUE(rank.collectives->Check().ok()) << rank.collectives->Check().message();
      cudaGraphExecDestroy(graph);
    });
  }
}

// One token: the boundary takes the rows of all ranks from their launches, two steps in turn.
TEST_P(CudaRankExpertsTest, ABoundaryAwaitsWhatAllRanksSend) {
  constexpr int kReplays = 500;
  MakeRanks();
  const Layer layer(shape_, TileKind::kFp4, 1);
  const Step steps[] = {Step(shape_, 1, 5), Step(shape_, 1, 6)};
  ranks_->OnAll([&](TestRank& rank) { Places(rank, shape_).Poison(); });
  ranks_->OnAll([&](TestRank& rank) {
    const Places places(rank, shape_);
    StepOnGpu own[] = {OnRank(rank, layer, steps[0], places),
                       OnRank(rank, layer, steps[1], places)};
    const TestBoundary boundaries[] = {TestBoundary(rank, 1, shape_.hidden),
                                       TestBoundary(rank, 1, shape_.hidden)};
    const cudaGraphExec_t graph = Capture(rank, [&] {
      for (const TestBoundary& boundary : boundaries) boundary.Reset();
      for (int i = 0; i < 2; ++i) own[i].ResetProgress();
      for (int i = 0; i < 2; ++i) {
        const kernels::OutputExchange rows = Together(rank, own[i], places, true);
        boundaries[i].Enqueue(own[i].output(), rows);
      }
      rank.collectives->EndStep(*rank.stream);
    });
    for (int i = 0; i < kReplays; ++i) {
      ASSERT_EQ(cudaGraphLaunch(graph, rank.cuda_stream()), cudaSuccess);
    }
    for (int i = 0; i < 2; ++i) {
      const BoundaryBits actual = boundaries[i].Bits();
      const auto y = rank.Upload(Expected(rank, layer, steps[i]));
      kernels::SublayerOutput whole = own[i].output();
      whole.y = As<__nv_bfloat16>(y);
      ExpectSameBits(actual, RunBoundary(rank, 1, shape_.hidden, whole, {}), 1);
    }
    EXPECT_TRUE(rank.collectives->Check().ok()) << rank.collectives->Check().message();
    cudaGraphExecDestroy(graph);
  });
}

TEST_P(CudaRankExpertsTest, ARankThatDoesNotComeIsNamed) {
  const Layer layer(shape_, TileKind::kFp4, 1);
  const int missing = num_ranks_ - 1;
  for (const int64_t tokens : {1, 2}) {
    MakeRanks(std::chrono::milliseconds(300));
    const Step step(shape_, tokens, 1);
    ranks_->OnAll([&](TestRank& rank) {
      if (rank.collectives->rank() == missing) return;
      const Places places(rank, shape_);
      StepOnGpu own = OnRank(rank, layer, step, places);
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < 20; ++i) {  // the first waits, the others know
        own.ResetProgress();
        Together(rank, own, places);
        rank.collectives->EndStep(*rank.stream);
      }
      ASSERT_TRUE(rank.stream->Synchronize().ok());
      EXPECT_LT(Seconds(std::chrono::steady_clock::now() - begin), 2.0);
      ExpectMissingIsNamed(*rank.collectives, missing);
    });
  }
}

// Then the two products are apart.
TEST_P(CudaRankExpertsTest, ARankWithoutColumnsIsForTheGather) {
  MakeRanks();
  RankParts none = blocks_;
  none.begin[1] = 0;
  ranks_->OnAll([&](TestRank& rank) {
    EXPECT_EQ(rank.collectives->GatherInExperts(2, none, columns_).peers.size, 1);
    EXPECT_EQ(rank.collectives->GatherInExperts(2, blocks_, none).peers.size, 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaRankExpertsTest,
                         testing::Combine(testing::Values(kUneven, kSlim), testing::Values(2, 4)),
                         [](const auto& param) {
                           return std::get<0>(param.param).name +
                                  std::to_string(std::get<1>(param.param));
                         });

}  // namespace
}  // namespace fathom::comm
