#include <cmath>

#include "kernels/indexer/index_vector.h"

namespace fathom::kernels {

template <>
void RotateIndexVector<BFloat16>(float* values, int dim) {
  for (int half = 1; half < dim; half *= 2) {
    for (int begin = 0; begin < dim; begin += 2 * half) {
      for (int i = begin; i < begin + half; ++i) {
        const float a = values[i], b = values[i + half];
        values[i] = a + b;
        values[i + half] = a - b;
      }
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int i = 0; i < dim; ++i) values[i] = Round<BFloat16>(values[i] * scale);
}

template <>
void RotateIndexVector<float>(float*, int) {}

}  // namespace fathom::kernels
