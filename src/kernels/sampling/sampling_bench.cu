// Time of sampling a step's rows on a GPU, over a vocabulary of 129,280. ninja sampling_bench.
#include <cstdio>
#include <random>
#include <vector>

#include "kernels/sampling/sampling_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int64_t kVocab = 129'280;
constexpr int kMaxRows = 128, kRepeats = 50;

template <typename U>
U* OnDevice(const std::vector<U>& values) {
  void* data = nullptr;
  cudaMalloc(&data, values.size() * sizeof(U));
  cudaMemcpy(data, values.data(), values.size() * sizeof(U), cudaMemcpyHostToDevice);
  return static_cast<U*>(data);
}

void Measure(const char* name, const SamplingRow& row, const float* logits,
             device::Stream& stream) {
  std::vector<SamplingRow> rows(kMaxRows, row);
  for (int i = 0; i < kMaxRows; ++i) {
    rows[static_cast<size_t>(i)].logits_row = i;
    rows[static_cast<size_t>(i)].uniform = (i + 0.5) / kMaxRows;
  }
  CudaSamplingParams params{.logits = logits,
                            .vocab = kVocab,
                            .rows = OnDevice(rows),
                            .results = OnDevice(std::vector<SampledRow>(kMaxRows)),
                            .token_ids = OnDevice(std::vector<int32_t>(kMaxRows))};
  auto* const native = static_cast<cudaStream_t>(stream.native_handle());
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (const int num_rows : {1, 8, 32, 128}) {
    params.num_rows = num_rows;
    Launch(params, stream);
    cudaEventRecord(begin, native);
    for (int i = 0; i < kRepeats; ++i) Launch(params, stream);
    cudaEventRecord(end, native);
    cudaEventSynchronize(end);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    const double us = 1e3 * ms / kRepeats;
    std::printf("%-28s %3d rows  %7.1f us  (bytes alone %5.1f us)\n", name, num_rows, us,
                num_rows * kVocab * 4 / 4.55e6);
  }
}

int Run() {
  auto device = device::MakeCudaDevice(0);
  if (!device.ok()) return std::fprintf(stderr, "%s\n", device.status().message().c_str()), 5;
  const auto stream = std::move((*device)->MakeStream().value());
  std::mt19937 random(1);
  std::normal_distribution<float> bulk(0, 2.5f);
  std::vector<float> values(kVocab * kMaxRows);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        i < kVocab ? bulk(random) + (random() % 10'000 == 0 ? 12.0f : 0.0f) : values[i - kVocab];
  }
  const float* logits = OnDevice(values);
  Measure("greedy", {}, logits, *stream);
  Measure("temperature 1", {.temperature = 1}, logits, *stream);
  Measure("top_p 0.95", {.temperature = 1, .top_p = 0.95}, logits, *stream);
  Measure("top_p 0.95, top_k 50", {.temperature = 1, .top_p = 0.95, .top_k = 50}, logits, *stream);
  Measure("greedy, 5 log-probabilities", {.num_logprobs = 5}, logits, *stream);
  return 0;
}

}  // namespace
}  // namespace fathom::kernels

int main() { return fathom::kernels::Run(); }
