#include "kernels/collective/exchange_count_cuda.h"
#include "kernels/launch.cuh"

namespace fathom::kernels {
namespace {

__device__ void Tell(uint32_t* word, uint32_t value) {
  *static_cast<volatile uint32_t*>(word) = value;
}

__global__ void BeginKernel(ExchangeCount count) {
  WaitForPredecessor();
  Tell(count.begun, ++*count.count);
}

__global__ void EndStepKernel(ExchangeCount count) {
  WaitForPredecessor();
  Tell(count.ended, *count.count);
}

}  // namespace

void LaunchBegin(const ExchangeCount& count, device::Stream& stream) {
  LaunchKernel(BeginKernel, 1, 1, 0, stream, count);
}

void LaunchEndStep(const ExchangeCount& count, device::Stream& stream) {
  LaunchKernel(EndStepKernel, 1, 1, 0, stream, count);
}

}  // namespace fathom::kernels
