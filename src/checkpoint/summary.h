// ModelSummary: how many parameters and bytes a config has, by part of the model. Pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/model_config.h"

namespace fathom::checkpoint {

struct PartSummary {
  std::string name;  // "experts", "attention", ...; the draft blocks are one part, "draft"
  int64_t num_tensors = 0;
  int64_t num_params = 0;
  int64_t bytes = 0;
};

struct ModelSummary {
  std::vector<PartSummary> parts;  // only those that the config has
  int64_t num_tensors = 0;
  // Weights; neither scales nor id tables count.
  int64_t num_params = 0;
  int64_t num_draft_params = 0;   // of these in draft blocks
  int64_t num_active_params = 0;  // that take part in one token's forward pass, draft left out
  int64_t bytes = 0;              // in the checkpoint's dtypes, scales and tables included
};

ModelSummary Summarize(const config::ModelConfig& config);

}  // namespace fathom::checkpoint
