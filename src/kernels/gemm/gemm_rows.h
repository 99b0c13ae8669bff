// A block of a product on the calling thread: scratch on the stack, rows of x gathered by a
// function. Shared by gemm and grouped_gemm on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "kernels/activation.h"
#include "kernels/gemm/gemm.h"
#include "kernels/simd/simd.h"

namespace fathom::kernels {

inline constexpr int kMaxBlockRows = 64;  // of x, and of W, in one block
inline constexpr int64_t kPanelFloats = kMaxGemmCols;

// Weight rows of one task: as many as are widened once into a panel, few enough to share among
// threads.
inline int WeightBlockRows(int64_t cols) {
  const int64_t rows = kPanelFloats / std::max<int64_t>(cols, 1) / 4 * 4;
  return static_cast<int>(std::clamp<int64_t>(rows, 4, 32));
}

inline void WidenRow(const BFloat16* in, float* out, int64_t size) {
  Simd().bf16_to_float(in, out, size);
}
inline void WidenRow(const float* in, float* out, int64_t size) { std::copy(in, in + size, out); }

// Calls store(i0, m, y) for consecutive blocks of rows i0..i0+m of x: y[i][j] = dot(row(i0 + i), W
// row first_row + j), rows of y kMaxBlockRows apart. row(i) points at w.cols values of type X.
template <typename RowFn, typename StoreFn>
void MultiplyRows(const WeightMatrix& w, int64_t first_row, int n, int64_t m, const RowFn& row,
                  const StoreFn& store) {
  alignas(64) float x[kPanelFloats];
  alignas(64) float panel[kPanelFloats];
  alignas(64) float y[kMaxBlockRows * kMaxBlockRows];
  CHECK_LE(w.cols, kPanelFloats);
  const int64_t block = std::clamp<int64_t>(kPanelFloats / w.cols, 1, kMaxBlockRows);
  for (int64_t i0 = 0; i0 < m; i0 += block) {
    const int rows = static_cast<int>(std::min(block, m - i0));
    for (int i = 0; i < rows; ++i) WidenRow(row(i0 + i), x + i * w.cols, w.cols);
    Simd().dot_block({.x = x,
                      .x_stride = w.cols,
                      .m = rows,
                      .w = w,
                      .first_row = first_row,
                      .n = n,
                      .panel = n * w.cols <= kPanelFloats ? panel : nullptr,
                      .y = y,
                      .y_stride = kMaxBlockRows});
    store(i0, rows, y);
  }
}

}  // namespace fathom::kernels
