// Stands for sampling_cuda.cu in a build without CUDA code.
#include "base/check.h"
#include "kernels/sampling/sampling_cuda.h"

namespace fathom::kernels {

int64_t MaxSamplingVocab() { return 0; }

void Launch(const CudaSamplingParams&, device::Stream&) {
  CheckFailed(__FILE__, __LINE__, "a build without CUDA has no GPU's stream");
}

}  // namespace fathom::kernels
