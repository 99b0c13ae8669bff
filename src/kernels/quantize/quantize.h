// FP8 e4m3 and FP4 e2m1 blocks with power-of-two scales, as the specification says:
//   FP8: a = max(|x|, 1e-4), s = 2^ceil(log2(a * fl32(1/448))), q = e4m3(clamp(x / s, +-448)).
//   FP4: a = max(|x|, 6 * 2^-126), s = 2^ceil(log2(a * fl32(1/6))), q = e2m1(clamp(x / s, +-6)).
// Inputs are finite values that BF16 holds; so are the dequantized ones.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/activation.h"

namespace fathom::kernels {

inline constexpr int kActivationBlock = 128;  // columns that share a scale, per token
inline constexpr int kKvEntryBlock = 64;
inline constexpr int kFp4Block = 32;

// Writes `size` codes and returns the scale as ue8m0.
uint8_t QuantizeFp8(const float* x, int size, uint8_t* codes);
// Writes size / 2 bytes, the even element in the low nibble, and returns the scale as ue8m0.
uint8_t QuantizeFp4(const float* x, int size, uint8_t* codes);

// What the linear layers see: y = dequantized FP8 per token and 128 columns (the last block may be
// short).
template <typename T>
struct QuantizeParams {
  const T* x = nullptr;  // [num_rows, size], rows x_stride apart
  int64_t x_stride = 0;
  T* y = nullptr;  // [num_rows, size], rows y_stride apart; may be x
  int64_t y_stride = 0;
  int64_t num_rows = 0;
  int64_t size = 0;
};

template <typename T>
void Launch(const QuantizeParams<T>& params, device::Stream& stream);

// One row of the above on the calling thread.
template <typename T>
void QuantizeRow(const T* x, int64_t size, T* y);

}  // namespace fathom::kernels
