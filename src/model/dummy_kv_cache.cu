// A thread writes 4-byte words of one kind's entries over all pages and layers.
#include <cuda_runtime.h>

#include <algorithm>

#include "base/check.h"
#include "base/float_types.h"
#include "kernels/kv_entry/kv_entry.h"
#include "model/dummy_kv_cache.h"

namespace fathom::model {
namespace {

// One kind of entry in all pages of a pool: rows of data, then a scale part for each.
struct Region {
  uint32_t* pool;
  int64_t pages, page_words, first_word, layers;
  int entries, data_words, fp8_words, scale_words;  // of an entry; beyond FP8 it is BF16
  bool fp4;
  uint32_t scale, scale_mask;  // a scale word is `scale` with random bits of the mask
};

__device__ uint32_t Random(uint64_t i) {
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull;
  x ^= x >> 31;
  x *= 0xbf58476d1ce4e5b9ull;
  return static_cast<uint32_t>(x >> 32);
}

__global__ void FillKernel(Region r) {
  const int64_t layer_words = int64_t{r.entries} * (r.data_words + r.scale_words);
  const int64_t words = r.pages * r.layers * layer_words;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t word = i % layer_words, page_layer = i / layer_words;
    const int64_t page = page_layer / r.layers, layer = page_layer % r.layers;
    const uint32_t random = Random(static_cast<uint64_t>(i));
    uint32_t value = r.scale ^ (random & r.scale_mask);
    if (word < int64_t{r.entries} * r.data_words) {
      value = r.fp4                               ? random
              : word % r.data_words < r.fp8_words ? random & 0xb7b7b7b7u  // magnitudes below 1
                                                  : (random & 0x807f807fu) | 0x3f003f00u;
    }
    r.pool[page * r.page_words + r.first_word + layer * layer_words + word] = value;
  }
}

void Fill(const kv_cache::EntryLayout& entry, std::byte* pool, int64_t pages, int64_t page_bytes,
          int data_bytes, int fp8_bytes, uint32_t scale, uint32_t scale_mask,
          device::Stream& stream) {
  if (entry.num_layers == 0 || pages == 0) return;
  const Region region{.pool = reinterpret_cast<uint32_t*>(pool),
                      .pages = pages,
                      .page_words = page_bytes / 4,
                      .first_word = entry.offset / 4,
                      .layers = entry.num_layers,
                      .entries = entry.entries_per_layer,
                      .data_words = data_bytes / 4,
                      .fp8_words = fp8_bytes / 4,
                      .scale_words = (entry.entry_bytes - data_bytes) / 4,
                      .fp4 = fp8_bytes == 0,
                      .scale = scale,
                      .scale_mask = scale_mask};
  FillKernel<<<2048, 256, 0, static_cast<cudaStream_t>(stream.native_handle())>>>(region);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace

void FillDummyKvCache(const config::ModelConfig& config, const kv_cache::KvLayout& layout,
                      kv_cache::IndexKeyDType index_dtype, const KvCacheView& kv,
                      int64_t num_blocks, int64_t num_window_pages, device::Stream& stream) {
  CHECK(stream.kind() == device::DeviceKind::kCuda);
  const int entry_bytes = kernels::KvDataBytes<BFloat16>(config.head_dim, config.rope_dim);
  const int fp8_bytes = config.head_dim - config.rope_dim;
  constexpr uint32_t kOnes = 0x7f7f7f7f;  // ue8m0
  Fill(layout.window, kv.window_pages, num_window_pages, layout.window_page_bytes, entry_bytes,
       fp8_bytes, kOnes, 0, stream);
  for (const kv_cache::EntryLayout* entry : {&layout.c4, &layout.c128}) {
    Fill(*entry, kv.blocks, num_blocks, layout.block_bytes, entry_bytes, fp8_bytes, kOnes, 0,
         stream);
  }
  const int key_bytes = kernels::IndexKeyDataBytes(config.index_head_dim, index_dtype);
  const bool fp4 = index_dtype == kv_cache::IndexKeyDType::kFp4;
  Fill(layout.index, kv.blocks, num_blocks, layout.block_bytes, key_bytes, fp4 ? 0 : key_bytes,
       fp4 ? kOnes : 0x3f800000u, fp4 ? 0x01010101u : 0x007fffffu, stream);
}

}  // namespace fathom::model
