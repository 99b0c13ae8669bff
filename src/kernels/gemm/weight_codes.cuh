// Weights' codes as values that the tensor cores take, in registers. Device code only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace fathom::kernels {

// Two of the four FP8 codes of a kFp8AsBf16 tile's word times a scale, as BF16. Each half of the
// word holds one of the first two where BF16 wants its bits, sign 15 and the others 10 to 4, and
// around it one of the second two: its highest three bits below the sign in 14 to 12, the sign in
// 11, the others in 3 to 0. WideScale(scale) is what it takes: a code's bits stand for
// value * 2^-120 as BF16 bits.
__device__ inline __nv_bfloat162 WideScale(float scale) {
  return __float2bfloat162_rn(scale * 0x1p60f * 0x1p60f);
}
template <int kSecond>
__device__ inline uint32_t WidenFp8(uint32_t word, __nv_bfloat162 scale) {
  const uint32_t bits =
      kSecond == 0 ? word & 0x87f087f0u : (word << 4 & 0x80f080f0u) | (word >> 4 & 0x07000700u);
  const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), scale);
  return *reinterpret_cast<const uint32_t*>(&value);
}

// Bytes of {low, high} named by the four low nibbles of `nibbles`, below 8 each. As an instruction:
// of __byte_perm's arguments the compiler makes more of them than it takes.
__device__ inline uint32_t SelectBytes(uint32_t low, uint32_t high, uint32_t nibbles) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(nibbles));
  return bytes;
}

// Eight FP4 codes of a kFp4 tile to two registers of e4m3 codes. low, high: the e4m3 codes of the
// eight FP4 magnitudes, or of a multiple of them.
__device__ inline void ExpandFp4(uint32_t word, uint32_t low, uint32_t high, uint32_t& first,
                                 uint32_t& second) {
  const uint32_t magnitudes = word & 0x77777777u;
  first = SelectBytes(low, high, magnitudes) | (word & 0x80808080u);
  second = SelectBytes(low, high, magnitudes >> 16) | ((word << 4) & 0x80808080u);
}
__device__ inline void ExpandFp4(uint32_t word, uint32_t& first, uint32_t& second) {
  ExpandFp4(word, 0x3c383000u, 0x4c484440u, first, second);
}

}  // namespace fathom::kernels
