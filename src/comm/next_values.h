// The next inputs of a long chain of gathers, on a GPU and on the host: each depends on values of
// all ranks before, so that one wrong value anywhere is seen at the end. Tests only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/device.h"

namespace fathom::comm {

// The bits of value i of [tokens, hidden], of the values [tokens_before, hidden] before: its
// token's (of fewer: another one's) neighbours on both sides, in a circle.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline uint16_t NextValue(const uint16_t* before, int64_t i, int64_t hidden,
                              int64_t tokens_before) {
  const int64_t token = i / hidden, column = i % hidden;
  const uint16_t* const row = before + (token < tokens_before ? token : 0) * hidden;
  const uint32_t left = row[(column + hidden - 1) % hidden], right = row[(column + 1) % hidden];
  const uint32_t mixed =
      (left * 2654435761u) ^ (right * 2246822519u) ^ (static_cast<uint32_t>(i) * 40503u);
  return static_cast<uint16_t>(mixed >> 13);
}

// Columns [begin, end) of the tokens of `values`.
void LaunchNextValues(const __nv_bfloat16* before, __nv_bfloat16* values, int64_t hidden,
                      int64_t tokens_before, int64_t tokens, int64_t begin, int64_t end,
                      device::Stream& stream);

}  // namespace fathom::comm
