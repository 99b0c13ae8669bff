// CheckCuda (cuda_fault.h) for what a stream said.
#pragma once

#include "device/cuda/cuda_fault.h"
#include "device/device.h"

namespace fathom::device {

inline void CheckCuda(const Status& status, Stream& stream, const char* file, int line) {
  if (status.ok()) return;
  if (IsDeviceFault(cudaStreamQuery(static_cast<cudaStream_t>(stream.native_handle())))) return;
  CheckFailed(file, line, status.message());
}

}  // namespace fathom::device
