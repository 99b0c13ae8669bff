// How the sums of a large product (gemm_large_sm90.cuh) leave the registers. In a quad of lanes
// each lane has two neighbouring columns of every eight; it trades them so that what it writes is
// 16 consecutive bytes. Device code only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/collective/peer_view.h"
#include "kernels/quantize/quantize.cuh"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

// Lane q of a quad gets the q-th word of each lane, in lane order.
__device__ inline void QuadTranspose(uint32_t (&v)[4]) {
  const bool odd = (threadIdx.x & 1) != 0, upper = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
    (odd ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + 2], 2);
    (upper ? v[i] : v[i + 2]) = got;
  }
}

// Four 8x8 matrices of 16-bit values, transposed; lane l names row l % 8 of matrix l / 8.
__device__ inline void StoreTransposed(uint32_t address, const uint32_t (&a)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
      : "memory");
}

__device__ inline float QuadMax(float x) { return WarpMax<4>(x); }

// mirrors: null for none; a constant, so that kernels without them do not ask.
template <typename Value>
__device__ inline void StoreMirrored(void* place, Value value, const Mirrors* mirrors) {
  *static_cast<Value*>(place) = value;
  if (mirrors == nullptr) return;
#pragma unroll 1
  for (int i = 0; i < mirrors->count; ++i) {
    *reinterpret_cast<Value*>(static_cast<std::byte*>(place) + mirrors->offsets[i]) = value;
  }
}

// One row's 128 columns of a thread's quad as BF16: sums d[4 j + first + {0, 1}]. `y`: column 0 of
// the row, 16-byte aligned; null: only take part.
__device__ inline void WriteBf16Row(const float (&d)[64], int first, __nv_bfloat16* y,
                                    const Mirrors* mirrors = nullptr) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    uint32_t v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = PackBf16(d[16 * c + 4 * j + first], d[16 * c + 4 * j + first + 1]);
    }
    QuadTranspose(v);
    if (y != nullptr) {
      StoreMirrored(y + c * 32 + threadIdx.x % 4 * 8, uint4{v[0], v[1], v[2], v[3]}, mirrors);
    }
  }
}

// Four chunks of 16 FP8 codes of a row, of which this thread has `codes`: word c is the codes of
// its columns of chunk c, {0, 1} low and {8, 9} high. Lane q gets chunk q.
__device__ inline uint4 CodeChunk(uint32_t (&codes)[4]) {
  QuadTranspose(codes);
  return {__byte_perm(codes[0], codes[1], 0x5410), __byte_perm(codes[2], codes[3], 0x5410),
          __byte_perm(codes[0], codes[1], 0x7632), __byte_perm(codes[2], codes[3], 0x7632)};
}

// 64 columns of a row, rounded to BF16 before, as FP8 codes with one scale. `token` -1: only take
// part. Values: v[2 j + {0, 1}] are this thread's columns of the j-th eight.
__device__ inline void WriteFp8Chunks(const float (&v)[16], float inverse, const Fp8Tiles& y,
                                      int64_t token, int64_t column, const Mirrors* mirrors) {
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* p = v + i * 4;
    codes[i] = Fp8Codes(p[0] * inverse, p[1] * inverse, p[2] * inverse, p[3] * inverse);
  }
  const uint4 chunk = CodeChunk(codes);
  if (token < 0) return;
  const int64_t at = column + threadIdx.x % 4 * 16;
  StoreMirrored(y.codes + Fp8TileOffset(token, at, y.row_groups), chunk, mirrors);
}

}  // namespace fathom::kernels
