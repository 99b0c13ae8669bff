// Token embeddings, copied to every residual stream.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/activation.h"
#include "kernels/weight_matrix.h"

namespace fathom::kernels {

template <typename T>
struct EmbeddingParams {
  const int32_t* token_ids = nullptr;  // [num_tokens], each < table.rows
  int64_t num_tokens = 0;
  WeightMatrix table;  // BF16 [vocab, hidden]
  int num_streams = 0;
  T* streams = nullptr;  // [num_tokens, num_streams, hidden]
};

template <typename T>
void Launch(const EmbeddingParams<T>& params, device::Stream& stream);

}  // namespace fathom::kernels
