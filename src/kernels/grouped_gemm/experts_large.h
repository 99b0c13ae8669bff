// The experts on a GPU for many tokens: experts_cuda.h comes here where the plan is_large
// (expert_plan.h), whose tiles have up to 224 rows. A pair's bits depend on neither how many there
// are nor its row.
#pragma once

#include "kernels/grouped_gemm/experts_cuda.h"

namespace fathom::kernels {

void LaunchGateUpLarge(const CudaExpertParams& params, device::Stream& stream);
void LaunchDownLarge(const CudaExpertParams& params, device::Stream& stream);
// The routed experts of these, kFp4, of which not all launches wait for what they read: the one
// just before has, and then allowed its successor.
void LaunchGateUpLargeFp4(const CudaExpertParams& params, device::Stream& stream);
void LaunchDownLargeFp4(const CudaExpertParams& params, device::Stream& stream);

// largest [row_tiles * 64]: the largest scale byte of each row of kFp4 tiles, over all its columns.
void LaunchLargestScales(const std::byte* tiles, int64_t row_tiles, int64_t col_blocks,
                         uint8_t* largest, device::Stream& stream);

}  // namespace fathom::kernels
