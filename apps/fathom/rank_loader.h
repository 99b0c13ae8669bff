// RankLoader: the ranks of this process, each with its device and its shard of the model. All load
// at once, each reads only its part; progress is one line. Called by the main thread.
#pragma once

#include <memory>
#include <vector>

#include "apps/fathom/serve_options.h"
#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "comm/transport.h"
#include "config/model_config.h"
#include "config/parallel_config.h"
#include "device/device.h"
#include "model/model.h"

namespace fathom::app {

struct SessionRank {
  config::RankPlace place;
  config::ModelConfig config;  // its shard's
  std::unique_ptr<device::Device> device;
  int gpu = -1;                          // its number; -1: a CPU
  comm::Transport* transport = nullptr;  // to all ranks; null: the only one
  std::unique_ptr<model::DeepSeekV4> model;
};

// What it took to bring the weights to the devices.
struct LoadTimes {
  int64_t bytes = 0;            // that were read
  double transfer_seconds = 0;  // from the first read until the models stand; 0: nothing was read
  double seconds = 0;           // of OpenModel
};

// kInvalidArgument: GPUs do not run the layout, and CPUs do.
Status CheckGpuLayout(const config::ParallelConfig& parallel);

// A device for each of `num_ranks` ranks: GPUs from number `first_gpu` on, or equal parts of the
// CPU's threads; a rank without its others has a GPU. kInvalidArgument: --device, --numerics and
// the layout contradict each other; kDevice: too few GPUs.
Result<std::vector<SessionRank>> OpenDevices(const ModelOptions& options, int num_ranks,
                                             int first_gpu);

// What the model of a rank is made with.
struct RankModelOptions {
  config::ModelConfig config;  // the whole model's
  config::Numerics numerics = config::Numerics::kOfficial;
  kv_cache::IndexKeyDType index_dtype = kv_cache::IndexKeyDType::kFp4;
  model::ModelLimits limits;
};

// Loads every rank's shard of `source`. The first error of any rank.
Status LoadRanks(const ModelOptions& options, const RankModelOptions& model_options,
                 const checkpoint::TensorSource& source, std::vector<SessionRank>& ranks,
                 LoadTimes& times);

}  // namespace fathom::app
