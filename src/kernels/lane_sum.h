// The canonical FP32 sum of row operators (norms): 16 accumulators, i mod 16 takes term i in order,
// then the fixed tree of kernels/simd. It depends on the row only.
#pragma once

#include <cstdint>

namespace fathom::kernels {

template <typename Term>
inline float LaneSum(int64_t size, const Term& term) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    for (int64_t l = 0; l < 16; ++l) lanes[l] = lanes[l] + term(i + l);
  }
  for (int64_t l = 0; i + l < size; ++l) lanes[l] = lanes[l] + term(i + l);
  for (int half = 8; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return lanes[0];
}

}  // namespace fathom::kernels
