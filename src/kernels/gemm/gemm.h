// y = x W^T: linear layers. Dot products in the canonical order of kernels/simd, rounded once to Y.
// Official numerics: for quantized weights x holds FP8 values already (kernels/quantize). Scales
// are powers of two, so products of dequantized values round as products of codes with the scales
// applied per block.
// groups > 1: the rows of W are split evenly; group g reads columns [g * cols, (g + 1) * cols).
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/activation.h"
#include "kernels/weight_matrix.h"

namespace fathom::kernels {

// The longest row of W.
inline constexpr int64_t kMaxGemmCols = int64_t{1} << 16;

template <typename X, typename Y>
struct GemmParams {
  const X* x = nullptr;  // [m, groups * w.cols], rows x_stride apart
  int64_t x_stride = 0;
  int64_t m = 0;
  WeightMatrix w;
  int groups = 1;
  Y* y = nullptr;  // [m, w.rows], rows y_stride apart
  int64_t y_stride = 0;
};

template <typename X, typename Y>
void Launch(const GemmParams<X, Y>& params, device::Stream& stream);

}  // namespace fathom::kernels
