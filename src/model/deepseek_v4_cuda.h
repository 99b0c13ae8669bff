// DeepSeekV4 on one GPU: the same model as deepseek_v4.cc in official numerics, as fused kernels on
// weights in tiles. A decode step (every sequence one token, no recorder) is captured once a size
// as a CUDA graph and replayed.
#pragma once

#include <memory>

#include "checkpoint/checkpoint.h"
#include "model/model.h"

namespace fathom::model {

struct CudaModelOptions {
  bool enforce_eager = false;   // steps of decodes are never captured
  bool sync_operators = false;  // wait for each operator: the first that fails is logged by name
  bool poison_scratch = false;  // for tests: what no step may rely on is NaN before each
};

// Reads the weights from `source`, which is not needed afterwards. `dummy`: their values are not
// read but made on the GPU. kOutOfMemory says what is needed, before anything is read; kDevice in a
// build without CUDA code.
Result<std::unique_ptr<DeepSeekV4>> MakeDeepSeekV4Cuda(const config::ModelConfig& config,
                                                       kv_cache::IndexKeyDType index_dtype,
                                                       const checkpoint::TensorSource& source,
                                                       bool dummy, const ModelLimits& limits,
                                                       device::Device& device,
                                                       const CudaModelOptions& options = {});

}  // namespace fathom::model
