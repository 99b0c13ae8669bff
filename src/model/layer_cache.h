// LayerCache: where one layer's part of the KV cache lies, as operators take it: its entries in the
// pools of window pages and history blocks, and its compressors' state in slot 0 (kv_layout.h has
// the layout). Pure.
#pragma once

#include <cstddef>

#include "config/model_config.h"
#include "kernels/kv_entry/kv_entry.h"
#include "kv_cache/kv_layout.h"
#include "model/model.h"

namespace fathom::model {

struct LayerCache {
  int ratio = 0;  // of tokens to compressed entries: 4, 128; 0: there are none
  kernels::PagedEntries window;
  kernels::PagedEntries compressed;
  std::byte* compressor_state = nullptr;
  kernels::PagedEntries index_keys;  // ratio 4, as what follows
  std::byte* index_state = nullptr;
};

// entry_bytes: kernels::KvDataBytes, of an entry without its scales.
LayerCache CacheOfLayer(const config::ModelConfig& config, const kv_cache::KvLayout& layout,
                        kv_cache::IndexKeyDType index_dtype, int entry_bytes, const KvCacheView& kv,
                        int layer);

}  // namespace fathom::model
