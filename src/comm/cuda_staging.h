// Moves columns of a matrix [num_rows, stride] to and from a packed one [num_rows, width] in stream
// order, between any memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/cuda/cuda_check.h"
#include "device/device.h"

namespace fathom::comm {

inline void CopyColumns(float* to, int64_t to_stride, const float* from, int64_t from_stride,
                        int64_t num_rows, int64_t width, device::Stream& stream) {
  const auto bytes = [](int64_t values) { return static_cast<size_t>(values) * sizeof(float); };
  device::CheckCuda(cudaMemcpy2DAsync(to, bytes(to_stride), from, bytes(from_stride), bytes(width),
                                      static_cast<size_t>(num_rows), cudaMemcpyDefault,
                                      static_cast<cudaStream_t>(stream.native_handle())),
                    __FILE__, __LINE__);
}

// Rows that are gathered at once by what has no kernel for it.
inline constexpr int64_t kStagedRows = 64;

}  // namespace fathom::comm
