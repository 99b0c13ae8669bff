// `fathom bench`: what a model takes on this machine. Options as the command line gives them; each
// Run… is a command's whole life, on the main thread. Tables go to standard output, JSON to
// --output-json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/fathom/serve_options.h"
#include "base/status.h"

namespace fathom::app {

// latency and kernels: the model alone, every batch size with every input length.
struct StepBenchOptions {
  ModelOptions model;
  std::vector<int> batch_sizes = {8};
  std::vector<int64_t> input_lens = {32};
  int output_len = 128;
  // Tokens of each prompt that are computed, its last ones; those before are taken as if they were
  // in the KV cache. Unset: all.
  std::optional<int64_t> prefill_len;
  int num_iters_warmup = 1;
  int num_iters = 10;
  bool profile = false;
  std::string output_json;
};
Status RunBenchLatency(const StepBenchOptions& options);
Status RunBenchKernels(const StepBenchOptions& options);

struct ThroughputOptions {
  ModelOptions model;
  int num_prompts = 64;
  int input_len = 128;
  int output_len = 128;
  double temperature = 1.0;
  bool profile = false;
  std::string output_json;
};
Status RunBenchThroughput(const ThroughputOptions& options);

struct LoadBenchOptions {
  ModelOptions model;
  std::string output_json;
};
Status RunBenchLoad(const LoadBenchOptions& options);

}  // namespace fathom::app
