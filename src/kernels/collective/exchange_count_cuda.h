// How far a rank's exchanges have come, where the host can read it while they run: for exchanges
// that a library makes (comm/nccl_watch.h). One counter a rank, of its stream alone.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace fathom::kernels {

struct ExchangeCount {
  uint32_t* count = nullptr;  // on the GPU, 0 at first
  uint32_t* begun = nullptr;  // pinned: exchanges that have begun
  uint32_t* ended = nullptr;  // pinned: those before the last step's end
};

void LaunchBegin(const ExchangeCount& count, device::Stream& stream);
void LaunchEndStep(const ExchangeCount& count, device::Stream& stream);

}  // namespace fathom::kernels
