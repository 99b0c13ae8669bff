// Errors of the CUDA runtime by whose they are. Pure.
#pragma once

#include <cuda_runtime_api.h>

#include "base/check.h"

namespace fathom::device {

// An earlier piece of work, the device itself or its server broke it: every call fails from then
// on, so whoever enqueues stops, and whoever waits for the stream reports it. All other errors of a
// launch are bugs of its caller.
inline bool IsDeviceFault(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:  // a GPU's memory, or an access to another's, where others go on
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

// For calls that only a bug of ours makes fail: ends the process with CUDA's words. Does nothing on
// a broken device.
inline void CheckCuda(cudaError_t error, const char* file, int line) {
  if (error != cudaSuccess && !IsDeviceFault(error)) {
    CheckFailed(file, line, cudaGetErrorString(error));
  }
}

}  // namespace fathom::device
