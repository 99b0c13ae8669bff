#include "base/check.h"
#include "kernels/grouped_gemm/experts_cuda.h"
#include "kernels/grouped_gemm/experts_large.h"
#include "kernels/grouped_gemm/experts_stream_cuda.h"

namespace fathom::kernels {
namespace {

void Run(const CudaExpertParams& p, bool gate_up, bool down, device::Stream& stream) {
  if (p.num_tokens == 0) return;
  CHECK_EQ(p.hidden % 128, 0);
  CHECK_EQ(p.intermediate % 128, 0);
  if (!AreLargeExperts(p.num_tokens, p.prefill)) return LaunchStream(p, gate_up, down, stream);
  if (gate_up) LaunchGateUpLarge(p, stream);
  if (down) LaunchDownLarge(p, stream);
}

}  // namespace

void Launch(const CudaExpertParams& p, device::Stream& stream) { Run(p, true, true, stream); }
void LaunchGateUp(const CudaExpertParams& p, device::Stream& stream) {
  Run(p, true, false, stream);
}
void LaunchDown(const CudaExpertParams& p, device::Stream& stream) { Run(p, false, true, stream); }

}  // namespace fathom::kernels
