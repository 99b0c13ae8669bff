// One row's logits, shared out over the blocks of a cluster, and the weights of its tokens. Device
// code only.
#pragma once

#include "kernels/sampling/cluster_values.cuh"
#include "kernels/sampling/sampling_cuda.h"

namespace fathom::kernels {

// Weight 1, the best token's.
inline constexpr double kWeightUnit = 0x1p44;

// Sorts as the float does; never 0 for a number.
__device__ inline uint32_t OrderedKey(float x) {
  const uint32_t u = __float_as_uint(x + 0.0f);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}
__device__ inline float FromOrderedKey(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// This block's part of a row: tokens [first, first + size), the edited logits in shared memory. A
// warp's part of it is contiguous, so that warps and blocks follow each other in the order of ids.
struct RowSlice {
  float* logits;
  int first;
  int size;
  int per_warp;  // a multiple of 32

  __device__ int warp_begin() const {
    return min(size, static_cast<int>(threadIdx.x / 32) * per_warp);
  }
  __device__ int warp_end() const { return min(size, warp_begin() + per_warp); }

  // Calls take(i) for this thread's elements.
  template <typename Take>
  __device__ void ForEach(const Take& take) const {
    for (int i = warp_begin() + static_cast<int>(threadIdx.x % 32); i < warp_end(); i += 32) {
      take(i);
    }
  }
};

class Weights {
 public:
  __device__ Weights(const SamplingRow& row, float best)
      : best_(best), temperature_(row.temperature), min_p_(row.min_p) {}

  // A token that may be drawn counts, even where its weight is rounded to nothing.
  __device__ Mass Of(float logit) const {
    const double exponent = (static_cast<double>(logit) - best_) / temperature_;
    if (exponent < -746) return {0, 0};
    const double weight = exp(exponent);
    if (!(weight > 0 && weight >= min_p_)) return {0, 0};
    return {__double2ull_rn(weight * kWeightUnit), 1};
  }

 private:
  double best_, temperature_, min_p_;
};

}  // namespace fathom::kernels
