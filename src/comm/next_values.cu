#include "comm/next_values.h"
#include "kernels/launch.cuh"

namespace fathom::comm {
namespace {

__global__ void NextValuesKernel(const uint16_t* before, uint16_t* values, int64_t hidden,
                                 int64_t tokens_before, int64_t tokens, int64_t begin,
                                 int64_t end) {
  kernels::WaitForPredecessor();
  kernels::AllowSuccessor();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, width = end - begin;
  if (i >= tokens * width) return;
  const int64_t at = i / width * hidden + begin + i % width;
  values[at] = NextValue(before, at, hidden, tokens_before);
}

}  // namespace

void LaunchNextValues(const __nv_bfloat16* before, __nv_bfloat16* values, int64_t hidden,
                      int64_t tokens_before, int64_t tokens, int64_t begin, int64_t end,
                      device::Stream& stream) {
  const int64_t count = tokens * (end - begin);
  kernels::LaunchKernel(NextValuesKernel, static_cast<unsigned>((count + 255) / 256), 256, 0,
                        stream, reinterpret_cast<const uint16_t*>(before),
                        reinterpret_cast<uint16_t*>(values), hidden, tokens_before, tokens, begin,
                        end);
}

}  // namespace fathom::comm
