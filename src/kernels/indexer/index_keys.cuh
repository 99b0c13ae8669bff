// Index keys on their way to the tensor cores: a warpgroup fetches a tile of 64 keys into registers
// and writes them to shared memory as FP8 codes with one scale a key, which is exact
// (indexer_cuda.h). Device code only.
#pragma once

#include "kernels/indexer/index_query.cuh"
#include "kernels/kv_entry/kv_entry.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kIndexTile = 64;  // keys, a page of them
inline constexpr int kIndexTileBytes = kIndexTile * kIndexDim;

// FP4 codes 0..7 times 2^(kFoldTop - distance) as FP8 codes, one a byte; distance < kFoldTable.
inline constexpr int kFoldTable = 32;
__device__ __forceinline__ uint2 FoldedCodes(int distance) {
  return Fp4CodesAsFp8(exp2f(static_cast<float>(kFoldTop - distance)));
}

// Four FP4 codes (16 bits) as FP8 codes of a block's table.
__device__ __forceinline__ uint32_t WidenFp4(uint32_t codes, uint2 table) {
  const uint32_t magnitude = __byte_perm(table.x, table.y, codes & 0x7777u);
  // Selectors with bit 3 set spread the chosen byte's sign: 0xff where negative, 0x80 elsewhere.
  uint32_t sign;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(sign) : "r"(0x80808080u), "r"(codes));
  return magnitude | (sign << 1 & 0x80808080u);
}

__device__ __forceinline__ uint32_t MaxByte(uint32_t x) {
  const uint32_t pairs = __vmaxu4(x, x >> 16);
  return __vmaxu4(pairs, pairs >> 8) & 0xffu;
}

// A warpgroup's keys, two threads a key: fetched ahead into registers, then widened.
template <config::IndexKeyDType kType>
struct IndexKeyFetch {
  static constexpr bool kFp4 = kType == config::IndexKeyDType::kFp4;
  static constexpr int kChunks = kFp4 ? 2 : 4;
  uint4 raw[kChunks];
  uint32_t scale = 0;

  __device__ void Load(const PagedEntries& keys, int32_t page, int thread) {
    const DeviceEntry entry = EntryAt(keys, page, thread / 2);
    const auto* data = reinterpret_cast<const uint4*>(entry.data) + thread % 2 * kChunks;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) raw[i] = __ldg(data + i);
    scale = __ldg(reinterpret_cast<const uint32_t*>(entry.scales));
  }

  // Writes the thread's 64 values of key thread / 2; returns the key's scale.
  __device__ float Widen(uint32_t tile, const uint2* fold_table, int thread) const {
    const uint32_t row = thread / 2, half = thread % 2;
    tile += row * 128;
    if constexpr (!kFp4) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        StoreShared(tile + ((half * 4 + i) ^ (row % 8)) * 16, raw[i]);
      return __uint_as_float(scale);
    } else {
      const uint32_t top = MaxByte(scale);
      const uint32_t mine = half == 0 ? scale : scale >> 16;
#pragma unroll
      for (uint32_t b = 0; b < 2; ++b) {
        const uint32_t distance = top - ((mine >> (8 * b)) & 0xffu);
        const uint2 table = fold_table[min(distance, kFoldTable - 1u)];
        const uint32_t words[4] = {raw[b].x, raw[b].y, raw[b].z, raw[b].w};
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          const uint4 out{WidenFp4(words[2 * i], table), WidenFp4(words[2 * i] >> 16, table),
                          WidenFp4(words[2 * i + 1], table),
                          WidenFp4(words[2 * i + 1] >> 16, table)};
          StoreShared(tile + ((half * 4 + b * 2 + i) ^ (row % 8)) * 16, out);
        }
      }
      return __uint_as_float(top << 23) * (1.0f / (1 << kFoldTop));
    }
  }
};

}  // namespace fathom::kernels
