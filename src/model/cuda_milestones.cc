#include "model/cuda_milestones.h"

#include <fmt/format.h>

namespace fathom::model {

Result<CudaMilestones> CudaMilestones::Make(device::Device& device) {
  ASSIGN_OR_RETURN(device::Buffer word, device.AllocateHost(sizeof(uint32_t)));
  return CudaMilestones(std::move(word));
}

std::string CudaMilestones::LastBegun(int num_layers) const {
  const uint32_t value = *static_cast<const volatile uint32_t*>(word());
  if (value == 0) return "what is before the first layer";
  const int half = static_cast<int>(value) - 1, layer = half / 2;
  if (half % 2 == 0) return fmt::format("attention of layer {}", layer);
  return fmt::format("the experts of layer {}{}", layer,
                     layer + 1 == num_layers ? ", or what follows them" : "");
}

}  // namespace fathom::model
