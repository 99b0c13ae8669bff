#include <algorithm>
#include <cmath>

#include "kernels/lane_sum.h"
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_cuda.h"
#include "kernels/simd/convert_rows.h"

namespace fathom::kernels {
namespace {

// Rows of one task: enough work to be worth a thread.
int64_t RowsPerTask(int64_t size) {
  return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(size, 1));
}

template <typename T>
void HeadNormRow(T* q, float eps, int64_t size) {
  float x[kRowPiece];
  LaneSum sum;
  for (int64_t begin = 0; begin < size; begin += kRowPiece) {
    const int64_t n = std::min(kRowPiece, size - begin);
    WidenRow(q + begin, x, n);
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] * x[i];
    if constexpr (kIsOfficial<T>) Simd().round_to_bf16(x, x, n);
    sum.Add(x, n);
  }
  const float mean = Round<T>(sum.Total() / static_cast<float>(size));
  const float scale = Round<T>(1.0f / std::sqrt(Round<T>(mean + eps)));
  for (int64_t begin = 0; begin < size; begin += kRowPiece) {
    const int64_t n = std::min(kRowPiece, size - begin);
    WidenRow(q + begin, x, n);
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] * scale;
    NarrowRow(x, q + begin, n);
  }
}

}  // namespace

template <typename T>
float MeanSquare(const T* x, int64_t size) {
  float piece[kRowPiece];
  LaneSum sum;
  for (int64_t begin = 0; begin < size; begin += kRowPiece) {
    const int64_t n = std::min(kRowPiece, size - begin);
    WidenRow(x + begin, piece, n);
    for (int64_t i = 0; i < n; ++i) piece[i] = piece[i] * piece[i];
    sum.Add(piece, n);
  }
  return sum.Total() / static_cast<float>(size);
}

template <typename T>
void RmsNormRow(const T* x, const BFloat16* weight, float eps, int64_t size, T* y) {
  const float scale = 1.0f / std::sqrt(MeanSquare(x, size) + eps);
  float piece[kRowPiece], weights[kRowPiece];
  for (int64_t begin = 0; begin < size; begin += kRowPiece) {
    const int64_t n = std::min(kRowPiece, size - begin);
    WidenRow(x + begin, piece, n);
    WidenRow(weight + begin, weights, n);
    for (int64_t i = 0; i < n; ++i) piece[i] = piece[i] * scale * weights[i];
    NarrowRow(piece, y + begin, n);
  }
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

template float MeanSquare(const BFloat16*, int64_t);
template float MeanSquare(const float*, int64_t);
template void RmsNormRow(const BFloat16*, const BFloat16*, float, int64_t, BFloat16*);
template void RmsNormRow(const float*, const BFloat16*, float, int64_t, float*);
template void Launch(const RmsNormParams<BFloat16>&, device::Stream&);
template void Launch(const RmsNormParams<float>&, device::Stream&);
template void Launch(const HeadNormParams<BFloat16>&, device::Stream&);
template void Launch(const HeadNormParams<float>&, device::Stream&);

}  // namespace fathom::kernels
