// The producer warpgroup of attention: fetches tiles of 64 keys, widens them to BF16 and lays them
// out in shared memory as 8 column blocks of [64 keys, 64 columns] in 128-byte swizzled rows, which
// serve as K and as V. Eight threads fetch a key together. Device code only.
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

// Four e4m3 codes times 2^(scale - 127) as two BF16 pairs, exactly. The bits of a code are those of
// a BF16 number 2^120 too small.
__device__ __forceinline__ uint2 WidenCodes(uint32_t codes, uint32_t scale) {
  const uint32_t low = __byte_perm(codes, 0, 0x1404), high = __byte_perm(codes, 0, 0x3424);
  const auto place = [](uint32_t x) { return (x & 0x80008000u) | (x >> 4 & 0x07f007f0u); };
  if (scale > 134) {  // 2^120 times the scale is no BF16 number
    const float2 a = Fp8Values(codes & 0xffffu), b = Fp8Values(codes >> 16);
    const float s = Ue8m0Value(scale);
    return {PackBf16(a.x * s, a.y * s), PackBf16(b.x * s, b.y * s)};
  }
  const uint32_t factor = (scale + 120) << 7;
  const uint32_t factors = factor | factor << 16;
  uint2 out;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(out.x) : "r"(place(low)), "r"(factors));
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(out.y) : "r"(place(high)), "r"(factors));
  return out;
}

class KeyProducer {
 public:
  struct Shared {
    KeyBytes keys[2][kKeyTile];
  };

  // Tiles [first, end) of the token; `tiles` is the shared address of two tiles; thread < 128.
  __device__ KeyProducer(const TokenKeys& keys, int first, int end, uint32_t tiles, Shared& shared,
                         uint64_t* full, uint64_t* empty, int thread)
      : keys_(keys),
        first_(first),
        num_tiles_(end - first),
        tiles_(tiles),
        shared_(shared),
        full_(full),
        empty_(empty),
        thread_(static_cast<uint32_t>(thread)),
        lane_(thread_ % 8) {
    const uint32_t row = thread_ / 8, swap = lane_ / 4;
    first_offset_ = ChunkOffset(row, 2 * lane_ + swap);
    second_offset_ = ChunkOffset(row, 2 * lane_ + 1 - swap);
    bf16_offset_ = ChunkOffset(row, 52 + lane_);
  }

  __device__ void Run() {
    int next_entry = Entry(0);
    Locate(0, next_entry);
    next_entry = Entry(1);
    for (int i = 0; i < num_tiles_; ++i) {
      NamedBarrier(kProducerBarrier, kProducerThreads);
      Fetch(i);
      Locate(i + 1, next_entry);
      next_entry = Entry(i + 2);
      if (i >= 2) BarrierWait(empty_ + i % 2, (i / 2 - 1) % 2);
      Widen(tiles_ + i % 2 * kKeyTileBytes, shared_.keys[i % 2]);
      asm volatile("cp.async.wait_all;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      BarrierArrive(full_ + i % 2);
    }
  }

 private:
  static constexpr int kPasses = 4;      // 16 keys each

  __device__ int Key(int tile) const { return (first_ + tile) * kKeyTile + thread_; }
  __device__ int Entry(int tile) const { return thread_ < kKeyTile ? keys_.Entry(Key(tile)) : 0; }
  __device__ void Locate(int tile, int entry) const {
    if (thread_ < kKeyTile) shared_.keys[tile % 2][thread_] = keys_.Bytes(Key(tile), entry);
  }

  __device__ void Fetch(int tile) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const KeyBytes key = shared_.keys[tile % 2][pass * 16 + thread_ / 8];
      scales_[pass] = uint2{0, 0};
      if (key.scales != nullptr) scales_[pass] = __ldg(reinterpret_cast<const uint2*>(key.scales));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        raw_[pass][n] = LoadChunk(key, 8 * n + lane_);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tail_[half] = LoadChunk(shared_.keys[tile % 2][half * 32 + thread_ / 4], 32 + thread_ % 4);
    }
  }

  __device__ void Widen(uint32_t tile, const KeyBytes* keys) const {
WidenPass<0>(tile, keys);
    WidenPass<1>(tile, keys);
    WidenPass<2>(tile, keys);
    WidenPass<3>(tile, keys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 32 + thread_ / 4;
      if (!IsFresh(keys[row])) {
        StoreShared(tile + ChunkOffset(row, 60 + thread_ % 4), tail_[half]);
      }
    }
  }

  __device__ static bool IsFresh(const KeyBytes& key) {
    return key.scales == nullptr && key.data != nullptr;
  }
  // Zero past the last key and for rows of `fresh`, which are copied whole.
  __device__ static uint4 LoadChunk(const KeyBytes& key, int chunk) {
    if (key.scales == nullptr) return {0, 0, 0, 0};
    return __ldg(reinterpret_cast<const uint4*>(key.data) + chunk);
  }

  // Chunk 8 * n + thread % 8 of key 16 * pass + thread / 8.
  template <int kPass, int kN>
  __device__ void WidenChunk(uint32_t tile) const {
    const uint4 raw = raw_[kPass][kN];
    tile += kPass * 16 * 128;
    if (kN == 3 && lane_ >= 4) return StoreShared(tile + bf16_offset_, raw);
    // Columns of 4 * n .. 4 * n + 3 chunks share two scales.
    const uint32_t pair = (kN < 2 ? scales_[kPass].x : scales_[kPass].y) >> (kN % 2 * 16);
    const uint32_t scale = (lane_ < 4 ? pair : pair >> 8) & 0xff;
    const uint2 a = WidenCodes(raw.x, scale), b = WidenCodes(raw.y, scale);
    const uint2 c = WidenCodes(raw.z, scale), d = WidenCodes(raw.w, scale);
    const uint4 low{a.x, a.y, b.x, b.y}, high{c.x, c.y, d.x, d.y};
    // Neighbours store their halves in opposite order, so that eight threads fill all banks.
    const bool swap = lane_ >= 4;
    tile += kN * 2 * kColumnBlockBytes;
    StoreShared(tile + first_offset_, swap ? high : low);
    StoreShared(tile + second_offset_, swap ? low : high);
  }
  template <int kPass>
  __device__ void WidenPass(uint32_t tile, const KeyBytes* keys) const {
    const uint32_t row = kPass * 16 + thread_ / 8;
    const KeyBytes key = keys[row];
    if (IsFresh(key)) return CopyRow(tile, row, key.data);
    WidenChunk<kPass, 0>(tile);
    WidenChunk<kPass, 1>(tile);
    WidenChunk<kPass, 2>(tile);
    WidenChunk<kPass, 3>(tile);
  }

  __device__ void CopyRow(uint32_t tile, int row, const uint8_t* data) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int chunk = 8 * n + lane_;
      asm volatile(
          "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(tile + ChunkOffset(row, chunk)),
          "l"(data + chunk * 16)
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
  uint32_t lane_;  // of the eight
  uint32_t first_offset_, second_offset_, bf16_offset_;
  uint4 raw_[kPasses][4];
  uint4 tail_[2];  // the last four chunks of each key, four threads a key
  uint2 scales_[kPasses];
};

}  // namespace fathom::kernels
