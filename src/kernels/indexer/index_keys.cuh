// Index keys on their way to the tensor cores: a tile of 64 as FP8 codes with one scale a key,
// which is exact (indexer_cuda.h). A warpgroup fetches them into registers and writes them to
// shared memory; or makes operands of a copied page. Device code only.
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

// As __byte_perm, for selectors below 8, which that one makes sure of.
__device__ __forceinline__ uint32_t SelectBytes(uint2 from, uint32_t selectors) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(from.x), "r"(from.y), "r"(selectors));
  return bytes;
}

// Eight FP4 codes as FP8 codes of a block's table, four a word.
__device__ __forceinline__ uint2 WidenFp4(uint32_t codes, uint2 table) {
  const uint32_t magnitudes = codes & 0x77777777u;
  const uint2 signs{codes << 4, codes};  // the tops of their bytes: of every second code
  const uint32_t first = SelectBytes(signs, 0x5140), last = SelectBytes(signs, 0x7362);
  return {SelectBytes(table, magnitudes) | (first & 0x80808080u),
          SelectBytes(table, magnitudes >> 16) | (last & 0x80808080u)};
}

__device__ __forceinline__ uint32_t MaxByte(uint32_t x) {
  const uint32_t pairs = __vmaxu4(x, x >> 16);
  return __vmaxu4(pairs, pairs >> 8) & 0xffu;
}

__device__ inline void StoreShared(uint32_t address, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
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
    const auto store = [&](uint32_t chunk, uint32_t first, uint32_t second) {
      StoreShared(tile + (chunk ^ (row % 8)) * 16 + half * 8, uint2{first, second});
    };
    if constexpr (!kFp4) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        store(i * 4, raw[i].x, raw[2 + i].x), store(i * 4 + 1, raw[i].y, raw[2 + i].y);
        store(i * 4 + 2, raw[i].z, raw[2 + i].z), store(i * 4 + 3, raw[i].w, raw[2 + i].w);
      }
      return __uint_as_float(scale);
    } else {
      const uint32_t top = MaxByte(scale);
      const uint32_t mine = half == 0 ? scale : scale >> 16;
      const auto table = [&](uint32_t block) {
        const uint32_t distance = top - ((mine >> (8 * block)) & 0xffu);
        return fold_table[min(distance, kFoldTable - 1u)];
      };
      const uint2 first = table(0), second = table(1);
      const uint32_t words[2][4] = {{raw[0].x, raw[0].y, raw[0].z, raw[0].w},
                                    {raw[1].x, raw[1].y, raw[1].z, raw[1].w}};
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint2 a = WidenFp4(words[0][i], first), b = WidenFp4(words[1][i], second);
        store(2 * i, a.x, b.x), store(2 * i + 1, a.y, b.y);
      }
      return __uint_as_float(top << 23) * (1.0f / (1 << kFoldTop));
    }
  }
};

inline constexpr int IndexPageBytes(config::IndexKeyDType type) {
  return kIndexTile * (type == config::IndexKeyDType::kFp4 ? kIndexDim / 2 : kIndexDim) +
         kIndexTile * 4;
}

// Two of a page's keys in shared memory, `row` and row + 8, as a thread of wgmma has them: 32 codes
// of each, the quad-th, as operands of the four products of 32.
template <config::IndexKeyDType kType>
struct IndexKeyRows {
  uint32_t a[4][4];
  float scale;  // of row + 8 * (quad % 2)

  __device__ void Load(const uint8_t* page, const uint2* fold_table, int row, int quad) {
    if constexpr (kType == config::IndexKeyDType::kFp8) {
      const auto* codes = reinterpret_cast<const uint4*>(page + row * kIndexDim + quad * 32);
      const uint4 raw[2][2] = {{codes[0], codes[1]},
                               {codes[kIndexDim / 2], codes[kIndexDim / 2 + 1]}};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[2 * i][r] = raw[r][i].x, a[2 * i][2 + r] = raw[r][i].y;
          a[2 * i + 1][r] = raw[r][i].z, a[2 * i + 1][2 + r] = raw[r][i].w;
        }
      }
      const auto* scales = reinterpret_cast<const float*>(page + kIndexTile * kIndexDim);
      scale = scales[row + quad % 2 * 8];
    } else {
      const auto* codes = reinterpret_cast<const uint4*>(page + row * (kIndexDim / 2)) + quad;
      const uint4 raw[2] = {codes[0], codes[8 * kIndexDim / 2 / 16]};
      const auto* scales =
          reinterpret_cast<const uint32_t*>(page + kIndexTile * (kIndexDim / 2)) + row;
      // Bytes 1 and 3 of a word: a scale of each row.
      const uint32_t row_scales[2] = {scales[0], scales[8]};
      const auto both = [&](uint32_t block) {
        return __byte_perm(row_scales[0], row_scales[1], (4 + block) << 12 | block << 4);
      };
      const uint32_t top =
          __vmaxu2(__vmaxu2(both(0), both(1)), __vmaxu2(both(2), both(3))) & 0xff00ff00u;
      const uint32_t distance =
          __vminu2(top - (both(quad) & 0xff00ff00u), (kFoldTable - 1) * 0x01000100u);
      const uint2 tables[2] = {fold_table[distance >> 8 & 0xffu], fold_table[distance >> 24]};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t words[4] = {raw[r].x, raw[r].y, raw[r].z, raw[r].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint2 codes = WidenFp4(words[i], tables[r]);
          a[i][r] = codes.x, a[i][2 + r] = codes.y;
        }
      }
      const uint32_t mine = quad % 2 == 0 ? top << 16 : top;
      scale = __uint_as_float(mine >> 1 & 0x7f800000u) * (1.0f / (1 << kFoldTop));
    }
  }
  // Here the operands are complete: the compiler puts nothing of them off.
  __device__ void Keep() {
#pragma unroll
    for (uint32_t (&row)[4] : a) {
      asm volatile("" : "+r"(row[0]), "+r"(row[1]), "+r"(row[2]), "+r"(row[3]));
    }
  }
};

}  // namespace fathom::kernels
