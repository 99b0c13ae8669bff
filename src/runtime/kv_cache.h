// KvCache: the memory of the pools that kv_cache/ hands out by id, on the device and in host
// memory, and the copies between them. Owned by the runtime for a server's life; the device
// outlives it. The pools are written and read by the model and by Run, on the worker's stream; a
// host slot also by the disk's threads, while a request for it is under way.
#pragma once

#include <span>

#include "base/status.h"
#include "device/device.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/kv_layout.h"
#include "model/model.h"
#include "request/kv_transfers.h"

namespace fathom::runtime {

// Host memory, in slots of a block and slots of a snapshot with its window pages.
struct HostPoolSizes {
  int32_t num_blocks = 0;
  int32_t num_snapshots = 0;
  int64_t snapshot_bytes = 0;  // kv_cache::SnapshotBytesWithPages
};

class KvCache {
 public:
  // Zeroed memory for every block, page, slot and snapshot. kOutOfMemory says what was asked for.
  static Result<KvCache> Make(const kv_cache::KvLayout& layout, const kv_cache::PoolSizes& sizes,
                              device::Device& device, const HostPoolSizes& host = {});

  model::KvCacheView view() const {
    return {blocks_.data(), window_pages_.data(), state_slots_.data()};
  }
  int64_t bytes() const {
    return blocks_.bytes() + window_pages_.bytes() + state_slots_.bytes() + snapshots_.bytes();
  }
  int64_t host_bytes() const { return host_blocks_.bytes() + host_snapshots_.bytes(); }

  // Starts the copies on the stream, in their order.
  Status Run(std::span<const request::KvCopy> copies, device::Stream& stream) const;

  std::span<std::byte> host_slot(request::KvRecord::Kind kind, int32_t slot) const;

 private:
  Status Copy(const request::KvCopy& copy, device::Stream& stream) const;
  Status SaveSnapshot(const std::byte* slot, std::byte* to, device::Stream& stream) const;
  Status LoadSnapshot(const std::byte* from, std::byte* slot, int32_t position,
                      device::Stream& stream) const;
  Status CopyPages(std::byte* host, std::span<const int32_t> pages, bool to_host,
                   device::Stream& stream) const;

  kv_cache::KvLayout layout_;
  int64_t host_snapshot_bytes_ = 0;
  device::Buffer blocks_, window_pages_, state_slots_, snapshots_, boundaries_;
  device::Buffer host_blocks_, host_snapshots_;
};

// The bytes to plan with when the user named none: all that could ever be used, but no more than
// `memory_share` of what is free now on a CPU, or of all of a GPU's memory less what is in use, and
// of a GPU's free memory all but 1 GiB, for what is allocated later.
int64_t AutomaticKvCacheBytes(int64_t max_useful_bytes, const device::Device& device,
                              double memory_share);

}  // namespace fathom::runtime
