// How keys lie in shared memory for attention: tiles, of 64 but where another number is named, as 8
// column blocks of [64 keys, 64 columns] in 128-byte swizzled rows of BF16, which serve as K and as
// V; and the way there: four threads fetch a key's bytes together and widen them. Device code only.
#pragma once

#include "kernels/sm90.cuh"
#include "kernels/sparse_attention/head_rows.cuh"
#include "kernels/sparse_attention/token_keys.cuh"

namespace fathom::kernels {

inline constexpr int kColumnBlockBytes = kKeyTile * 128;
inline constexpr int kKeyTileBytes = 8 * kColumnBlockBytes;

// Where the 16-byte chunk of columns 8 * chunk .. 8 * chunk + 7 of a row lies in a tile.
template <int kKeys = kKeyTile>
__device__ __forceinline__ uint32_t ChunkOffset(uint32_t row, uint32_t chunk) {
  return (chunk / 8) * (kKeys * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

// Two e4m3 codes, in bytes 0 and 2, as BF16 numbers 2^120 too small: their bits are moved, no more,
// the sign from bit 7 by way of bit 11 to bit 15. Multiplied and added, not masked, as the pipe of
// masks has more to do.
__device__ __forceinline__ uint32_t PlaceCodes(uint32_t x) {
  return x * 16 + (x & 0x00800080u) * 240;
}
// Four e4m3 codes as two BF16 pairs, times the factor (a pair of equal BF16 numbers).
__device__ __forceinline__ uint2 WidenCodes(uint32_t codes, uint32_t factor) {
  return {MultiplyBf16(PlaceCodes(__byte_perm(codes, 0, 0x4140)), factor),
          MultiplyBf16(PlaceCodes(__byte_perm(codes, 0, 0x4342)), factor)};
}
// 2^(scale - 127) * 2^120. A scale above 2^7 (entries beyond 57,344, which no norm lets through) is
// taken as 2^7.
__device__ __forceinline__ uint32_t WideningFactor(uint32_t scale) {
  return (min(scale, 134u) + 120) * 0x00800080u;
}

// The scale's factor of FP8 columns 64 n ..
__device__ __forceinline__ uint32_t FactorOf(uint2 scales, int n) {
  return WideningFactor((n < 4 ? scales.x >> (8 * n) : scales.y >> (8 * (n - 4))) & 0xff);
}

// 16 codes that share a scale.
struct WideCodes {
  uint4 low, high;

  __device__ __forceinline__ WideCodes(const uint4& codes, uint32_t factor) {
    const uint2 a = WidenCodes(codes.x, factor), b = WidenCodes(codes.y, factor);
    const uint2 c = WidenCodes(codes.z, factor), d = WidenCodes(codes.w, factor);
    low = {a.x, a.y, b.x, b.y}, high = {c.x, c.y, d.x, d.y};
  }
};

// A quarter of a key: of each 64 FP8 columns, which share a scale, 16, and 16 of the BF16 columns.
class KeyRow {
 public:
  // Zero past the last key. `lane` < 4.
  __device__ void Fetch(const KeyBytes& key, uint32_t lane) {
    scales_ = {0, 0};
#pragma unroll
    for (uint4& chunk : raw_) chunk = {0, 0, 0, 0};
    if (key.data == nullptr) return;
    scales_ = __ldg(reinterpret_cast<const uint2*>(key.scales));
    const auto* data = reinterpret_cast<const uint4*>(key.data) + lane;
#pragma unroll
    for (int n = 0; n < kChunks; ++n) raw_[n] = __ldg(data + 4 * n);
  }

  // Widens into a row of 512 values.
  __device__ void Write(uint4* row, uint32_t lane) const {
#pragma unroll
    for (int n = 0; n < kFp8Chunks; ++n) {
      const WideCodes wide(raw_[n], FactorOf(scales_, n));
      row[8 * n + 2 * lane] = wide.low, row[8 * n + 2 * lane + 1] = wide.high;
    }
    row[56 + lane] = raw_[7], row[60 + lane] = raw_[8];
  }
  // Widens into row `row` of the tile at the shared address `tile`.
  template <int kKeys = kKeyTile>
  __device__ void Place(uint32_t tile, uint32_t row, uint32_t lane) const {
    PlaceEach<kKeys>(tile, row, lane, [](int /*chunk*/) {});
  }
  // Likewise, while `next`, which exists, is fetched in its place.
  __device__ void PlaceAndFetch(uint32_t tile, uint32_t row, const KeyBytes& next, uint32_t lane) {
    const uint2 next_scales = __ldg(reinterpret_cast<const uint2*>(next.scales));
    const auto* data = reinterpret_cast<const uint4*>(next.data) + lane;
    PlaceEach<kKeyTile>(tile, row, lane, [&](int n) { raw_[n] = __ldg(data + 4 * n); });
    scales_ = next_scales;
  }

 private:
  static constexpr int kFp8Chunks = 7;  // 16 codes each, then two of 8 BF16 values
  static constexpr int kChunks = 9;

  // then(n): behind chunk n.
  template <int kKeys, typename Then>
  __device__ __forceinline__ void PlaceEach(uint32_t tile, uint32_t row, uint32_t lane,
                                            const Then& then) const {
    const uint32_t low_half = tile + ChunkOffset<kKeys>(row, 2 * lane);
    const uint32_t high_half = tile + ChunkOffset<kKeys>(row, 2 * lane + 1);
#pragma unroll
    for (int n = 0; n < kFp8Chunks; ++n) {
      const WideCodes wide(raw_[n], FactorOf(scales_, n));
      StoreShared(low_half + n * (kKeys * 128), wide.low);
      StoreShared(high_half + n * (kKeys * 128), wide.high);
      then(n);
    }
    StoreShared(tile + ChunkOffset<kKeys>(row, 56 + lane), raw_[7]);
    then(7);
    StoreShared(tile + ChunkOffset<kKeys>(row, 60 + lane), raw_[8]);
    then(8);
  }

  uint4 raw_[kChunks];
  uint2 scales_;
};

}  // namespace fathom::kernels
