// A layer's entries of one kind in a pool of pages, as operators take them. Pure.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kv_entry/kv_entry.h"
#include "kv_cache/kv_layout.h"

namespace fathom::model {

// kind_layer: among the layers that have this kind; data_bytes: of an entry, without its scales.
inline kernels::PagedEntries LayerEntries(std::byte* pool, int64_t page_bytes,
                                          const kv_cache::EntryLayout& layout, int kind_layer,
                                          int data_bytes) {
  return {.pool = pool,
          .page_bytes = page_bytes,
          .layer_offset = layout.layer_offset(kind_layer),
          .entries_per_page = layout.entries_per_layer,
          .data_bytes = data_bytes,
          .scale_bytes = layout.entry_bytes - data_bytes};
}

}  // namespace fathom::model
