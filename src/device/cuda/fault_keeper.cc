#include "device/cuda/fault_keeper.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

namespace fathom::device {
namespace {

// A file in memory; -1: none is kept. Written while there is one thread.
int kept_dump = -1;

using SetAttribute = CUresult (*)(CUcoredumpSettings, void*, size_t*);

SetAttribute FindSetAttribute() {
  constexpr unsigned kWithGenerationFlags = 12050;  // the driver's version
  void* entry = nullptr;
  int version = 0;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  if (cudaDriverGetVersion(&version) != cudaSuccess ||
      version < static_cast<int>(kWithGenerationFlags) ||
      cudaGetDriverEntryPointByVersion("cuCoredumpSetAttributeGlobal", &entry, kWithGenerationFlags,
                                       cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<SetAttribute>(entry);
}

size_t DumpBytes() noexcept {
  struct stat about{};
  if (kept_dump < 0 || fstat(kept_dump, &about) != 0) return 0;
  return static_cast<size_t>(about.st_size);
}

}  // namespace

void KeepFaultDumps() {
  if (kept_dump >= 0) return;
  const SetAttribute set = FindSetAttribute();
  const int file = set == nullptr ? -1 : memfd_create("fault", MFD_CLOEXEC);
  if (file < 0) return;
  std::string path = "/proc/self/fd/" + std::to_string(file);
  size_t path_size = path.size() + 1;
  unsigned flags = CU_COREDUMP_LIGHTWEIGHT_FLAGS | CU_COREDUMP_SKIP_ABORT;
  size_t flags_size = sizeof(flags);
  bool enable = true;
  size_t enable_size = sizeof(enable);
  if (set(CU_COREDUMP_FILE, path.data(), &path_size) != CUDA_SUCCESS ||
      set(CU_COREDUMP_GENERATION_FLAGS, &flags, &flags_size) != CUDA_SUCCESS ||
      set(CU_COREDUMP_ENABLE_ON_EXCEPTION, &enable, &enable_size) != CUDA_SUCCESS) {
    close(file);
    return;
  }
  kept_dump = file;
}

bool HasFaultDump() noexcept { return DumpBytes() > 0; }

std::optional<BrokenKernel> FindBrokenKernel() {
  const size_t bytes = DumpBytes();
  if (bytes == 0) return std::nullopt;
  void* const dump = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, kept_dump, 0);
  if (dump == MAP_FAILED) return std::nullopt;
  const auto kernel = FindBrokenKernel(std::span(static_cast<const std::byte*>(dump), bytes));
  munmap(dump, bytes);
  return kernel;
}

}  // namespace fathom::device
