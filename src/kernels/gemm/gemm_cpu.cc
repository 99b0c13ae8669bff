#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_rows.h"

namespace fathom::kernels {
namespace {

// Weight rows [begin, end) with one block of x.
template <typename X, typename Y>
void MultiplyBlock(const GemmParams<X, Y>& p, int64_t i0, int64_t m, int64_t group, int64_t begin,
                   int64_t end) {
  const X* x = p.x + group * p.w.cols + i0 * p.x_stride;
  RowBlock block;
  block.Load(m, p.w.cols, [&](int64_t i) { return x + i * p.x_stride; });
  ForEachPanel(begin, end, p.w.cols, [&](int64_t row, int n) {
    alignas(64) float y[RowBlock::kMaxRows * kMaxPanelRows];
    block.Multiply(p.w, row, n, y);
    for (int64_t i = 0; i < m; ++i) {
      NarrowRow(y + i * kMaxPanelRows, p.y + (i0 + i) * p.y_stride + row, n);
    }
  });
}

}  // namespace

template <typename X, typename Y>
void Launch(const GemmParams<X, Y>& p, device::Stream& stream) {
  if (p.m == 0) return;
  ThreadPool& pool = stream.thread_pool();
  const int64_t group_rows = p.w.rows / p.groups;
  CHECK_EQ(group_rows * p.groups, p.w.rows);
  const int64_t block_rows = std::min(p.m, RowBlock::MaxRows(p.w.cols));
  const int64_t num_blocks = (p.m + block_rows - 1) / block_rows;
  const int64_t task_rows =
      TaskRows(group_rows, p.w.cols, num_blocks * p.groups, block_rows, pool.num_threads());
  const int64_t parts = (group_rows + task_rows - 1) / task_rows;
  // Tasks that share weights follow each other.
  pool.ParallelFor(p.groups * parts * num_blocks, 1, [&](int64_t task, int64_t) {
    const int64_t i0 = task % num_blocks * block_rows;
    const int64_t part = task / num_blocks % parts;
    const int64_t group = task / num_blocks / parts;
    const int64_t first = group * group_rows;
    const int64_t end = std::min((part + 1) * task_rows, group_rows);
    MultiplyBlock(p, i0, std::min(block_rows, p.m - i0), group, first + part * task_rows,
                  first + end);
  });
}

template void Launch(const GemmParams<BFloat16, BFloat16>&, device::Stream&);
template void Launch(const GemmParams<BFloat16, float>&, device::Stream&);
template void Launch(const GemmParams<float, float>&, device::Stream&);

}  // namespace fathom::kernels
