// One row's logits, shared out over the blocks of a cluster, and the weights of its tokens. Device
// code only.
#pragma once

#include "kernels/ordered.cuh"
#include "kernels/sampling/cluster_values.cuh"
#include "kernels/sampling/sampling_cuda.h"

namespace fathom::kernels {

// Weight 1, the best token's.
inline constexpr double kWeightUnit = 0x1p44;

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

// exp(x) for -700 <= x <= 0, to a unit in the last place or two: a fraction of what exp() takes. By
// its Taylor series: |r| <= ln(2) / 2, so the term after the last is below 2^-52.
__device__ inline double ExpNotAbove1(double x) {
  const int n = __double2int_rn(x * 1.4426950408889634);
  double r = fma(-static_cast<double>(n), 6.93147180369123816490e-01, x);
  r = fma(-static_cast<double>(n), 1.90821492927058770002e-10, r);
  double sum = 1.0 / 479001600;
  constexpr double kTerms[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                               1.0 / 5040,     1.0 / 720,     1.0 / 120,    1.0 / 24,
                               1.0 / 6,        1.0 / 2,       1.0,          1.0};
#pragma unroll
  for (const double term : kTerms) sum = fma(sum, r, term);
  return __hiloint2double(__double2hiint(sum) + (n << 20), __double2loint(sum));
}

class Weights {
 public:
  __device__ Weights(const SamplingRow& row, float best)
      : best_(best),
        inverse_temperature_(1 / row.temperature),
        min_p_(row.min_p),
        // Below it a weight is rounded to nothing; and to zero below the second.
        least_(best + static_cast<float>(kLeastExponent * row.temperature)),
        least_counted_(best + static_cast<float>(-745 * row.temperature)) {}

  // A token that may be drawn counts, even where its weight is rounded to nothing.
  __device__ Mass Of(float logit) const {
    if (logit < least_) return {0, logit > least_counted_ && min_p_ < 1e-14 ? 1ull : 0};
    const double weight = ExpNotAbove1((static_cast<double>(logit) - best_) * inverse_temperature_);
    if (weight < min_p_) return {0, 0};
    return {__double2ull_rn(weight * kWeightUnit), 1};
  }

 private:
  static constexpr double kLeastExponent = -32.3;  // exp of it: 2^-46.6
  double best_, inverse_temperature_, min_p_;
  float least_, least_counted_;
};

}  // namespace fathom::kernels
