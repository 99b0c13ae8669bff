// Stands for deepseek_v4_cuda.cc in a build without CUDA code.
#include "model/deepseek_v4_cuda.h"

namespace fathom::model {

Result<std::unique_ptr<DeepSeekV4>> MakeDeepSeekV4Cuda(const config::ModelConfig&,
                                                       kv_cache::IndexKeyDType, const Weights&,
                                                       bool, const ModelLimits&, device::Device&) {
  return DeviceError("this binary was built without CUDA: use --device cpu");
}

}  // namespace fathom::model
