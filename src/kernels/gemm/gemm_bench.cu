// Time of the dense products of a decode step at V4 Flash's shapes, whole and as a tensor rank of
// two or four has them: microseconds a product, and the floor of its bytes (4.55 TB/s). `in turn`:
// a graph of dependent launches, each of other weights. `after idle`: each behind a kernel of one
// block that takes 12 us, as the step's phases without weights do, less that kernel's time.
// `gemm_bench [tokens ...]`; `gemm_bench --prompt [tokens ...]` of a prompt's step, whose ranks
// have all rows.
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "kernels/collective/packets.cuh"
#include "kernels/cuda_bench.cuh"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/output_alone_cuda.h"
#include "kernels/gemm/output_batch_cuda.h"
#include "kernels/gemm/output_rows_cuda.h"
#include "kernels/launch.cuh"

namespace fathom::kernels {
namespace {

constexpr int kMaxLayers = 16;
constexpr int64_t kMaxTokens = 2048;

__global__ void IdleKernel() {
  WaitForPredecessor();
  AllowSuccessor();
  const uint64_t start = Nanoseconds();
  while (Nanoseconds() - start < 12000) {
  }
}

struct Matrix {
  TileKind kind;
  int64_t rows, cols;
  int groups = 1;
  GemmOutput output = GemmOutput::kBf16;
};

struct Product {
  const char* name;
  std::vector<Matrix> matrices;
  bool is_split;  // over ranks, by rows
  bool has_few_rows = false;
  bool has_columns = false;  // a rank has some columns of all rows
};

const std::vector<Product> kProducts = {
    {"input",
     {{TileKind::kFp8, 1024, 4096},
      {TileKind::kFp8, 512, 4096},
      {TileKind::kBf16, 1024, 4096, 1, GemmOutput::kF32},
      {TileKind::kBf16, 1024, 4096, 1, GemmOutput::kF32},
      {TileKind::kBf16, 256, 4096, 1, GemmOutput::kF32},
      {TileKind::kBf16, 256, 4096, 1, GemmOutput::kF32},
      {TileKind::kBf16, 64, 4096}},
     false},
    {"query", {{TileKind::kFp8, 32768, 1024}, {TileKind::kFp8, 8192, 1024}}, true},
    {"query 128", {{TileKind::kFp8, 32768, 1024}}, true},
    {"grouped", {{TileKind::kFp8AsBf16, 8192, 4096, 8, GemmOutput::kFp8Tiles}}, true},
    {"output", {{TileKind::kFp8, 4096, 8192}}, true},
    {"columns", {{TileKind::kFp8, 4096, 8192, 1, GemmOutput::kF32}}, true, false, true},
    {"gate", {{TileKind::kBf16, 256, 4096, 1, GemmOutput::kF32}}, false, true},
    {"gate, Pro", {{TileKind::kBf16, 384, 7168, 1, GemmOutput::kF32}}, false, true},
    // Half of Pro's, so that a quarter is what a rank of eight has.
    {"grouped, Pro", {{TileKind::kFp8AsBf16, 8192, 4096, 8, GemmOutput::kFp8Tiles}}, true, true},
    {"output, Pro", {{TileKind::kFp8, 3584, 16384}}, true, true},
    {"head", {{TileKind::kBf16, 129280, 4096, 1, GemmOutput::kF32}}, true}};

class Bench {
 public:
  explicit Bench(bool is_prompt) : is_prompt_(is_prompt) {
    x_ = Memory(kMaxTokens * 32768 * 2);
    scales_ = Memory(kMaxTokens * 128 * 4);
    y_ = Memory(kMaxTokens * 129280 * 4);
  }

  void Run(const Product& product, int ranks, const std::vector<int64_t>& tokens) {
    double bytes = 0;
    std::vector<CudaGemmParams> layers;
    bench_.Free(3);
    while (layers.size() < kMaxLayers && bytes * layers.size() < 6e9) {
      CudaGemmParams& params = layers.emplace_back();
      bytes = 0;
      for (const Matrix& m : product.matrices) {
        const bool whole = !product.is_split || (ranks > 1 && m.rows == 8192 && m.cols == 1024);
        const int64_t rows = whole || product.has_columns ? m.rows : m.rows / ranks;
        const int64_t cols = product.has_columns ? m.cols / ranks : m.cols;
        const int64_t size = TiledBytes(m.kind, rows, cols);
        GemmProblem& p = params.problems[params.num_problems++];
        p.w = {m.kind,
               rows,
               cols,
               Memory(TiledBytes(m.kind, rows, m.cols)),
               reinterpret_cast<const uint8_t*>(Memory((rows + 127) / 128 * m.cols / 128)),
               m.cols};
        if (m.kind == TileKind::kBf16) p.w.scales = nullptr;
        p.groups = m.groups == 1 ? 1 : m.groups / ranks;
        p.output = m.output;
        p.y = y_, p.y_stride = rows;
        params.many_rows = m.rows > 100000;
        params.few_rows = product.has_few_rows;
        bytes += static_cast<double>(size);
      }
    }
    std::printf("%-12s 1/%d, %6.1f MB, floor %6.1f us:", product.name, ranks, bytes / 1e6,
                bytes / kBytesPerUs);
    for (const int64_t n : tokens) {
      if (product.has_columns && n > 16) break;  // what boundaries add up
      for (CudaGemmParams& params : layers) {
        params.num_tokens = n;
        params.prefill = is_prompt_;
        const int64_t groups = PaddedTokens(n, is_prompt_) / 8;
        for (int i = 0; i < params.num_problems; ++i) {
          GemmProblem& p = params.problems[i];
          p.x_fp8 = {reinterpret_cast<uint8_t*>(x_), reinterpret_cast<float*>(scales_), groups};
          p.x_bf16 = {reinterpret_cast<__nv_bfloat16*>(x_), groups};
          p.y_fp8 = {reinterpret_cast<uint8_t*>(y_), reinterpret_cast<float*>(scales_), groups};
        }
      }
      const bool sums = product.has_columns;
      const double turn = Time(layers, false, sums), idle = Time(layers, true, sums);
      std::printf("  %3d: %5.1f %5.1f", static_cast<int>(n), turn, idle - idle_);
      std::fflush(stdout);
    }
    std::printf("\n");
  }

  // Both output products of a rank, and with resident weights.
  void RunOutputs(int ranks, int num_tokens) {
    struct Layer {
      GemmProblem grouped, sums;
    };
    bench_.Free(3);
    std::vector<Layer> layers(kMaxLayers);
    const int64_t rows = 8192 / ranks, groups = PaddedTokens(num_tokens) / 8;
    const auto scales = [&](int64_t count) { return reinterpret_cast<uint8_t*>(Memory(count)); };
    for (auto& [grouped, sums] : layers) {
      grouped.w = {TileKind::kFp8AsBf16, rows, 4096, Memory(rows * 4096),
                   scales(rows * 4096 >> 14)};
      grouped.groups = 8 / ranks;
      grouped.x_bf16 = {reinterpret_cast<__nv_bfloat16*>(x_), groups};
      grouped.output = GemmOutput::kFp8Tiles;
      sums.x_fp8 = grouped.y_fp8 = {reinterpret_cast<uint8_t*>(y_),
                                    reinterpret_cast<float*>(scales_), groups};
      sums.w = {TileKind::kFp8, 4096, rows, Memory(4096 * 8192), scales(4096 * 8192 >> 14), 8192};
      sums.output = GemmOutput::kF32;
      sums.y = y_ + (1 << 20), sums.y_stride = 4096;
    }
    auto* const parts = reinterpret_cast<float*>(y_ + (2 << 20));
    const auto launch = [&](const Layer& layer, bool resident) {
      const auto& [grouped, sums] = layer;
      if (!resident) {
        Launch({.problems = {grouped}, .num_problems = 1, .num_tokens = num_tokens},
               bench_.stream());
        Launch(
            CudaColumnSumsParams{{.problems = {sums}, .num_problems = 1, .num_tokens = num_tokens},
                                 {}},
            bench_.stream());
      } else if (num_tokens == 1) {
        Launch(CudaGroupedAloneParams{grouped, parts}, bench_.stream());
        Launch(CudaSumsAloneParams{sums, parts, {}}, bench_.stream());
      } else {
        Launch(CudaGroupedBatchParams{grouped, num_tokens}, bench_.stream());
        Launch(CudaSumsBatchParams{sums, num_tokens, {}}, bench_.stream());
      }
    };
    std::printf("both outputs 1/%d", ranks);
    PrintOutputs(num_tokens,
                 [&](int i, bool resident) { launch(layers[static_cast<size_t>(i)], resident); });
  }

  // The same of one of Pro's eight ranks.
  void RunOutputRows(int num_tokens) {
    struct Layer {
      GemmProblem grouped, rows;
    };
    bench_.Free(3);
    std::vector<Layer> layers(kMaxLayers);
    const int64_t groups = PaddedTokens(num_tokens) / 8;
    const auto weights = [&](TileKind kind, int64_t rows, int64_t cols) {
      return TiledMatrix{kind, rows, cols, Memory(rows * cols),
                         reinterpret_cast<uint8_t*>(Memory(rows * cols >> 14))};
    };
    for (auto& [grouped, rows] : layers) {
      grouped.w = weights(TileKind::kFp8AsBf16, 2048, 4096);
      grouped.groups = 2;
      grouped.x_bf16 = {reinterpret_cast<__nv_bfloat16*>(x_), groups};
      grouped.output = GemmOutput::kFp8Tiles;
      rows.x_fp8 = grouped.y_fp8 = {reinterpret_cast<uint8_t*>(y_),
                                    reinterpret_cast<float*>(scales_), groups};
      rows.w = weights(TileKind::kFp8, 896, 16384);
      rows.y = y_ + (1 << 20), rows.y_stride = 7168;
    }
    std::printf("Pro's both outputs 1/8");
    PrintOutputs(num_tokens, [&](int i, bool resident) {
      const auto& [grouped, rows] = layers[static_cast<size_t>(i)];
      if (resident) {
        Launch(CudaGroupedBatchParams{grouped, num_tokens, true}, bench_.stream());
        Launch(CudaOutputRowsParams{rows, num_tokens}, bench_.stream());
        return;
      }
      for (const GemmProblem& p : {grouped, rows}) {
        Launch({.problems = {p}, .num_problems = 1, .num_tokens = num_tokens, .few_rows = true},
               bench_.stream());
      }
    });
  }

  void MeasureIdle() {
    idle_ = Time({CudaGemmParams{}, CudaGemmParams{}, CudaGemmParams{}, CudaGemmParams{}}, true);
    std::printf("idle kernel %.2f us\n", idle_);
  }

 private:
  // launch(layer, resident)
  template <typename LaunchLayer>
  void PrintOutputs(int num_tokens, const LaunchLayer& launch) {
    const auto time = [&](bool idle, bool resident) {
      return bench_.Time(kMaxLayers, [&](int i) {
        if (idle) LaunchKernel(IdleKernel, 1, 32, 0, bench_.stream());
        launch(i, resident);
      });
    };
    std::printf(", %2d tokens: %5.1f %5.1f  resident %5.1f %5.1f\n", num_tokens, time(false, false),
                time(true, false) - idle_, time(false, true), time(true, true) - idle_);
  }

  std::byte* Memory(int64_t bytes) {
    auto* const words = bench_.Allocate<uint32_t>((bytes + 3) / 4);
    bench_.Fill(words, bytes / 4, 0, MaskedWord{0x3f3f3f3f});
    return reinterpret_cast<std::byte*>(words);
  }

  // Microseconds a layer, in turn or with an idle kernel before each.
  double Time(const std::vector<CudaGemmParams>& layers, bool idle, bool sums = false) {
    return bench_.Time(static_cast<int>(layers.size()), [&](int i) {
      if (idle) LaunchKernel(IdleKernel, 1, 32, 0, bench_.stream());
      const CudaGemmParams& layer = layers[static_cast<size_t>(i)];
      sums ? Launch(CudaColumnSumsParams{layer, {}}, bench_.stream())
           : Launch(layer, bench_.stream());
    });
  }

  const bool is_prompt_;
  CudaBench bench_;
  std::byte *x_, *scales_, *y_;
  double idle_ = 0;
};

void Main(int argc, char** argv) {
  std::vector<int64_t> tokens;
  const bool is_prompt = argc > 1 && argv[1] == std::string_view("--prompt");
  for (int i = is_prompt ? 2 : 1; i < argc; ++i) tokens.push_back(std::atoi(argv[i]));
  if (tokens.empty()) tokens = {1, 8, 32, 64, 128, 256};
  Bench bench(is_prompt);
  bench.MeasureIdle();
  if (!is_prompt) {
    for (const int num_tokens : {1, 8}) bench.RunOutputs(2, num_tokens);
    for (const int num_tokens : {1, 8, 12}) bench.RunOutputs(4, num_tokens);
    for (const int num_tokens : {1, 8, 12}) bench.RunOutputRows(num_tokens);
  }
  for (const int ranks : {1, 2, 4}) {
    if (is_prompt && ranks > 1) break;
    for (const Product& product : kProducts) {
      if (ranks > 1 && !product.is_split) continue;
      if (is_prompt && product.has_columns) continue;
      bench.Run(product, ranks, tokens);
    }
  }
}

}  // namespace
}  // namespace fathom::kernels

int main(int argc, char** argv) { fathom::kernels::Main(argc, argv); }
