// KvCache: the memory of the pools that kv_cache/ hands out by id. Owned by the runtime for a
// server's life; the device outlives it. Written and read by the model alone, on the worker's
// stream.
#pragma once

#include "base/status.h"
#include "device/device.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/kv_layout.h"
#include "model/model.h"

namespace fathom::runtime {

class KvCache {
 public:
  // Zeroed memory for every block, page and slot. kOutOfMemory says what was asked for.
  static Result<KvCache> Make(const kv_cache::KvLayout& layout, const kv_cache::PoolSizes& sizes,
                              device::Device& device);

  model::KvCacheView view() const {
    return {blocks_.data(), window_pages_.data(), state_slots_.data()};
  }
  int64_t bytes() const { return blocks_.bytes() + window_pages_.bytes() + state_slots_.bytes(); }

 private:
  device::Buffer blocks_, window_pages_, state_slots_;
};

// The bytes to plan with when the user named none: all that could ever be used, but no more than
// `memory_share` of what is free on the device now.
int64_t AutomaticKvCacheBytes(int64_t max_useful_bytes, const device::Device& device,
                              double memory_share);

}  // namespace fathom::runtime
