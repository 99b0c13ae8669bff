// Products on the calling thread: a block of rows of x is widened once and multiplied by any number
// of weight rows. Shared by gemm and grouped_gemm on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "kernels/activation.h"
#include "kernels/gemm/gemm.h"
#include "kernels/simd/convert_rows.h"

namespace fathom::kernels {

inline constexpr int kMaxPanelRows = 32;

// Up to MaxRows(cols) rows of x. About 400 KB, for the stack.
class RowBlock {
 public:
  static constexpr int kMaxRows = 64;

  static int64_t MaxRows(int64_t cols) {
    return std::clamp<int64_t>(kMaxGemmCols / std::max<int64_t>(cols, 1), 1, kMaxRows);
  }
  // Weight rows of one Multiply: as many as stay in the first-level cache when widened.
  static int PanelRows(int64_t cols) {
    const int64_t rows = kCachedFloats / std::max<int64_t>(cols, 1) / 4 * 4;
    return static_cast<int>(std::clamp<int64_t>(rows, 4, kMaxPanelRows));
  }

  // row(i) for i < m points at `cols` values.
  template <typename RowFn>
  void Load(int64_t m, int64_t cols, const RowFn& row) {
    CHECK_LE(m * cols, kMaxGemmCols);
    m_ = static_cast<int>(m);
    for (int64_t i = 0; i < m; ++i) WidenRow(row(i), x_ + i * cols, cols);
  }

  int size() const { return m_; }

  // y[i][j] = dot(row i, W row first_row + j) for j < n <= PanelRows, rows of y kMaxPanelRows
  // apart.
  void Multiply(const WeightMatrix& w, int64_t first_row, int n, float* y) {
    Simd().dot_block({.x = x_,
                      .x_stride = w.cols,
                      .m = m_,
                      .w = w,
                      .first_row = first_row,
                      .n = n,
                      .panel = n * w.cols <= kPanelFloats ? panel_ : nullptr,
                      .y = y,
                      .y_stride = kMaxPanelRows});
  }

 private:
  static constexpr int64_t kCachedFloats = 4096;
  static constexpr int64_t kPanelFloats = int64_t{1} << 15;

  alignas(64) float x_[kMaxGemmCols];
  alignas(64) float panel_[kPanelFloats];
  int m_ = 0;
};

// Calls body(first row, rows) for consecutive panels of the weight rows [begin, end).
template <typename Body>
void ForEachPanel(int64_t begin, int64_t end, int64_t cols, const Body& body) {
  const int panel = RowBlock::PanelRows(cols);
  for (int64_t row = begin; row < end; row += panel) {
    body(row, static_cast<int>(std::min<int64_t>(panel, end - row)));
  }
}

// How many of `rows` weight rows one task multiplies with one block of x: all of them when the
// blocks keep the threads busy; otherwise fewer, but enough to be worth waking a thread.
inline int64_t TaskRows(int64_t rows, int64_t cols, int64_t num_blocks, int64_t block_rows,
                        int num_threads) {
  constexpr int64_t kTasksPerThread = 8;
  constexpr int64_t kMinTaskWork = 1 << 15;     // multiply-adds
  constexpr int64_t kMaxTaskWeights = 1 << 18;  // stay in the cache from one block to the next
  const int64_t parts = (kTasksPerThread * num_threads + num_blocks - 1) / num_blocks;
  const int64_t worth = kMinTaskWork / std::max<int64_t>(block_rows * cols, 1);
  const int64_t wanted =
      std::max(std::min(rows / parts, kMaxTaskWeights / std::max<int64_t>(cols, 1)), worth);
  const int64_t panel = RowBlock::PanelRows(cols);
  return std::min((std::max<int64_t>(wanted, 1) + panel - 1) / panel * panel, rows);
}

}  // namespace fathom::kernels
