// The canonical FP32 sum of row operators (norms): 16 accumulators, i mod 16 takes term i in order,
// then the fixed tree of kernels/simd. It depends on the row only. Terms come in pieces; only the
// last may have a length that is no multiple of 16.
#pragma once

#include <cstdint>

namespace fathom::kernels {

// The piece of a row that row operators hold in FP32 at a time.
inline constexpr int64_t kRowPiece = 512;

class LaneSum {
 public:
  void Add(const float* terms, int64_t size) {
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
      for (int64_t l = 0; l < 16; ++l) lanes_[l] = lanes_[l] + terms[i + l];
    }
    for (int64_t l = 0; i + l < size; ++l) lanes_[l] = lanes_[l] + terms[i + l];
  }

  float Total() const {
    float sums[16];
    for (int l = 0; l < 16; ++l) sums[l] = lanes_[l];
    for (int half = 8; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) sums[l] = sums[l] + sums[l + half];
    }
    return sums[0];
  }

 private:
  float lanes_[16] = {};
};

}  // namespace fathom::kernels
