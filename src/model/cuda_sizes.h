// Which models the GPU kernels run.
#pragma once

#include "base/status.h"
#include "config/model_config.h"

namespace fathom::model {

// kBadModel names the size that they do not run, and what they do.
Status CheckCudaSizes(const config::ModelConfig& config, int num_tensor_ranks);

}  // namespace fathom::model
