// The CUDA side of rope.h: the angles of a step's tokens for both kinds of layers, made once a
// step. One cosine or sine is within two units in the last place of the exact one of fl32(position
// * f).
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
};

void Launch(const CudaRopeAnglesParams& params, device::Stream& stream);

}  // namespace fathom::kernels
