#include "device/cpu/cpu_timeline.h"
#include "device/cuda/fault_keeper.h"
#include "device/cuda/multi_gpu.h"
#include "device/device.h"

namespace fathom::device {

Result<std::unique_ptr<Device>> MakeCudaDevice(int) {
  return DeviceError(
      "this binary was built without CUDA: rebuild it where nvcc is found (scripts/setup --cuda), "
      "or use "
      "--device cpu");
}

std::unique_ptr<Timeline> MakeTimeline(DeviceKind) { return MakeCpuTimeline(); }

int CountGpus() { return 0; }
bool MayHaveGpus() { return false; }
PeerLink ProbePeerLink(int, int) { return PeerLink::kNone; }
void ReachEachOther(std::span<const int>) {}
void LoadKernelsEagerly() noexcept {}
void KeepFaultDumps() {}
bool KernelsAreLoadedEagerly() { return true; }

}  // namespace fathom::device
