// MakeEngine: an Engine over one device: scheduler, KV cache, worker and loop thread, from a model
// that is loaded. Called once at start, by the application.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "base/status.h"
#include "device/device.h"
#include "engine/engine.h"
#include "kv_cache/kv_layout.h"
#include "model/model.h"

namespace fathom::engine {

struct EngineOptions {
  std::string model_name;  // of the metrics' label
  int vocab_size = 0;
  int sliding_window = 128;
  std::vector<int32_t> eos_token_ids;
  model::ModelLimits limits;  // those that the model was made with; a step stays inside them
  // Bytes of the KV cache; 0: as much as max_num_seqs full contexts use, but no more than
  // kv_memory_share of the memory that is free on the device.
  int64_t kv_cache_bytes = 0;
  double kv_memory_share = 0.5;
  int max_queue = 1024;  // requests that may wait beyond those that run
};

// kOutOfMemory: the KV cache does not hold one context of limits.max_model_len; says what would
// fit. kInvalidArgument: limits that contradict each other. Model, device, metrics and clock
// outlive the engine.
Result<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options,
                                           const kv_cache::KvLayout& layout,
                                           model::DeepSeekV4& model, device::Device& device,
                                           MetricsRegistry& metrics, const Clock& clock);

}  // namespace fathom::engine
