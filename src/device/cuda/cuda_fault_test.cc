#include "device/cuda/cuda_fault.h"

#include <gtest/gtest.h>

namespace fathom::device {
namespace {

// Those of which the runtime's documentation says that the process must be terminated, and what a
// broken memory or link is.
TEST(CudaFault, IsWhatEndsTheProcessAndNothingElse) {
  for (const cudaError_t fault :
       {cudaErrorContained, cudaErrorIllegalAddress, cudaErrorLaunchTimeout, cudaErrorAssert,
        cudaErrorHardwareStackError, cudaErrorIllegalInstruction, cudaErrorMisalignedAddress,
        cudaErrorInvalidAddressSpace, cudaErrorInvalidPc, cudaErrorLaunchFailure,
        cudaErrorTensorMemoryLeak, cudaErrorMpsClientTerminated, cudaErrorExternalDevice,
        cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorUnknown}) {
    EXPECT_TRUE(IsDeviceFault(fault)) << cudaGetErrorName(fault);
    CheckCuda(fault, __FILE__, __LINE__);
  }
  for (const cudaError_t bug : {cudaErrorInvalidValue, cudaErrorInvalidConfiguration,
                                cudaErrorMemoryAllocation, cudaErrorNotReady}) {
    EXPECT_FALSE(IsDeviceFault(bug)) << cudaGetErrorName(bug);
  }
}

TEST(CudaFault, ABugEndsTheProcessWithCudasWords) {
  EXPECT_DEATH(CheckCuda(cudaErrorInvalidConfiguration, "a.cu", 7),
               "a.cu:7.*invalid configuration");
}

}  // namespace
}  // namespace fathom::device
