#include "comm/next_values.h"
#include "kernels/launch.cuh"

namespace fathom::comm {
namespace {

__global__ void NextValuesKernel(const __nv_bfloat16* sums, int64_t count, int rank,
                                 __nv_bfloat16* values) {
  kernels::WaitForPredecessor();
  kernels::AllowSuccessor();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) {
    values[i] = __float2bfloat16_rn(NextValue(__bfloat16_as_ushort(sums[i]), i, rank));
  }
}

}  // namespace

void LaunchNextValues(const __nv_bfloat16* sums, int64_t count, int rank, __nv_bfloat16* values,
                      device::Stream& stream) {
  kernels::LaunchKernel(NextValuesKernel, static_cast<unsigned>((count + 255) / 256), 256, 0,
                        stream, sums, count, rank, values);
}

}  // namespace fathom::comm
