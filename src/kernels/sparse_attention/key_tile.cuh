// The producer warpgroups of attention: fetch tiles of 64 keys, widen them to BF16 and lay them out
// in shared memory as 8 column blocks of [64 keys, 64 columns] in 128-byte swizzled rows, which
// serve as K and as V. Four threads fetch a key together. Device code only.
#pragma once

#include "kernels/sm90.cuh"
#include "kernels/sparse_attention/token_keys.cuh"

namespace fathom::kernels {

inline constexpr int kProducerThreads = 128;
inline constexpr int kColumnBlockBytes = kKeyTile * 128;
inline constexpr int kKeyTileBytes = 8 * kColumnBlockBytes;
inline constexpr int kProducerBarrier = 3;  // named

__device__ __forceinline__ void StoreShared(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// Where the 16-byte chunk of columns 8 * chunk .. 8 * chunk + 7 of a row lies in a tile.
__device__ __forceinline__ uint32_t ChunkOffset(uint32_t row, uint32_t chunk) {
  return (chunk / 8) * kColumnBlockBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

// Two e4m3 codes, in bytes 1 and 3, as BF16 numbers 2^120 too small: their bits are moved, no more.
__device__ __forceinline__ uint32_t PlaceCodes(uint32_t x) {
  return (x & 0x80008000u) | (x >> 4 & 0x07f007f0u);
}
__device__ __forceinline__ uint32_t MultiplyBf16(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// Four e4m3 codes as two BF16 pairs, times the factor (a pair of equal BF16 numbers).
__device__ __forceinline__ uint2 WidenCodes(uint32_t codes, uint32_t factor) {
  return {MultiplyBf16(PlaceCodes(__byte_perm(codes, 0, 0x1404)), factor),
          MultiplyBf16(PlaceCodes(__byte_perm(codes, 0, 0x3424)), factor)};
}
// 2^(scale - 127) * 2^120. A scale above 2^7 (entries beyond 57,344, which no norm lets through) is
// taken as 2^7.
__device__ __forceinline__ uint32_t WideningFactor(uint32_t scale) {
  return (min(scale, 134u) + 120) * 0x00800080u;
}

class KeyProducer {
 public:
  struct Shared {
    KeyBytes keys[2][kKeyTile];
  };

  // Tiles [first, end) of the token; `tiles` is the shared address of two tiles; thread < 128.
  __device__ KeyProducer(const TokenKeys& keys, int first, int end, uint32_t tiles, Shared& shared,
                         uint64_t* full, uint64_t* empty, uint32_t thread)
      : keys_(keys),
        first_(first),
        num_tiles_(end - first),
        tiles_(tiles),
        shared_(shared),
        full_(full),
        empty_(empty),
        thread_(thread) {}

  __device__ void Run() {
    int next_entry = Entry(0);
    Locate(0, next_entry);
    next_entry = Entry(1);
    for (int i = 0; i < num_tiles_; ++i) {
      NamedBarrier(kProducerBarrier, kProducerThreads);
      const KeyBytes* keys = shared_.keys[i % 2] + thread_ / 4;
      Fetch(keys[0], raw_[0], scales_[0]);
      Fetch(keys[32], raw_[1], scales_[1]);
      Locate(i + 1, next_entry);
      next_entry = Entry(i + 2);
      if (i >= 2) BarrierWait(empty_ + i % 2, (i / 2 - 1) % 2);
      const uint32_t tile = tiles_ + i % 2 * kKeyTileBytes;
      Place(keys[0], tile, raw_[0], scales_[0]);
      Place(keys[32], tile + 32 * 128, raw_[1], scales_[1]);
      asm volatile("cp.async.wait_all;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      BarrierArrive(full_ + i % 2);
    }
  }

 private:
  static constexpr int kFp8Chunks = 7;  // of a thread: 16 codes each, then two of 8 BF16 values
  static constexpr int kChunks = 9;

  __device__ int Key(int tile) const { return (first_ + tile) * kKeyTile + thread_; }
  __device__ int Entry(int tile) const { return thread_ < kKeyTile ? keys_.Entry(Key(tile)) : 0; }
  __device__ void Locate(int tile, int entry) const {
    if (thread_ < kKeyTile) shared_.keys[tile % 2][thread_] = keys_.Bytes(Key(tile), entry);
  }

  // The thread's chunks 4 n + thread % 4: n is the block of 64 that has one scale. Zero past the
  // last key and for rows of `fresh`, which are copied whole.
  __device__ void Fetch(const KeyBytes& key, uint4 (&raw)[kChunks], uint2& scales) const {
    scales = {0, 0};
#pragma unroll
    for (uint4& chunk : raw) chunk = {0, 0, 0, 0};
    if (key.scales == nullptr) return;
    scales = __ldg(reinterpret_cast<const uint2*>(key.scales));
    const auto* data = reinterpret_cast<const uint4*>(key.data) + thread_ % 4;
#pragma unroll
    for (int n = 0; n < kChunks; ++n) raw[n] = __ldg(data + 4 * n);
  }

  // `tile` is the tile's address, or that of the row 32 below it: rows are swizzled alike.
  __device__ void Place(const KeyBytes& key, uint32_t tile, const uint4 (&raw)[kChunks],
                        uint2 scales) const {
    const uint32_t row = thread_ / 4, lane = thread_ % 4;
    if (key.scales == nullptr && key.data != nullptr) return CopyRow(tile, key.data);
    const uint32_t low_half = tile + ChunkOffset(row, 2 * lane);
    const uint32_t high_half = tile + ChunkOffset(row, 2 * lane + 1);
#pragma unroll
    for (int n = 0; n < kFp8Chunks; ++n) {
      const uint32_t scale = (n < 4 ? scales.x >> (8 * n) : scales.y >> (8 * (n - 4))) & 0xff;
      const uint32_t factor = WideningFactor(scale);
      const uint2 a = WidenCodes(raw[n].x, factor), b = WidenCodes(raw[n].y, factor);
      const uint2 c = WidenCodes(raw[n].z, factor), d = WidenCodes(raw[n].w, factor);
      StoreShared(low_half + n * kColumnBlockBytes, {a.x, a.y, b.x, b.y});
      StoreShared(high_half + n * kColumnBlockBytes, {c.x, c.y, d.x, d.y});
    }
    StoreShared(tile + ChunkOffset(row, 56 + lane), raw[7]);
    StoreShared(tile + ChunkOffset(row, 60 + lane), raw[8]);
  }

  __device__ void CopyRow(uint32_t tile, const uint8_t* data) const {
    const uint32_t row = thread_ / 4, lane = thread_ % 4;
#pragma unroll
    for (uint32_t n = 0; n < 16; ++n) {
      asm volatile(
          "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(tile + ChunkOffset(row, 4 * n + lane)),
          "l"(data + (4 * n + lane) * 16)
          : "memory");
    }
  }

  const TokenKeys& keys_;
  int first_;
  int num_tiles_;
  uint32_t tiles_;
  Shared& shared_;
  uint64_t* full_;
  uint64_t* empty_;
  uint32_t thread_;
  uint4 raw_[2][kChunks];
  uint2 scales_[2];
};

}  // namespace fathom::kernels
