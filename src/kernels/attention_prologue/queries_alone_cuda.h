// The prologue of a step of one token and the query products behind it in one launch, where these
// are few rows, a rank's. A block has a row tile of each product: all of its columns are in shared
// memory before there are activations, no ring, and those of the second product, where index
// queries are the first one, come when these are multiplied. Each block norms and quantizes the
// query row for itself; blocks besides write the window entry and the compressors' state and
// entries. Sums have the order of gemm_cuda.h's products and norms the prologue's: the same bits.
// Where words carry a number, it is told (`begun`) when the input products' results are complete
// and the step's index key is written.
#pragma once

#include "kernels/attention_prologue/attention_prologue_cuda.h"
#include "kernels/gemm/gemm_cuda.h"

namespace fathom::kernels {

struct CudaQueriesAloneParams {
  CudaAttentionPrologueParams prologue;  // its q is left alone
  CudaGemmParams products;               // of that q
};

// Whether there is a kernel for the products.
bool AreQueriesAlone(const CudaGemmParams& products);

void Launch(const CudaQueriesAloneParams& params, device::Stream& stream);

}  // namespace fathom::kernels
