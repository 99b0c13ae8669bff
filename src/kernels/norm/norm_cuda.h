// The CUDA side of norm.h: same contract, within one unit in the last place (the sum is taken in
// another order). Enqueues on the stream and returns. Without CUDA code no stream is a CUDA stream.
#pragma once

#include "kernels/norm/norm.h"

namespace fathom::kernels {

#ifdef FATHOM_HAS_CUDA
template <typename T>
void LaunchCuda(const RmsNormParams<T>& params, device::Stream& stream);
template <typename T>
void LaunchCuda(const HeadNormParams<T>& params, device::Stream& stream);
#else
template <typename Params>
void LaunchCuda(const Params&, device::Stream&) {
  CheckFailed(__FILE__, __LINE__, "built without CUDA");
}
#endif

}  // namespace fathom::kernels
