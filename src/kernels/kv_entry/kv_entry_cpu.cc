#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/kv_entry/kv_entry.h"
#include "kernels/quantize/quantize.h"
#include "kernels/simd/simd.h"

namespace fathom::kernels {
namespace {

using config::IndexKeyDType;

uint8_t* Bytes(std::byte* p) { return reinterpret_cast<uint8_t*>(p); }

}  // namespace

template <>
void StoreKvEntry<BFloat16>(const float* values, int head_dim, int rope_dim, EntrySlot slot) {
  const int num_fp8 = head_dim - rope_dim;
  int block = 0;
  for (int i = 0; i < num_fp8; i += kKvEntryBlock, ++block) {
    Bytes(slot.scales)[block] = QuantizeFp8(values + i, kKvEntryBlock, Bytes(slot.data) + i);
  }
  for (; block % 8 != 0; ++block) slot.scales[block] = std::byte{0};
  for (int i = 0; i < rope_dim; ++i) {
    const BFloat16 value(values[num_fp8 + i]);
    std::memcpy(slot.data + num_fp8 + i * 2, &value, sizeof(value));
  }
}

template <>
void StoreKvEntry<float>(const float* values, int head_dim, int, EntrySlot slot) {
  std::memcpy(slot.data, values, static_cast<size_t>(head_dim) * sizeof(float));
}

template <>
void LoadKvEntry<BFloat16>(EntrySlot slot, int head_dim, int rope_dim, float* values) {
  const int num_fp8 = head_dim - rope_dim;
  for (int i = 0; i < num_fp8; i += kKvEntryBlock) {
    const float scale = Ue8m0ToFloat(Bytes(slot.scales)[i / kKvEntryBlock]);
    Simd().fp8_to_float(Bytes(slot.data) + i, scale, values + i, kKvEntryBlock);
  }
  Simd().bf16_to_float(reinterpret_cast<const BFloat16*>(slot.data + num_fp8), values + num_fp8,
                       rope_dim);
}

template <>
void LoadKvEntry<float>(EntrySlot slot, int head_dim, int, float* values) {
  std::memcpy(values, slot.data, static_cast<size_t>(head_dim) * sizeof(float));
}

void StoreIndexKey(const float* values, int dim, IndexKeyDType dtype, EntrySlot slot) {
  switch (dtype) {
    case IndexKeyDType::kFp4:
      for (int i = 0; i < dim; i += kFp4Block) {
        Bytes(slot.scales)[i / kFp4Block] =
            QuantizeFp4(values + i, kFp4Block, Bytes(slot.data) + i / 2);
      }
      return;
    case IndexKeyDType::kFp8: {
      const float scale = Ue8m0ToFloat(QuantizeFp8(values, dim, Bytes(slot.data)));
      std::memcpy(slot.scales, &scale, sizeof(scale));
      return;
    }
    case IndexKeyDType::kFp32:
      std::memcpy(slot.data, values, static_cast<size_t>(dim) * sizeof(float));
  }
}

void LoadIndexKey(EntrySlot slot, int dim, IndexKeyDType dtype, float* values) {
  switch (dtype) {
    case IndexKeyDType::kFp4:
      for (int i = 0; i < dim; i += kFp4Block) {
        const float scale = Ue8m0ToFloat(Bytes(slot.scales)[i / kFp4Block]);
        Simd().fp4_to_float(Bytes(slot.data) + i / 2, scale, values + i, kFp4Block);
      }
      return;
    case IndexKeyDType::kFp8: {
      float scale;
      std::memcpy(&scale, slot.scales, sizeof(scale));
      Simd().fp8_to_float(Bytes(slot.data), scale, values, dim);
      return;
    }
    case IndexKeyDType::kFp32:
      std::memcpy(values, slot.data, static_cast<size_t>(dim) * sizeof(float));
  }
}

}  // namespace fathom::kernels
