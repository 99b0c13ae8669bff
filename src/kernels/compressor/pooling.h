// The two poolings of the compressor on plain rows, and the state they keep. CPU.
#pragma once

#include <cstdint>

#include "kernels/activation.h"
#include "kernels/compressor/compressor.h"

namespace fathom::kernels {

// One token's row: c and z (ape included), each `width` floats.
struct PoolRow {
  const float* c = nullptr;
  const float* z = nullptr;
};

// out[i] = sum over rows of softmax(z[i]) * c[i], rows in order.
void PoolSoftmax(const PoolRow* rows, int num_rows, int dim, float* out);

// The running softmax of one C128 group. m starts at -infinity, l and acc at 0.
struct OnlineSoftmax {
  float* m = nullptr;  // [dim]
  float* l = nullptr;
  float* acc = nullptr;
  void Clear(int dim);
  void Merge(const PoolRow& row, int dim);
};

}  // namespace fathom::kernels
