// Time of the routed FP4 experts of a prompt's step at V4 Flash's shapes, as one of some tensor
// ranks has them: microseconds of both products, beside the time of their bytes (4.55 TB/s) and of
// their arithmetic (1,320 TFLOP/s). Experts have equal numbers of tokens (shape 0), or such as
// differ by half of their mean (4) or by all of it (1). The shared expert's launches, of 64 tokens,
// are in it. `experts_bench [ranks [tokens of an expert ...]]`.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda_bench.cuh"
#include "kernels/grouped_gemm/experts_cuda.h"
#include "kernels/grouped_gemm/experts_large.h"

namespace fathom::kernels {
namespace {

constexpr int64_t kHidden = 4096, kIntermediate = 2048;
constexpr int kExperts = 256, kChosen = 6, kSharedTokens = 64;
constexpr int64_t kMostPairs = 320 * kExperts;
constexpr int kLayers = 2;  // each of other weights
constexpr double kFlopsPerUs = 1.32e9;

// Of FP4 tiles: scales near each other, as a matrix's are.
__global__ void FillScalesKernel(std::byte* tiles) {
  auto* const scales = reinterpret_cast<uint32_t*>(tiles + blockIdx.x * 4352l + 4096);
  scales[threadIdx.x] =
      0x79797979u - (blockIdx.x * 64 + threadIdx.x) * 2654435761u % 2 * 0x00010001u;
}

class ExpertsBench {
 public:
  explicit ExpertsBench(int ranks) : intermediate_(kIntermediate / ranks) {
    const int64_t rows = MaxPairRows(kMostPairs / kChosen, kExperts, kChosen);
    for (ExpertTiles& routed : routed_) {
      routed.kind = TileKind::kFp4;
      routed.gate_up = Weights(kExperts * 2 * intermediate_, kHidden);
      routed.down = Weights(kExperts * kHidden, intermediate_);
      routed.gate_up_largest = Bytes(kExperts * 2 * intermediate_, 0x79797979u);
      routed.down_largest = Bytes(kExperts * kHidden, 0x79797979u);
    }
    shared_ = {.kind = TileKind::kFp8,
               .gate_up = Codes(2 * intermediate_ * kHidden),
               .gate_up_scales = Bytes(2 * intermediate_ * kHidden >> 14, 0x70707070u),
               .down = Codes(intermediate_ * kHidden),
               .down_scales = Bytes(intermediate_ * kHidden >> 14, 0x70707070u)};
    gathered_ = Tiles(kHidden, rows), t_ = Tiles(intermediate_, rows);
    x_ = Tiles(kHidden, kSharedTokens);
    pair_weight_ = bench_.Allocate<float>(rows);
    bench_.Fill(pair_weight_, rows, 1, UniformValue{});
    y_ = bench_.Allocate<__nv_bfloat16>(rows * kHidden);
  }

  // Experts get about so many tokens: all the same, or as a gamma distribution of this shape says.
  void Run(int mean, int shape) {
    std::vector<int> tokens(kExperts, mean);
    if (shape > 0) {
      std::mt19937 random(1);
      std::gamma_distribution<double> spread(shape, static_cast<double>(mean) / shape);
      for (int& n : tokens) n = static_cast<int>(std::lround(spread(random)));
    }
    const int64_t pairs = std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
    CHECK_LE(pairs, kMostPairs);
    CudaExpertParams p{.num_tokens = pairs / kChosen,
                       .hidden = kHidden,
                       .intermediate = intermediate_,
                       .num_experts = kExperts,
                       .num_chosen = kChosen,
                       .swiglu_limit = 10.0f,
                       .routed = {},
                       .shared = shared_,
                       .x = x_,
                       .gathered = gathered_,
                       .plan = {.pair_weight = pair_weight_, .is_large = true, .has_narrow = true},
                       .t = t_,
                       .y = y_,
                       .y_stride = kHidden,
                       .num_shared_tokens = kSharedTokens};
    MakePlan(p, tokens);
    const auto time = [&](auto launch) {
      return bench_.Time(2 * kLayers, [&](int i) {
        p.routed = routed_[i % kLayers];
        launch(p, bench_.stream());
      });
    };
    const double gate_up = time(LaunchGateUp), down = time(LaunchDown);
    const auto used = kExperts - std::count(tokens.begin(), tokens.end(), 0);
    const double of_expert = 3.0 * static_cast<double>(intermediate_) * kHidden;
    const double bytes = static_cast<double>(used) * of_expert * 4352 / 8192 / kBytesPerUs;
    const double flops = static_cast<double>(pairs) * of_expert * 2 / kFlopsPerUs;
    std::printf(
        "%4d tokens, shape %d: gate and up %7.1f, down %7.1f, both %7.1f us; bytes %6.1f, "
        "arithmetic %6.1f\n",
        mean, shape, gate_up, down, gate_up + down, bytes, flops);
  }

 private:
  void MakePlan(CudaExpertParams& p, const std::vector<int>& tokens) {
    const ExpertTileSplit split = SplitOfTiles(p.plan, p.num_tokens, kExperts, kChosen);
    std::vector<ExpertTile> tiles[2];
    int group = kSharedTokens / 8;
    for (int e = 0; e < kExperts; ++e) {
      const int count = tokens[static_cast<size_t>(e)], wide = split.NumWide(count);
      for (int row = 0, i = 0; row < count; ++i) {
        const int rows = std::min(i < wide ? split.rows : kNarrowTileRows, count - row);
        tiles[i < wide ? 0 : 1].push_back({e, group + row / 8, group + row / 8, rows});
        row += rows;
      }
      group += (count + 7) / 8;
    }
    const auto num_wide = static_cast<int>(tiles[0].size());
    tiles[0].insert(tiles[0].end(), tiles[1].begin(), tiles[1].end());
    p.plan.num_tiles =
        bench_.Upload(std::vector<int32_t>{static_cast<int>(tiles[0].size()), num_wide});
    p.plan.tiles = bench_.Upload(tiles[0]);
  }

  std::byte* Codes(int64_t bytes) {
    auto* const words = bench_.Allocate<uint32_t>(bytes / 4);
    bench_.Fill(words, bytes / 4, 1, MaskedWord{0xbfbfbfbfu});
    return reinterpret_cast<std::byte*>(words);
  }
  std::byte* Weights(int64_t rows, int64_t cols) {
    const int64_t tiles = rows / 64 * (cols / 128);
    std::byte* const out = Codes(tiles * 4352);
    FillScalesKernel<<<static_cast<unsigned>(tiles), 64, 0,
                       static_cast<cudaStream_t>(bench_.stream().native_handle())>>>(out);
    return out;
  }
  uint8_t* Bytes(int64_t count, uint32_t word) {
    auto* const words = bench_.Allocate<uint32_t>((count + 3) / 4);
    bench_.Fill(words, (count + 3) / 4, 0, MaskedWord{0, word});
    return reinterpret_cast<uint8_t*>(words);
  }
  Fp8Tiles Tiles(int64_t columns, int64_t rows) {
    const int64_t count = columns / 128 * rows;
    auto* const scales = bench_.Allocate<float>(count);
    bench_.Fill(scales, count, 3, UniformValue{});
    return {reinterpret_cast<uint8_t*>(Codes(columns * rows)), scales, rows / 8};
  }

  const int64_t intermediate_;
  CudaBench bench_;
  ExpertTiles routed_[kLayers], shared_;
  Fp8Tiles gathered_, t_, x_;
  float* pair_weight_;
  __nv_bfloat16* y_;
};

void Main(int argc, char** argv) {
  ExpertsBench bench(argc > 1 ? std::max(1, std::atoi(argv[1])) : 1);
  std::vector<int> tokens;
  for (int i = 2; i < argc; ++i) tokens.push_back(std::atoi(argv[i]));
  if (tokens.empty()) tokens = {8, 16, 32, 48, 64, 80, 96, 128, 192, 256};
  for (const int shape : {0, 4, 1}) {
    for (const int n : tokens) bench.Run(n, shape);
  }
}

}  // namespace
}  // namespace fathom::kernels

int main(int argc, char** argv) { fathom::kernels::Main(argc, argv); }
