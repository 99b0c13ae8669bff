// The experts of a layer: for every token its k routed experts and the shared one.
//   gate = b(w1 x), up = b(w3 x), clamped to L = swiglu_limit; t = b(weight * silu(gate) * up);
//   y = b(sum of b(w2 t) over the chosen experts by ascending id, then the shared expert), the sum
//   in FP32.
// Official numerics: x holds FP8 values (kernels/quantize), t is quantized likewise before w2.
// An expert without data, or without rows, adds nothing: another rank has it.
// Tokens are gathered per expert; a result does not depend on which tokens are together.
#pragma once

#include <cstdint>
#include <span>

#include "device/device.h"
#include "kernels/activation.h"
#include "kernels/weight_matrix.h"

namespace fathom::kernels {

struct ExpertMatrices {
  WeightMatrix w1, w2, w3;  // gate [I, H], down [H, I], up [I, H]
};

// Scratch for up to max_tokens at once; a longer batch runs in pieces.
struct ExpertWorkspace {
  int64_t max_tokens = 0;
  int64_t max_intermediate = 0;
  void* t = nullptr;              // T [max_tokens * (k + 1), max_intermediate]
  void* y = nullptr;              // T [max_tokens * (k + 1), H]
  int32_t* pair_token = nullptr;  // [max_tokens * (k + 1)]
  int32_t* pair_of = nullptr;     // [max_tokens, k + 1]; -1: no pair
  int32_t* first_pair = nullptr;  // [num_experts + 2]
  float* pair_weight = nullptr;   // [max_tokens * (k + 1)]
};

template <typename T>
struct ExpertParams {
  const T* x = nullptr;  // [num_tokens, H]
  int64_t num_tokens = 0;
  int64_t hidden = 0;  // H
  std::span<const ExpertMatrices> experts;
  const ExpertMatrices* shared = nullptr;  // null: none
  int num_chosen = 0;                      // k
  const int32_t* expert_ids = nullptr;     // [num_tokens, k], ascending
  const float* weights = nullptr;          // [num_tokens, k]
  float swiglu_limit = 0;                  // 0: no clamp
  T* y = nullptr;                          // [num_tokens, H]
  ExpertWorkspace workspace;
};

template <typename T>
void Launch(const ExpertParams<T>& params, device::Stream& stream);

}  // namespace fathom::kernels
