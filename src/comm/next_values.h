// The next inputs of a long chain of sums, on a GPU and on the host: each depends on a sum before,
// so that one wrong value anywhere is seen at the end. Tests only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/device.h"

namespace fathom::comm {

// BF16 holds the value exactly.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline float NextValue(uint32_t sum_bits, int64_t i, int rank) {
  const uint32_t mixed = (sum_bits * 2654435761u) ^ (static_cast<uint32_t>(i) * 40503u) ^
                         (static_cast<uint32_t>(rank) * 2246822519u);
  return (static_cast<float>(mixed >> 13 & 0xffu) - 128.0f) / 64.0f;
}

// values[i] = NextValue(the bits of sums[i], i, rank).
void LaunchNextValues(const __nv_bfloat16* sums, int64_t count, int rank, __nv_bfloat16* values,
                      device::Stream& stream);

}  // namespace fathom::comm
