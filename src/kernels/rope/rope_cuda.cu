// One thread an angle.
#include "kernels/launch.cuh"
#include "kernels/rope/rope.cuh"
#include "kernels/rope/rope_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int kPairs = 32;
constexpr int kTokens = 4;  // a block

__global__ void __launch_bounds__(kPairs * kTokens * 2) RopeAnglesKernel(CudaRopeAnglesParams p) {
  WaitForPredecessor();
  if (p.number != nullptr) {
    if (blockIdx.x + threadIdx.x + threadIdx.y + threadIdx.z == 0) {
      *p.number += 2 * p.num_numbers;
      __threadfence();
    }
    __syncthreads();  // no launch of the step starts before
  }
  AllowSuccessor();
  const int i = threadIdx.x, token = blockIdx.x * kTokens + threadIdx.y;
  if (token >= p.num_tokens) return;
  const bool plain = threadIdx.z == 0;
  const float* frequencies = plain ? p.frequencies_plain : p.frequencies_compressed;
  float* out = (plain ? p.angles_plain : p.angles_compressed) + int64_t{token} * 2 * kPairs;
  reinterpret_cast<float2*>(out)[i] = RopeAngle(p.positions[token], frequencies[i]);
}

}  // namespace

void Launch(const CudaRopeAnglesParams& p, device::Stream& stream) {
  if (p.num_tokens == 0) return;
  LaunchKernel(RopeAnglesKernel, (p.num_tokens + kTokens - 1) / kTokens, dim3(kPairs, kTokens, 2),
               0, stream, p);
}

}  // namespace fathom::kernels
