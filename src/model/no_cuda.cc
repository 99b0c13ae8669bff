// Stands for the CUDA code in a build without it.
#include "base/check.h"
#include "model/deepseek_v4_cuda.h"
#include "model/dummy_kv_cache.h"

namespace fathom::model {

comm::CudaGroupOptions GroupOptions(const config::ModelConfig&, const ModelLimits&, int, int) {
  return {};
}

Result<std::unique_ptr<DeepSeekV4>> MakeDeepSeekV4Cuda(const config::ModelConfig&,
                                                       kv_cache::IndexKeyDType,
                                                       const checkpoint::TensorSource&, bool,
                                                       const ModelLimits&, device::Device&,
                                                       const CudaModelOptions&) {
  return DeviceError("this binary was built without CUDA: use --device cpu");
}

void FillDummyKvCache(const config::ModelConfig&, const kv_cache::KvLayout&,
                      kv_cache::IndexKeyDType, const KvCacheView&, int64_t, int64_t,
                      device::Stream&) {
  CheckFailed(__FILE__, __LINE__, "a build without CUDA has no GPU's stream");
}

}  // namespace fathom::model
