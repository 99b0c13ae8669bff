// Both output products of a step of one token on one of several ranks. A rank's weights of each fit
// into the shared memory of all multiprocessors, and so those of the first product are there before
// attention has ended: a block has a row tile and eight column blocks at once, no ring. What its
// blocks give are FP32 sums of parts of the columns, which those of the second one add up, round
// and make FP8 of themselves, in the order of gemm_cuda.h's products: the same bits. Both let their
// successor start before they wait: what follows reads before it waits only weights and what is
// older than attention.
#pragma once

#include "kernels/gemm/gemm_cuda.h"

namespace fathom::kernels {

inline constexpr int kGroupedParts = 4;  // of the columns of the first product

struct CudaGroupedAloneParams {
  GemmProblem product;     // the output that it names is left alone
  float* parts = nullptr;  // [kGroupedParts, rows of w]
};
struct CudaSumsAloneParams {
  GemmProblem product;           // kF32; the input that it names is not read
  const float* parts = nullptr;  // [kGroupedParts, columns of w]
  PeerExchange exchange;         // as CudaColumnSumsParams has it
};

// Whether there are kernels for these shapes: rows and columns of `grouped`, half or a quarter of
// the columns of the matrix of `sums`.
bool HaveAloneProducts(const TiledMatrix& grouped, const TiledMatrix& sums);

void Launch(const CudaGroupedAloneParams& params, device::Stream& stream);
void Launch(const CudaSumsAloneParams& params, device::Stream& stream);

}  // namespace fathom::kernels
