// Cache entries and index keys as bytes: one row written or read on the calling thread. In a block
// or page the entries of one layer are all data parts, then all scale parts.
//   KV entry:  official, FP8 per 64 on the first head_dim - rope_dim values and BF16 for the rest;
//              fp32, floats.
//   Index key: official, FP4 per 32, or FP8 per 128 with an FP32 scale; fp32, floats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "config/model_config.h"
#include "kernels/activation.h"

namespace fathom::kernels {

// The longest entry the CPU operators hold on the stack.
inline constexpr int kMaxEntrySize = 512;

struct EntrySlot {
  std::byte* data = nullptr;
  std::byte* scales = nullptr;
};

// One layer's entries of one kind in a pool of blocks or pages.
struct PagedEntries {
  std::byte* pool = nullptr;
  int64_t page_bytes = 0;    // from one block or page to the next
  int64_t layer_offset = 0;  // of the layer's entries in a block or page
  int entries_per_page = 0;
  int data_bytes = 0;  // of an entry; then scale_bytes
  int scale_bytes = 0;

  EntrySlot At(int32_t page, int entry) const {
    std::byte* base = pool + page * page_bytes + layer_offset;
    return {base + int64_t{entry} * data_bytes,
            base + int64_t{entries_per_page} * data_bytes + int64_t{entry} * scale_bytes};
  }
};

// Bytes of an entry's data part; the rest of the entry is its scale part.
template <typename T>
constexpr int KvDataBytes(int head_dim, int rope_dim) {
  return kIsOfficial<T> ? head_dim + rope_dim : head_dim * 4;
}
constexpr int IndexKeyDataBytes(int dim, config::IndexKeyDType dtype) {
  if (dtype == config::IndexKeyDType::kFp4) return dim / 2;
  return dtype == config::IndexKeyDType::kFp8 ? dim : dim * 4;
}

// Values are already rounded to T.
template <typename T>
void StoreKvEntry(const float* values, int head_dim, int rope_dim, EntrySlot slot);
template <typename T>
void LoadKvEntry(EntrySlot slot, int head_dim, int rope_dim, float* values);

void StoreIndexKey(const float* values, int dim, config::IndexKeyDType dtype, EntrySlot slot);
void LoadIndexKey(EntrySlot slot, int dim, config::IndexKeyDType dtype, float* values);

}  // namespace fathom::kernels
