#include "runtime/kv_cache.h"

#include <algorithm>

namespace fathom::runtime {

Result<KvCache> KvCache::Make(const kv_cache::KvLayout& layout, const kv_cache::PoolSizes& sizes,
                              device::Device& device) {
  KvCache cache;
  ASSIGN_OR_RETURN(cache.blocks_, device.Allocate(sizes.num_blocks * layout.block_bytes));
  ASSIGN_OR_RETURN(cache.window_pages_,
                   device.Allocate(sizes.num_window_pages * layout.window_page_bytes));
  ASSIGN_OR_RETURN(cache.state_slots_,
                   device.Allocate(sizes.num_state_slots * layout.state.slot_bytes));
  return cache;
}

int64_t AutomaticKvCacheBytes(int64_t max_useful_bytes, const device::Device& device,
                              double memory_share) {
  const double free_bytes = static_cast<double>(device.free_memory_bytes());
  return std::min(max_useful_bytes, static_cast<int64_t>(free_bytes * memory_share));
}

}  // namespace fathom::runtime
