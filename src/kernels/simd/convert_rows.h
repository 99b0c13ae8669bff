// Rows of activations to FP32 and back, on vectors. FP32 rows are copied.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/simd/simd.h"

namespace fathom::kernels {

inline void WidenRow(const BFloat16* in, float* out, int64_t size) {
  Simd().bf16_to_float(in, out, size);
}
inline void WidenRow(const float* in, float* out, int64_t size) { std::copy_n(in, size, out); }

inline void NarrowRow(const float* in, BFloat16* out, int64_t size) {
  Simd().float_to_bf16(in, out, size);
}
inline void NarrowRow(const float* in, float* out, int64_t size) { std::copy_n(in, size, out); }

}  // namespace fathom::kernels
