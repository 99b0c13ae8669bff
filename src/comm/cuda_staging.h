// Gathers by what exchanges plain ranges of bytes only: each rank's part of a matrix is packed into
// staging memory, exchanged, and unpacked.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/check.h"
#include "comm/cuda_group.h"
#include "comm/group.h"
#include "device/cuda/cuda_check.h"
#include "device/device.h"
#include "kernels/collective/gather_cuda.h"

namespace fathom::comm {

inline int64_t StagingBytes(const CudaGroupOptions& options) {
  return std::max(options.max_row_bytes, int64_t{16} << 20);
}

// On the current GPU; null: there is no room.
inline std::shared_ptr<std::byte> AllocateOnGpu(int64_t bytes) {
  int gpu = 0;
  void* memory = nullptr;
  if (cudaGetDevice(&gpu) != cudaSuccess ||
      cudaMalloc(&memory, static_cast<size_t>(bytes)) != cudaSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return {static_cast<std::byte*>(memory), [gpu](std::byte* place) {
            cudaSetDevice(gpu);
            cudaFree(place);
          }};
}

// In stream order, between any memory.
inline void CopyRows(std::byte* to, int64_t to_pitch, const std::byte* from, int64_t from_pitch,
                     int64_t width, int64_t height, device::Stream& stream) {
  if (width == 0 || height == 0) return;
  device::CheckCuda(
      cudaMemcpy2DAsync(to, static_cast<size_t>(to_pitch), from, static_cast<size_t>(from_pitch),
                        static_cast<size_t>(width), static_cast<size_t>(height), cudaMemcpyDefault,
                        static_cast<cudaStream_t>(stream.native_handle())),
      __FILE__, __LINE__);
}

// exchange(ranges): ranges[r] of `staging` becomes rank r's; this rank's is there.
template <typename Exchange>
Status GatherPacked(const kernels::GatheredMatrix& matrix, int rank, int size, std::byte* staging,
                    int64_t staging_bytes, device::Stream& stream, const Exchange& exchange) {
  int64_t row_bytes = 0, height = 0;
  for (int r = 0; r < size; ++r) {
    row_bytes += matrix.of[r].width;
    height = std::max(height, matrix.of[r].height);
  }
  CHECK_GT(row_bytes, 0);
  const int64_t most = staging_bytes / row_bytes;
  CHECK_GT(most, 0);
  std::vector<Group::Range> ranges(static_cast<size_t>(size));
  for (int64_t row = 0; row < height; row += most) {
    const auto rows = [&](int r) {
      return std::clamp<int64_t>(matrix.of[r].height - row, 0, most);
    };
    int64_t bytes = 0;
    for (int r = 0; r < size; ++r) {
      const int64_t begin = bytes;
      bytes += matrix.of[r].width * rows(r);
      ranges[static_cast<size_t>(r)] = {begin, bytes};
    }
    const auto part = [&](int r) { return staging + ranges[static_cast<size_t>(r)].begin; };
    const auto place = [&](int r) {
      return matrix.data + matrix.of[r].offset + row * matrix.pitch;
    };
    const int64_t width = matrix.of[rank].width;
    CopyRows(part(rank), width, place(rank), matrix.pitch, width, rows(rank), stream);
    RETURN_IF_ERROR(exchange(ranges));
    for (int r = 0; r < size; ++r) {
      const int64_t other = matrix.of[r].width;
      if (r != rank) CopyRows(place(r), matrix.pitch, part(r), other, other, rows(r), stream);
    }
  }
  return OkStatus();
}

}  // namespace fathom::comm
