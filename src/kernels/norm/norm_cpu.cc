#include <cmath>

#include "kernels/lane_sum.h"
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_cuda.h"

namespace fathom::kernels {
namespace {

// Rows of one task: enough work to be worth a thread.
int64_t RowsPerTask(int64_t size) {
  return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(size, 1));
}

template <typename T>
void HeadNormRow(T* q, float eps, int64_t size) {
  const float sum = LaneSum(size, [q](int64_t i) {
    const float x = ToFloat(q[i]);
    return Round<T>(x * x);
  });
  const float mean = Round<T>(sum / static_cast<float>(size));
  const float scale = Round<T>(1.0f / std::sqrt(Round<T>(mean + eps)));
  for (int64_t i = 0; i < size; ++i) q[i] = FromFloat<T>(ToFloat(q[i]) * scale);
}

}  // namespace

template <typename T>
void RmsNormRow(const T* x, const BFloat16* weight, float eps, int64_t size, T* y) {
  const float sum = LaneSum(size, [x](int64_t i) {
    const float v = ToFloat(x[i]);
    return v * v;
  });
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i)
    y[i] = FromFloat<T>(ToFloat(x[i]) * scale * ToFloat(weight[i]));
}

template <typename T>
void Launch(const RmsNormParams<T>& p, device::Stream& stream) {
  if (stream.kind() == device::DeviceKind::kCuda) return LaunchCuda(p, stream);
  stream.thread_pool().ParallelFor(
      p.num_rows, RowsPerTask(p.size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          RmsNormRow(p.x + row * p.x_stride, p.weight, p.eps, p.size, p.y + row * p.y_stride);
        }
      });
}

template <typename T>
void Launch(const HeadNormParams<T>& p, device::Stream& stream) {
  if (stream.kind() == device::DeviceKind::kCuda) return LaunchCuda(p, stream);
  stream.thread_pool().ParallelFor(p.num_rows, RowsPerTask(p.size),
                                   [&](int64_t begin, int64_t end) {
                                     for (int64_t row = begin; row < end; ++row)
                                       HeadNormRow(p.q + row * p.size, p.eps, p.size);
                                   });
}

template void RmsNormRow(const BFloat16*, const BFloat16*, float, int64_t, BFloat16*);
template void RmsNormRow(const float*, const BFloat16*, float, int64_t, float*);
template void Launch(const RmsNormParams<BFloat16>&, device::Stream&);
template void Launch(const RmsNormParams<float>&, device::Stream&);
template void Launch(const HeadNormParams<BFloat16>&, device::Stream&);
template void Launch(const HeadNormParams<float>&, device::Stream&);

}  // namespace fathom::kernels
