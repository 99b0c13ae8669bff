// experts_cuda.h for the steps of decodes whose plan is not is_large: a launch that streams
// the weights (expert_stream.cuh). Blocks tell each other through the plan's counters which tiles
// of the intermediate activations are complete, so all of them run at once.
#pragma once

#include "kernels/grouped_gemm/experts_cuda.h"

namespace fathom::kernels {

// Either product, or both.
void LaunchStream(const CudaExpertParams& params, bool gate_up, bool down, device::Stream& stream);
// Both, of a rank's rows.
void LaunchStream(const CudaExpertParams& params, const ExpertRank& rank, device::Stream& stream);

}  // namespace fathom::kernels
