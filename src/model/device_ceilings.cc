#include "model/device_ceilings.h"

#include <array>
#include <cctype>

namespace fathom::model {
namespace {

constexpr double kGibibyte = 1 << 30;

const std::array<DeviceCeilings, 3>& Table() {
  static const std::array<DeviceCeilings, 3> devices = {{
      {.name = "H200",
       .source = "measured on two of one host; exchanges of more than two: NCCL's published 2.3 us",
       .memory_bytes = 139.8 * kGibibyte,
       .memory_bytes_per_s = 4.55e12,
       .fp8_flops = 1320e12,
       .bf16_flops = 785e12,
       .link_bytes_per_s = 397e9,
       .exchange_us_of_two = 1.8,
       .exchange_us_of_more = 2.3},
      {.name = "B200",
       .source =
           "the maker's, dense; memory at the clock it runs; exchanges: NCCL's published 3 us",
       .memory_bytes = 178.35 * kGibibyte,
       .memory_bytes_per_s = 7.67e12,
       .fp8_flops = 4500e12,
       .bf16_flops = 2250e12,
       .link_bytes_per_s = 900e9,
       .exchange_us_of_two = 3,
       .exchange_us_of_more = 3},
      {.name = "RTX PRO 6000",
       .source = "the maker's, dense; link: PCIe 5.0 x16; how long exchanges take is not known",
       .memory_bytes = 94.97 * kGibibyte,
       .memory_bytes_per_s = 1.79e12,
       .fp8_flops = 1007e12,
       .bf16_flops = 503.8e12,
       .link_bytes_per_s = 64e9},
  }};
  return devices;
}

}  // namespace

std::span<const DeviceCeilings> KnownDevices() { return Table(); }

std::string DeviceFlag(const DeviceCeilings& device) {
  std::string flag;
  for (const char c : device.name) {
    flag += c == ' ' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return flag;
}

const DeviceCeilings* FindDevice(std::string_view flag) {
  for (const DeviceCeilings& device : Table()) {
    if (DeviceFlag(device) == flag) return &device;
  }
  return nullptr;
}

const DeviceCeilings& H200Ceilings() { return Table()[0]; }

}  // namespace fathom::model
