// The indexer of ratio-4 layers: which compressed entries a token attends to.
//   IndexQuery, in place: rope on the last rope_dim values at the token's position, the rotation of
//     index_vector.h, rounding to the index cache's type.
//   IndexSelect: w_h = b(b(weights_proj h) * weight_scale); score_j = sum over h ascending of
//     relu(q_h . k_j) * w_h, FP32; the topk best of the visible entries, higher score first, then
//     lower index. All of them when there are no more than topk (nothing is scored).
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/activation.h"
#include "kernels/batch.h"
#include "kernels/kv_entry/kv_entry.h"

namespace fathom::kernels {

inline constexpr int kMaxIndexHeadDim = 128;

template <typename T>
struct IndexQueryParams {
  T* q = nullptr;  // [num_tokens, num_heads, dim]
  int64_t num_tokens = 0;
  int num_heads = 0;
  int dim = 0;
  int rope_dim = 0;
  const float* angles = nullptr;  // [num_tokens, rope_dim]
  config::IndexKeyDType dtype = config::IndexKeyDType::kFp4;
};

template <typename T>
struct IndexSelectParams {
  BatchView batch;
  const T* q =
      nullptr;  // [num_tokens, num_heads, dim]; may be null when no token has more than topk
  const T* projected = nullptr;  // [num_tokens, num_heads], weights_proj h
  float weight_scale = 0;        // dim^-0.5 * num_heads^-0.5
  int num_heads = 0;
  int dim = 0;
  int topk = 0;
  PagedEntries keys;
  config::IndexKeyDType dtype = config::IndexKeyDType::kFp4;
  uint64_t* scratch = nullptr;  // [num_threads, max_entries]
  int64_t max_entries = 0;
  int32_t* selected = nullptr;  // [num_tokens, topk], ascending
  int32_t* counts = nullptr;    // [num_tokens]
};

template <typename T>
void Launch(const IndexQueryParams<T>& params, device::Stream& stream);
template <typename T>
void Launch(const IndexSelectParams<T>& params, device::Stream& stream);

}  // namespace fathom::kernels
