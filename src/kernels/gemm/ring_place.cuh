// A place in a ring of kStages stages in shared memory, as a warp of a weight stream goes round it:
// the stage, and the parity that its barriers have in this round. Each warp has its own. Device
// code only.
#pragma once

#include <cstdint>

namespace fathom::kernels {

template <int kStages>
struct RingPlace {
  int index = 0;
  uint32_t parity = 0;
  bool first_round = true;

  __device__ void Next() {
    if (++index == kStages) index = 0, parity ^= 1, first_round = false;
  }
  __device__ void Skip(int count) {
    for (int i = 0; i < count; ++i) Next();
  }
};

}  // namespace fathom::kernels
