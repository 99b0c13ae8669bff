// Hyper-connections: four residual streams mixed around every sub-layer.
//   pre:  from the 24 raw mixes (a gemm of flat(x) with fn) makes pre, post and C (softmax and
//         Sinkhorn), then the sub-layer's input y = b(rms_norm(b(sum_i pre_i x_i))).
//   post: x_k = b(post_k * y + sum_j C[j][k] * x_j), in place.
//   head: y = b(sum_i pre_i x_i) from 4 raw mixes; the final norm is separate.
// Mixes, pre, post and C are FP32; raw mixes are scaled here by rsqrt(mean(flat^2) + rms_norm_eps).
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/activation.h"

namespace fathom::kernels {

inline constexpr int kNumStreams = 4;
inline constexpr int kNumMixes = 24;  // pre 4, post 4, C 4x4

struct HyperConnectionConstants {
  float norm_eps = 0;
  float hc_eps = 0;
  int sinkhorn_iters = 0;
};

template <typename T>
struct HyperConnectionPreParams {
  const T* streams = nullptr;  // [num_tokens, 4, hidden]
  int64_t num_tokens = 0;
  int64_t hidden = 0;
  const float* mixes = nullptr;           // [num_tokens, 24], raw
  const float* scale = nullptr;           // [3]
  const float* base = nullptr;            // [24]
  const BFloat16* norm_weight = nullptr;  // [hidden]
  HyperConnectionConstants constants;
  T* y = nullptr;         // [num_tokens, hidden]
  float* post = nullptr;  // [num_tokens, 4]
  float* comb = nullptr;  // [num_tokens, 4, 4], C[j][k]
};

template <typename T>
struct HyperConnectionPostParams {
  T* streams = nullptr;  // [num_tokens, 4, hidden]
  int64_t num_tokens = 0;
  int64_t hidden = 0;
  const T* y = nullptr;  // [num_tokens, hidden], the sub-layer's output
  const float* post = nullptr;
  const float* comb = nullptr;
};

template <typename T>
struct HyperConnectionHeadParams {
  const T* streams = nullptr;  // [num_tokens, 4, hidden]
  int64_t num_tokens = 0;
  int64_t hidden = 0;
  const float* mixes = nullptr;  // [num_tokens, 4], raw
  const float* scale = nullptr;  // [1]
  const float* base = nullptr;   // [4]
  HyperConnectionConstants constants;
  T* y = nullptr;  // [num_tokens, hidden]
};

template <typename T>
void Launch(const HyperConnectionPreParams<T>& params, device::Stream& stream);
template <typename T>
void Launch(const HyperConnectionPostParams<T>& params, device::Stream& stream);
template <typename T>
void Launch(const HyperConnectionHeadParams<T>& params, device::Stream& stream);

}  // namespace fathom::kernels
