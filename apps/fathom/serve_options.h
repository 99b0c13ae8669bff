// ServeOptions: everything `fathom serve` can be told, as typed values. Filled by the flag table
// (serve_flags.h) and nothing else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "api/api_options.h"
#include "apps/fathom/launch_environment.h"
#include "config/model_config.h"
#include "config/parallel_config.h"
#include "engine/make_engine.h"
#include "http/limits.h"
#include "json/json.h"
#include "kv_cache/kv_layout.h"

namespace fathom::app {

enum class DeviceChoice { kAuto, kCpu, kCuda };
enum class LoadFormat { kAuto, kDummy };

// What every command that runs the model needs.
struct ModelOptions {
  std::string model;  // folder or Hugging Face repository name
  DeviceChoice device = DeviceChoice::kAuto;
  config::Numerics numerics = config::Numerics::kOfficial;
  std::optional<kv_cache::IndexKeyDType> index_dtype;  // unset: the numerics' own
  LoadFormat load_format = LoadFormat::kAuto;
  config::ParallelConfig parallel;
  LaunchFlags launch;
  bool disable_custom_all_reduce = false;
  std::optional<int> only_rank;     // of the tensor ranks, for benchmarks: the others do not exist
  std::string cluster_secret_file;  // empty: the environment has the secret
  int num_hidden_layers = 0;  // 0: the model's; fewer, the first ones, with dummy weights only
  uint64_t seed = 0;          // of dummy weights, and of requests that bring none
  int num_threads = 0;        // 0: all usable cores
  int64_t max_model_len = 0;  // 0: auto
  int max_num_seqs = 64;
  int max_num_batched_tokens = 0;  // 0: auto, MaxBatchedTokens
  double decode_floor = 0.7;
  std::optional<bool> async_scheduling;  // unset: on a GPU
  bool enforce_eager = false;
  int64_t kv_cache_bytes = 0;  // 0: auto
  double gpu_memory_utilization = 0.9;
  engine::KvTierOptions kv;  // but for what the model decides
};

struct ServeOptions {
  ModelOptions model;
  std::string host = "127.0.0.1";
  int port = 8000;
  int num_io_threads = 2;
  std::optional<int> metrics_port;
  std::vector<std::string> served_model_names;
  std::vector<std::string> api_keys;
  std::string effort_profile = "auto";
  json::Value default_chat_template_kwargs = json::Value::Object();
  json::Value override_generation_config = json::Value::Object();
  bool use_generation_config = true;
  bool raw_special_tokens = false;
  bool allow_routed_experts = false;
  bool allow_priority = false;
  bool allow_cache_reset = false;
  bool isolate_keys = false;
  std::string speculative_method;  // empty: none asked for
  api::RequestLimits limits;
  http::Limits http_limits;
  int max_queue = 1024;
  double drain_timeout_s = 30;
  int keep_alive_interval_s = 10;
  int resume_window_s = 15;
  int64_t replay_bytes = int64_t{64} << 20;
  int64_t response_store_bytes = int64_t{256} << 20;
  std::string log_level = "info";
};

}  // namespace fathom::app
