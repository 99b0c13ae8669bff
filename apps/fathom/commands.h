// The commands of the `fathom` program: options in, a Status out (main.cc turns it into the exit
// code and the one line that a user sees). Each Run… is a command's whole life, on the main thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/fathom/serve_options.h"
#include "base/status.h"
#include "config/model_config.h"
#include "config/parallel_config.h"

namespace fathom::app {

Status RunServe(const ServeOptions& options);

struct GenerateOptions {
  ModelOptions model;
  std::string prompt;
  bool chat = false;  // the prompt is a user message, not raw text
  bool thinking = false;
  int max_tokens = 256;
  double temperature = 1.0;
  double top_p = 1.0;
  int top_k = 0;
  std::optional<uint64_t> sampling_seed;
  bool ignore_eos = false;
};
Status RunGenerate(const GenerateOptions& options);

struct ChatOptions {
  ModelOptions model;
  std::string system;
  bool thinking = false;
  std::string effort;
  int max_tokens = 4096;
  double temperature = 1.0;
  double top_p = 1.0;
};
Status RunChat(const ChatOptions& options);

struct ScoreOptions {
  ModelOptions model;
  std::string input;    // JSON lines, {"tokens":[…]}
  std::string logits;   // safetensors to write; empty: none
  std::string trace;    // safetensors with choices and residual streams; empty: none
  std::string choices;  // a trace whose choices are taken; empty: the model's own
  std::string replay;   // a trace whose choices and streams are taken, layer by layer; or empty
  int top_logprobs = 0;
  int chunk = 0;  // 0: as large as the step allows
  int batch = 1;  // sequences run together
};
Status RunScore(const ScoreOptions& options);

struct EncodeCommandOptions {
  std::string messages;  // file
  std::string mode = "thinking";
  std::string effort;
  std::string effort_profile = "auto";
  bool keep_thinking = false;
  std::string ids_model;  // print token ids of this model's tokenizer instead of the text
  bool raw_special_tokens = false;
};
Status RunEncode(const EncodeCommandOptions& options);

struct SynthOptions {
  std::string config;  // flash, pro, tiny, or a config.json
  int layers = 0;      // 0: all
  uint64_t seed = 0;
  std::string out;
  int num_threads = 0;
};
Status RunSynth(const SynthOptions& options);

// The config.json of a preset (flash, pro, tiny) or of a file, cut to `layers` layers when that is
// not 0.
Result<std::string> ReadConfigText(const std::string& name_or_file, int layers);

// A preset, a config.json (both cut to `layers` layers when that is not 0), a folder, or a
// repository in the local cache.
Result<config::ModelConfig> FindModelConfig(const std::string& name, int layers);

struct InspectOptions {
  std::string model;  // folder, repository name, flash, pro or tiny
  int layers = 0;
  bool roofline = false;
  int batch = 1;
  int64_t context = 4096;
  std::string gpu = "h200";
  config::ParallelConfig parallel;
};
Status RunInspect(const InspectOptions& options);

struct PlanOptions {
  std::string model;  // as inspect
  int layers = 0;
  std::string gpu = "h200";
  double gpu_memory_gib = 0;  // 0: that GPU's
  int num_gpus = 0;           // 0: those of the layout
  config::ParallelConfig parallel;
  double gpu_memory_utilization = 0.9;
  std::string max_model_len = "auto";
  int max_num_seqs = 64;
  int max_num_batched_tokens = 8192;
  bool prefix_caching = true;
  int num_streams = 64;
  int64_t input_len = 1024;
  int64_t output_len = 1024;
  bool json = false;
};
// kOutOfMemory, after the plan was printed, when the model does not fit.
Status RunPlan(const PlanOptions& options);

}  // namespace fathom::app
