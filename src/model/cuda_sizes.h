// Which models, in steps of how many tokens, the GPU kernels run.
#pragma once

#include "base/status.h"
#include "config/model_config.h"
#include "model/model.h"

namespace fathom::model {

// kBadModel names the size that they do not run, and what they do; kInvalidArgument the limit.
Status CheckCudaSizes(const config::ModelConfig& config, const ModelLimits& limits,
                      int num_tensor_ranks);

}  // namespace fathom::model
