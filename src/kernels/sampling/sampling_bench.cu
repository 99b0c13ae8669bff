// Time of sampling a step's rows on a GPU, over a vocabulary of 129,280. ninja sampling_bench.
#include <cstdio>
#include <random>
#include <vector>

#include "kernels/cuda_bench.cuh"
#include "kernels/sampling/sampling_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int64_t kVocab = 129'280;
constexpr int kMaxRows = 128, kRepeats = 50;

void Measure(const char* name, const SamplingRow& row, const float* logits, CudaBench& bench) {
  std::vector<SamplingRow> rows(kMaxRows, row);
  for (int i = 0; i < kMaxRows; ++i) {
    rows[static_cast<size_t>(i)].logits_row = i;
    rows[static_cast<size_t>(i)].uniform = (i + 0.5) / kMaxRows;
  }
  CudaSamplingParams params{.logits = logits,
                            .vocab = kVocab,
                            .rows = bench.Upload(rows),
                            .results = bench.Upload(std::vector<SampledRow>(kMaxRows)),
                            .token_ids = bench.Upload(std::vector<int32_t>(kMaxRows))};
  for (const int num_rows : {1, 8, 32, 128}) {
    params.num_rows = num_rows;
    const double us = bench.Time(kRepeats, [&](int) { Launch(params, bench.stream()); });
    std::printf("%-28s %3d rows  %7.1f us  (bytes alone %5.1f us)\n", name, num_rows, us,
                num_rows * kVocab * 4 / kBytesPerUs);
  }
}

void Run() {
  CudaBench bench;
  std::mt19937 random(1);
  std::normal_distribution<float> bulk(0, 2.5f);
  std::vector<float> values(kVocab * kMaxRows);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        i < kVocab ? bulk(random) + (random() % 10'000 == 0 ? 12.0f : 0.0f) : values[i - kVocab];
  }
  const float* logits = bench.Upload(values);
  Measure("greedy", {}, logits, bench);
  Measure("temperature 1", {.temperature = 1}, logits, bench);
  Measure("top_p 0.95", {.temperature = 1, .top_p = 0.95}, logits, bench);
  Measure("top_p 0.95, top_k 50", {.temperature = 1, .top_p = 0.95, .top_k = 50}, logits, bench);
  Measure("greedy, 5 log-probabilities", {.num_logprobs = 5}, logits, bench);
}

}  // namespace
}  // namespace fathom::kernels

int main() { fathom::kernels::Run(); }
