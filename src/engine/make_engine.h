// MakeEngine: an Engine over the ranks of a model that is loaded: schedulers, KV caches, workers
// and the loop thread. Called once at start, by the application.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "base/status.h"
#include "comm/node_group.h"
#include "comm/transport.h"
#include "config/model_config.h"
#include "config/parallel_config.h"
#include "device/device.h"
#include "engine/engine.h"
#include "kv_cache/kv_layout.h"
#include "model/model.h"

namespace fathom::engine {

// What of ended requests is kept, and where.
struct KvTierOptions {
  bool prefix_caching = true;
  int64_t retention_interval =
      4096;                    // tokens between the snapshots of a prefill; 0: at its end only
  int32_t turn_token_id = -1;  // begins a user's turn
  int64_t host_bytes = 0;      // of all ranks of a process; 0: none, or 4 GiB where there is a disk
  std::string disk_directory = {};  // empty: none
  // Of all ranks, those of other nodes included.
  int64_t disk_bytes = int64_t{64} << 30;
  int64_t disk_write_bytes_per_second = int64_t{200} << 20;
  std::string model_fingerprint = {};  // the same for the same weights and numerics
};

struct EngineOptions {
  std::string model_name;  // of the metrics' label
  int vocab_size = 0;
  int sliding_window = 128;
  std::vector<int32_t> eos_token_ids;
  int num_layers = 0;  // for the experts that a request wants to be told
  int num_experts_per_token = 0;
  // Those that each rank's model was made with: what one data rank runs in a step stays inside.
  model::ModelLimits limits;
  config::ParallelConfig parallel = {};
  // limits.max_model_len is the most: the engine takes what the KV cache holds.
  bool auto_model_len = false;
  // Bytes of the KV cache on each device; 0: as much as max_num_seqs full contexts use, but no more
  // than kv_memory_share of the memory that is free on the device.
  int64_t kv_cache_bytes = 0;
  double kv_memory_share = 0.5;
  KvTierOptions kv = {};
  int max_queue = 1024;  // requests that may wait beyond those that run
  // The share of their solo speed that decodes keep while prompts run: 0 (none) to 0.95.
  double decode_floor = 0.7;
  // Plan and start a step while the one before runs; unset: where the device runs by itself (a
  // GPU).
  std::optional<bool> async_scheduling = {};
};

// With what follows from the whole model's config.
EngineOptions OptionsFor(const config::ModelConfig& config, const model::ModelLimits& limits);

// A rank of this process: its share of the model, and the device that it runs on. All of it
// outlives the engine.
struct EngineRank {
  model::DeepSeekV4* model = nullptr;
  device::Device* device = nullptr;
  kv_cache::KvLayout layout;  // of its own layers
  config::RankPlace place = {};
  // The model's, to all other ranks; null when there are none.
  comm::Transport* transport = nullptr;
};

// An engine over all ranks of options.parallel. kOutOfMemory: the KV cache of a rank does not hold
// one context of limits.max_model_len; says what would fit. kInvalidArgument: limits that
// contradict each other, or a folder for the disk's cache that cannot be used. Metrics and clock
// outlive the engine.
//
// `nodes`: where the ranks are that are not this process'; null: there are none. It outlives the
// engine, which runs on node 0 and waits until all others RunFollower. kPeer: they do not.
Result<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options,
                                           const std::vector<EngineRank>& ranks,
                                           MetricsRegistry& metrics, const Clock& clock,
                                           comm::NodeGroup* nodes = nullptr);

}  // namespace fathom::engine
