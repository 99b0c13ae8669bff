// Index queries and keys: y = b(dim^-0.5 * H x), H[a][b] = (-1)^popcount(a & b) (Hadamard), before
// they are quantized. fp32 numerics leave the rotation out. dim is a power of two.
#pragma once

#include "kernels/activation.h"

namespace fathom::kernels {

template <typename T>
void RotateIndexVector(float* values, int dim);

}  // namespace fathom::kernels
