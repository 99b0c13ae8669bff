// DeviceCeilings: what a kind of device can hold and do, for the arithmetic of floors and memory
// plans. Values; any thread. `source` says where the figures come from: measured ones are what
// programs reached, the others a maker's.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace fathom::model {

struct DeviceCeilings {
  std::string name;    // as people write it: "H200"
  std::string source;  // of the figures, one line
  double memory_bytes = 0;
  double memory_bytes_per_s = 0;
  double fp8_flops = 0;
  double bf16_flops = 0;
  double link_bytes_per_s = 0;  // that a device takes from its peers
  // One exchange of a few KB inside a graph, between two devices and among more; 0: not known, and
  // left out of floors.
  double exchange_us_of_two = 0;
  double exchange_us_of_more = 0;

  double exchange_us(int num_ranks) const {
    return num_ranks <= 2 ? exchange_us_of_two : exchange_us_of_more;
  }
};

std::span<const DeviceCeilings> KnownDevices();
// By its flag's spelling: h200, b200, rtx-pro-6000. Null: not known.
const DeviceCeilings* FindDevice(std::string_view flag);
// "h200".
std::string DeviceFlag(const DeviceCeilings& device);

const DeviceCeilings& H200Ceilings();

}  // namespace fathom::model
