#include "device/cuda/multi_gpu.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdlib>

namespace fathom::device {

int CountGpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

bool MayHaveGpus() {
  int driver = 0, count = 0;
  cudaError_t error = cudaDriverGetVersion(&driver);
  if (error == cudaSuccess) error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  return driver != 0 && error != cudaErrorNoDevice;
}

PeerLink ProbePeerLink(int from, int to) {
  int reaches = 0, atomics = 0;
  if (cudaDeviceCanAccessPeer(&reaches, from, to) != cudaSuccess || reaches == 0) {
    (void)cudaGetLastError();
    return PeerLink::kNone;
  }
  // Only NVLink carries atomics between GPUs.
  const cudaError_t error =
      cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, from, to);
  (void)cudaGetLastError();
  return error == cudaSuccess && atomics != 0 ? PeerLink::kNvlink : PeerLink::kPcie;
}

void ReachEachOther(std::span<const int> gpus) {
  for (const int from : gpus) {
    for (const int to : gpus) {
      if (from == to || ProbePeerLink(from, to) == PeerLink::kNone) continue;
      cudaSetDevice(from);
      cudaDeviceEnablePeerAccess(to, 0);
      (void)cudaGetLastError();  // it may have been so
    }
  }
}

void LoadKernelsEagerly() noexcept { setenv("CUDA_MODULE_LOADING", "EAGER", 1); }

bool KernelsAreLoadedEagerly() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuModuleGetLoadingMode", &entry,
                                                             11070, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  CUmoduleLoadingMode mode = CU_MODULE_LAZY_LOADING;
  const auto loading_mode = reinterpret_cast<CUresult (*)(CUmoduleLoadingMode*)>(entry);
  return loading_mode(&mode) == CUDA_SUCCESS && mode == CU_MODULE_EAGER_LOADING;
}

}  // namespace fathom::device
