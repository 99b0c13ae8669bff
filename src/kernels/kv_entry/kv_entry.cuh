// Where a cache entry lies, and one pair of values per lane stored as part of an entry. The device
// side of kv_entry.h for official numerics: head_dim 512, rotary 64. Device code only.
#pragma once

#include "kernels/kv_entry/kv_entry.h"
#include "kernels/quantize/quantize.cuh"

namespace fathom::kernels {

inline constexpr int kHeadDim = 512;
inline constexpr int kRopeDim = 64;
inline constexpr int kNumFp8 = kHeadDim - kRopeDim;
inline constexpr int kKvDataBytes = kHeadDim + kRopeDim;
inline constexpr int kIndexDim = 128;
// An entry of the step's own, data and scales together, has a row of this length.
inline constexpr int kFreshRowBytes = 2 * kHeadDim;

struct DeviceEntry {
  uint8_t* data = nullptr;
  uint8_t* scales = nullptr;
};

__device__ __forceinline__ DeviceEntry EntryAt(const PagedEntries& e, int32_t page, int entry) {
  auto* base = reinterpret_cast<uint8_t*>(e.pool) + page * e.page_bytes + e.layer_offset;
  return {base + int64_t{entry} * e.data_bytes,
          base + int64_t{e.entries_per_page} * e.data_bytes + int64_t{entry} * e.scale_bytes};
}

// What a KV entry holds of values 2 * i and 2 * i + 1, already rounded to BF16; thread i of 256
// calls it. FP8 codes with their block's scale, or BF16.
struct KvPair {
  uint32_t bits, scale;
};
__device__ __forceinline__ KvPair EncodeKvPair(float2 x, int i) {
  if (i >= kNumFp8 / 2) return {PackBf16(x.x, x.y), 0};
  const uint32_t scale = Fp8Scale(WarpMax(fmaxf(fabsf(x.x), fabsf(x.y))));
  const float inverse = Ue8m0Inverse(scale);
  return {Fp8Codes(x.x * inverse, x.y * inverse), scale};
}
__device__ __forceinline__ void StoreKvPair(KvPair pair, int i, DeviceEntry entry) {
  if (i >= kNumFp8 / 2) {
    reinterpret_cast<uint32_t*>(entry.data + kNumFp8)[i - kNumFp8 / 2] = pair.bits;
  } else {
    reinterpret_cast<uint16_t*>(entry.data)[i] = static_cast<uint16_t>(pair.bits);
  }
  if (i % 32 == 0) entry.scales[i / 32] = static_cast<uint8_t>(pair.scale);
}

// One warp stores an index key; lane l holds values 4 * l .. 4 * l + 3.
__device__ __forceinline__ void StoreIndexKeyWarp(const float (&x)[4], int lane,
                                                  config::IndexKeyDType dtype, DeviceEntry entry) {
  const float max = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
  if (dtype == config::IndexKeyDType::kFp4) {
    const uint32_t scale = Fp4Scale(WarpMax<8>(max));
    const float inverse = Ue8m0Inverse(scale);
    uint32_t codes = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) codes |= Fp4Code(x[k] * inverse) << (4 * k);
    reinterpret_cast<uint16_t*>(entry.data)[lane] = static_cast<uint16_t>(codes);
    if (lane % 8 == 0) entry.scales[lane / 8] = static_cast<uint8_t>(scale);
  } else {
    const uint32_t scale = Fp8Scale(WarpMax(max));
    const float inverse = Ue8m0Inverse(scale);
    reinterpret_cast<uint32_t*>(entry.data)[lane] =
        Fp8Codes(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
    if (lane == 0) *reinterpret_cast<float*>(entry.scales) = Ue8m0Value(scale);
  }
}

}  // namespace fathom::kernels
