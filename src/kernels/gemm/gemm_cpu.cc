#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_rows.h"

namespace fathom::kernels {
namespace {

// Below this many multiply-adds a thread is not worth waking.
constexpr int64_t kMinParallelWork = 1 << 15;

}  // namespace

template <typename X, typename Y>
void Launch(const GemmParams<X, Y>& p, device::Stream& stream) {
  if (p.m == 0) return;
  const int64_t group_rows = p.w.rows / p.groups;
  CHECK_EQ(group_rows * p.groups, p.w.rows);
  const int block = WeightBlockRows(p.w.cols);
  const int64_t group_blocks = (group_rows + block - 1) / block;
  const auto run_block = [&](int64_t task) {
    const int64_t group = task / group_blocks;
    const int64_t begin = task % group_blocks * block;
    const int64_t first_row = group * group_rows + begin;
    const int n = static_cast<int>(std::min<int64_t>(block, group_rows - begin));
    const X* x = p.x + group * p.w.cols;
    MultiplyRows(
        p.w, first_row, n, p.m, [&](int64_t i) { return x + i * p.x_stride; },
        [&](int64_t i0, int rows, const float* y) {
          for (int i = 0; i < rows; ++i) {
            Y* out = p.y + (i0 + i) * p.y_stride + first_row;
            for (int j = 0; j < n; ++j) out[j] = FromFloat<Y>(y[i * kMaxBlockRows + j]);
          }
        });
  };
  const int64_t num_blocks = group_blocks * p.groups;
  const int64_t block_work = p.m * block * p.w.cols;
  const int64_t grain = std::max<int64_t>(1, kMinParallelWork / std::max<int64_t>(block_work, 1));
  stream.thread_pool().ParallelFor(num_blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) run_block(task);
  });
}

template void Launch(const GemmParams<BFloat16, BFloat16>&, device::Stream&);
template void Launch(const GemmParams<BFloat16, float>&, device::Stream&);
template void Launch(const GemmParams<float, float>&, device::Stream&);

}  // namespace fathom::kernels
