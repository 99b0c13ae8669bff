// RMSNorm with a weight, and the weightless norm of query heads. FP32 inside.
//   RmsNorm: y = b(x * rsqrt(mean(x^2) + eps) * weight).
//   HeadNorm, in place: m = b(mean of b(q^2)); s = b(rsqrt(b(m + eps))); q = b(q * s).
// T is the activation type (kernels/activation.h). Pointers are memory of the stream's device.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/activation.h"

namespace fathom::kernels {

template <typename T>
struct RmsNormParams {
  const T* x = nullptr;              // [num_rows, size], rows x_stride apart
  const BFloat16* weight = nullptr;  // [size]
  T* y = nullptr;                    // [num_rows, size], rows y_stride apart; may be x
  int64_t num_rows = 0;
  int64_t size = 0;
  int64_t x_stride = 0;
  int64_t y_stride = 0;
  float eps = 0;
};

template <typename T>
struct HeadNormParams {
  T* q = nullptr;  // [num_rows, size]
  int64_t num_rows = 0;
  int64_t size = 0;
  float eps = 0;
};

template <typename T>
void Launch(const RmsNormParams<T>& params, device::Stream& stream);
template <typename T>
void Launch(const HeadNormParams<T>& params, device::Stream& stream);

// One row on the calling thread, for operators that hold a norm: mean(x^2), and the whole.
template <typename T>
float MeanSquare(const T* x, int64_t size);
template <typename T>
void RmsNormRow(const T* x, const BFloat16* weight, float eps, int64_t size, T* y);

}  // namespace fathom::kernels
