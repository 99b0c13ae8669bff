#include "comm/cuda_group.h"

namespace fathom::comm {

Result<std::vector<std::shared_ptr<CudaCollectives>>> MakeCudaGroup(std::span<const int>,
                                                                    const CudaGroupOptions&) {
  return DeviceError("this binary was built without CUDA: use --device cpu");
}

}  // namespace fathom::comm
