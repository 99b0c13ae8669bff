#include "comm/cuda_group.h"

namespace fathom::comm {

Result<std::vector<std::shared_ptr<CudaCollectives>>> MakeCudaGroup(std::span<const int>,
                                                                    const CudaGroupOptions&) {
  return DeviceError("this binary was built without CUDA: use --device cpu");
}

Result<std::shared_ptr<CudaCollectives>> MakeLoneRank(int, int, int, const CudaGroupOptions&) {
  return DeviceError("this binary was built without CUDA: use --device cpu");
}

Result<std::vector<std::shared_ptr<CudaExpertRanks>>> MakeCudaExpertRanks(
    std::span<const int>, const CudaExpertOptions&) {
  return DeviceError("this binary was built without CUDA: use --device cpu");
}

Result<std::shared_ptr<CudaCollectives>> JoinCudaGroup(Transport&, std::span<const int>, int,
                                                       const CudaGroupOptions&) {
  return DeviceError("this binary was built without CUDA: use --device cpu");
}

Result<std::shared_ptr<CudaExpertRanks>> JoinCudaExpertRanks(Transport&, std::span<const int>, int,
                                                             const CudaExpertOptions&) {
  return DeviceError("this binary was built without CUDA: use --device cpu");
}

}  // namespace fathom::comm
