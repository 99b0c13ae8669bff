// experts_cuda.h's products for tiles of up to 16 tokens (gemm/weight_stream.cuh).
#pragma once

#include "kernels/grouped_gemm/experts_cuda.h"

namespace fathom::kernels {

// Which tiles a launch computes.
struct ExpertScope {
  int num_shared_tiles = 0;  // of the shared expert; they come first
  bool routed = false;       // the plan's
  // The plan was complete before the launch's predecessor began.
  bool plan_is_early = false;
};

inline constexpr int kMaxStreamRows = 16;

// w1 and w3, then the activation and its FP8 form; w2.
void LaunchGateUpStream(const CudaExpertParams& params, int tile_rows, const ExpertScope& scope,
                        device::Stream& stream);
void LaunchDownStream(const CudaExpertParams& params, int tile_rows, const ExpertScope& scope,
                      device::Stream& stream);

}  // namespace fathom::kernels
