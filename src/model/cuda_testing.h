// Models on GPUs, for tests.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "checkpoint/synthetic_checkpoint.h"
#include "model/testing.h"

namespace fathom::model {

struct TestSource {
  config::ModelConfig config;
  std::unique_ptr<checkpoint::TensorSource> weights;  // null: synthetic ones

  std::unique_ptr<TestModel> OnGpu(int gpu, int max_seqs, int max_len,
                                   const CudaModelOptions& options = {},
                                   const ModelRank& rank = {}) const {
    return std::make_unique<TestModel>(
        config, config::Numerics::kOfficial, 4, max_seqs, max_len, kv_cache::IndexKeyDType::kFp4,
        weights.get(), std::move(device::MakeCudaDevice(gpu).value()), options, rank);
  }
};

// The built-in model.
inline TestSource OpenTinyModel() {
  const std::string folder = std::string(FATHOM_MODELS) + "/fathom-tiny";
  TestSource tiny{.config = checkpoint::LoadModelConfig(folder).value(), .weights = nullptr};
  tiny.weights = std::move(checkpoint::OpenCheckpoint(folder, tiny.config).value());
  return tiny;
}

// Flash's first layers, of four a window's, ratio 4's and 128's, with fewer experts and words.
inline TestSource WideModel(int num_layers = 4) {
  auto config =
      checkpoint::ParseModelConfig(checkpoint::PresetConfigText("flash").value(), "flash").value();
  config.num_layers = num_layers;
  config.compress_ratios.resize(static_cast<size_t>(num_layers));
  config.num_experts = 32;
  config.vocab_size = 4096;
  config.draft = config::DraftKind::kNone;
  config.num_draft_blocks = 0;
  return {.config = config, .weights = nullptr};
}

}  // namespace fathom::model
