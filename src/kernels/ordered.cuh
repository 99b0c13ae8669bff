// Floats as integers that sort alike. Device code only.
#pragma once

#include <cstdint>

namespace fathom::kernels {

// NaN included; -0 is 0; 0 for no number.
__device__ __forceinline__ uint32_t OrderedKey(float x) {
  const uint32_t u = __float_as_uint(x + 0.0f);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float FromOrderedKey(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

}  // namespace fathom::kernels
