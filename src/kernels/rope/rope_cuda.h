// The CUDA side of rope.h: the angles of a step's tokens for both kinds of layers, made once a
// step. One cosine or sine is within two units in the last place of the exact one of fl32(position
// * f). As a step's first launch it makes the step's number.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace fathom::kernels {

// Device memory. A padding token's row is written, too (its position is read).
struct CudaRopeAnglesParams {
  const int32_t* positions = nullptr;  // [num_tokens]
  int num_tokens = 0;
  const float* frequencies_plain = nullptr;       // [32]
  const float* frequencies_compressed = nullptr;  // [32]
  float* angles_plain = nullptr;                  // [num_tokens, 64]: cosine, sine, ...
  float* angles_compressed = nullptr;             // likewise
  // LaunchNumber::of_step, and of how many launches; null: no launch has a number.
  uint32_t* number = nullptr;
  uint32_t num_numbers = 0;
};

void Launch(const CudaRopeAnglesParams& params, device::Stream& stream);

}  // namespace fathom::kernels
