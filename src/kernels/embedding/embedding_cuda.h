// embedding.h on a GPU: a token's row, copied to its four residual streams.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/device.h"

namespace fathom::kernels {

struct CudaEmbeddingParams {
  const int32_t* token_ids = nullptr;  // [num_tokens], in the vocabulary
  // Token t is sampled[token_sources[t]] where that is not -1.
  const int32_t* token_sources = nullptr;
  const int32_t* sampled = nullptr;
  int32_t* resolved = nullptr;  // out, [num_tokens]: the token ids
  int64_t num_tokens = 0;
  const __nv_bfloat16* table = nullptr;  // [vocab, hidden]
  int64_t hidden = 0;                    // a multiple of 8
  __nv_bfloat16* streams = nullptr;      // [num_tokens, 4, hidden]
};

void Launch(const CudaEmbeddingParams& params, device::Stream& stream);

}  // namespace fathom::kernels
