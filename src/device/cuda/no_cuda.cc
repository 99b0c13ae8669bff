#include "device/device.h"

namespace fathom::device {

Result<std::unique_ptr<Device>> MakeCudaDevice(int) {
  return DeviceError(
      "this binary was built without CUDA: rebuild it where nvcc is found (scripts/setup --cuda), "
      "or use "
      "--device cpu");
}

}  // namespace fathom::device
