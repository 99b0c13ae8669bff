#include <algorithm>

#include "kernels/quantize/quantize.h"
#include "kernels/simd/simd.h"

namespace fathom::kernels {
namespace {

constexpr float kFp8Floor = 1e-4f;
constexpr float kFp8Inverse = 1.0f / 448.0f;
constexpr float kFp4Floor = 6 * 0x1p-126f;
constexpr float kFp4Inverse = 1.0f / 6.0f;

float Scale(const float* x, int64_t size, float floor, float inverse, uint8_t* byte) {
  *byte = CeilToUe8m0(std::max(floor, Simd().max_magnitude(x, size)) * inverse);
  return Ue8m0ToFloat(*byte);
}

}  // namespace

uint8_t QuantizeFp8(const float* x, int size, uint8_t* codes) {
  uint8_t byte;
  const float scale = Scale(x, size, kFp8Floor, kFp8Inverse, &byte);
  Simd().fp8_codes(x, scale, codes, size);
  return byte;
}

uint8_t QuantizeFp4(const float* x, int size, uint8_t* codes) {
  uint8_t byte;
  const float scale = Scale(x, size, kFp4Floor, kFp4Inverse, &byte);
  Simd().fp4_codes(x, scale, codes, size);
  return byte;
}

template <>
void QuantizeRow(const BFloat16* x, int64_t size, BFloat16* y) {
  float block[kActivationBlock];
  for (int64_t begin = 0; begin < size; begin += kActivationBlock) {
    const int64_t n = std::min<int64_t>(kActivationBlock, size - begin);
    Simd().bf16_to_float(x + begin, block, n);
    uint8_t byte;
    const float scale = Scale(block, n, kFp8Floor, kFp8Inverse, &byte);
    Simd().round_to_fp8(block, scale, block, n);
    Simd().float_to_bf16(block, y + begin, n);
  }
}

template <typename T>
void Launch(const QuantizeParams<T>& p, device::Stream& stream) {
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(p.size, 1));
  stream.thread_pool().ParallelFor(p.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      QuantizeRow(p.x + row * p.x_stride, p.size, p.y + row * p.y_stride);
    }
  });
}

template void Launch(const QuantizeParams<BFloat16>&, device::Stream&);

}  // namespace fathom::kernels
