// A weight matrix [rows, cols] as the checkpoint stores it, row-major; a view, the weights own the
// memory.
//   kF32, kBF16: plain values.
//   kFp8: e4m3fn codes; scales ue8m0 [ceil(rows / 128), ceil(cols / 128)]. cols is a multiple
//   of 16. kFp4: e2m1 codes, two a byte, the low nibble first; scales ue8m0 [rows, cols / 32].
//   cols: of 32.
// Codes are never NaN and scales never 255 (checked when a checkpoint is written, not per product).
#pragma once

#include <cstddef>
#include <cstdint>

namespace fathom::kernels {

enum class WeightDType { kF32, kBF16, kFp8, kFp4 };

struct WeightMatrix {
  WeightDType dtype = WeightDType::kBF16;
  int64_t rows = 0;
  int64_t cols = 0;
  const std::byte* data = nullptr;
  const uint8_t* scales = nullptr;

  // Official numerics quantize the activations that meet these.
  bool is_quantized() const { return dtype == WeightDType::kFp8 || dtype == WeightDType::kFp4; }
};

}  // namespace fathom::kernels
