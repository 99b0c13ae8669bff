#include "model/layer_cache.h"

namespace fathom::model {
namespace {

using config::LayerKind;

// kind_layer: among the layers that have this kind; data_bytes: of an entry, without its scales.
kernels::PagedEntries EntriesIn(std::byte* pool, int64_t page_bytes,
                                const kv_cache::EntryLayout& layout, int kind_layer,
                                int data_bytes) {
  return {.pool = pool,
          .page_bytes = page_bytes,
          .layer_offset = layout.layer_offset(kind_layer),
          .entries_per_page = layout.entries_per_layer,
          .data_bytes = data_bytes,
          .scale_bytes = layout.entry_bytes - data_bytes};
}

}  // namespace

LayerCache CacheOfLayer(const config::ModelConfig& config, const kv_cache::KvLayout& layout,
                        kv_cache::IndexKeyDType index_dtype, int entry_bytes, const KvCacheView& kv,
                        int layer) {
  LayerCache cache;
  cache.window =
      EntriesIn(kv.window_pages, layout.window_page_bytes, layout.window, layer, entry_bytes);
  const LayerKind kind = config.layer_kind(layer);
  if (kind == LayerKind::kWindow) return cache;
  const int kind_layer = kv_cache::KindLayer(config, layer);
  const bool c4 = kind == LayerKind::kC4;
  cache.ratio = c4 ? 4 : 128;
  cache.compressed = EntriesIn(kv.blocks, layout.block_bytes, c4 ? layout.c4 : layout.c128,
                               kind_layer, entry_bytes);
  cache.compressor_state = kv.state_slots + (c4 ? layout.state.c4_layer_offset(kind_layer)
                                                : layout.state.c128_layer_offset(kind_layer));
  if (!c4) return cache;
  const int key_bytes = kernels::IndexKeyDataBytes(config.index_head_dim, index_dtype);
  cache.index_keys = EntriesIn(kv.blocks, layout.block_bytes, layout.index, kind_layer, key_bytes);
  cache.index_state =
      cache.compressor_state + int64_t{kv_cache::kC4StateRows} * 4 * config.head_dim * 4;
  return cache;
}

}  // namespace fathom::model
