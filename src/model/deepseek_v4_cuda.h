// DeepSeekV4 on one GPU: the same model as deepseek_v4.cc in official numerics, as fused kernels on
// weights in tiles. A decode step (every sequence one token, no recorder) is captured once a size
// as a CUDA graph and replayed.
#pragma once

#include <memory>

#include "model/model.h"
#include "model/weights.h"

namespace fathom::model {

// `host` is weights in host memory; they are not needed afterwards. `dummy`: their values are not
// read but made on the GPU. kDevice in a build without CUDA code.
Result<std::unique_ptr<DeepSeekV4>> MakeDeepSeekV4Cuda(const config::ModelConfig& config,
                                                       kv_cache::IndexKeyDType index_dtype,
                                                       const Weights& host, bool dummy,
                                                       const ModelLimits& limits,
                                                       device::Device& device);

}  // namespace fathom::model
