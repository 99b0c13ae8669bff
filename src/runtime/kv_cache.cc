#include "runtime/kv_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "kv_cache/pool_plan.h"

namespace fathom::runtime {

using request::KvCopy;

namespace {

// [i] = i * kBlockTokens: what LoadSnapshot writes is copied from here, in stream order.
Result<device::Buffer> MakeBoundaries(int64_t count, device::Device& device) {
  std::vector<int32_t> boundaries(static_cast<size_t>(count));
  for (size_t i = 0; i < boundaries.size(); ++i) {
    boundaries[i] = static_cast<int32_t>(i) * kv_cache::kBlockTokens;
  }
  ASSIGN_OR_RETURN(device::Buffer buffer, device.Allocate(count * int64_t{sizeof(int32_t)}));
  ASSIGN_OR_RETURN(const auto stream, device.MakeStream());
  RETURN_IF_ERROR(stream->Copy(buffer.data(), boundaries.data(), buffer.bytes()));
  RETURN_IF_ERROR(stream->Synchronize());
  return buffer;
}

// A CPU's memory is only taken when it is touched.
Status CheckFits(const kv_cache::KvLayout& layout, const kv_cache::PoolSizes& sizes,
                 const device::Device& device) {
  const int64_t free_bytes = device.free_memory_bytes();
  if (device.kind() == device::DeviceKind::kCpu ||
      kv_cache::PoolBytes(layout, sizes) <= free_bytes) {
    return OkStatus();
  }
  return OutOfMemory(
      fmt::format("the KV cache takes {}; {} has {} MiB free: lower --kv-cache-memory, "
                  "--gpu-memory-utilization, --max-num-seqs or --max-model-len",
                  kv_cache::DescribePools(layout, sizes), device.name(), free_bytes >> 20));
}

}  // namespace

Result<KvCache> KvCache::Make(const kv_cache::KvLayout& layout, const kv_cache::PoolSizes& sizes,
                              device::Device& device, const HostPoolSizes& host) {
  RETURN_IF_ERROR(CheckFits(layout, sizes, device));
  KvCache cache;
  cache.layout_ = layout;
  cache.host_snapshot_bytes_ = host.snapshot_bytes;
  ASSIGN_OR_RETURN(cache.blocks_, device.Allocate(sizes.num_blocks * layout.block_bytes));
  ASSIGN_OR_RETURN(cache.window_pages_,
                   device.Allocate(sizes.num_window_pages * layout.window_page_bytes));
  ASSIGN_OR_RETURN(cache.state_slots_,
                   device.Allocate(sizes.num_state_slots * layout.state.slot_bytes));
  ASSIGN_OR_RETURN(cache.snapshots_, device.Allocate(sizes.num_snapshots * layout.snapshot.bytes));
  // No sequence has a boundary beyond the blocks that there are.
  ASSIGN_OR_RETURN(cache.boundaries_, MakeBoundaries(int64_t{sizes.num_blocks} + 1, device));
  ASSIGN_OR_RETURN(cache.host_blocks_, device.AllocateHost(host.num_blocks * layout.block_bytes));
  ASSIGN_OR_RETURN(cache.host_snapshots_,
                   device.AllocateHost(host.num_snapshots * host.snapshot_bytes));
  return cache;
}

std::span<std::byte> KvCache::host_slot(request::KvRecord::Kind kind, int32_t slot) const {
  const bool is_block = kind == request::KvRecord::Kind::kBlock;
  const int64_t bytes = is_block ? layout_.block_bytes : host_snapshot_bytes_;
  std::byte* base = (is_block ? host_blocks_ : host_snapshots_).data();
  return {base + slot * bytes, static_cast<size_t>(bytes)};
}

Status KvCache::Run(std::span<const KvCopy> copies, device::Stream& stream) const {
  for (const KvCopy& copy : copies) RETURN_IF_ERROR(Copy(copy, stream));
  return OkStatus();
}

Status KvCache::Copy(const KvCopy& copy, device::Stream& stream) const {
  const auto block = [&](int32_t id) { return blocks_.data() + id * layout_.block_bytes; };
  const auto page = [&](int32_t id) {
    return window_pages_.data() + id * layout_.window_page_bytes;
  };
  const auto slot = [&](int32_t id) { return state_slots_.data() + id * layout_.state.slot_bytes; };
  const auto snapshot = [&](int32_t id) { return snapshots_.data() + id * layout_.snapshot.bytes; };
  const auto host_block = [&](int32_t id) {
    return host_blocks_.data() + id * layout_.block_bytes;
  };
  const auto host_snapshot = [&](int32_t id) {
    return host_snapshots_.data() + id * host_snapshot_bytes_;
  };
  switch (copy.kind) {
    case KvCopy::Kind::kBlock:
      return stream.Copy(block(copy.to), block(copy.from), layout_.block_bytes);
    case KvCopy::Kind::kWindowPage:
      return stream.Copy(page(copy.to), page(copy.from), layout_.window_page_bytes);
    case KvCopy::Kind::kStateSlot:
      return stream.Copy(slot(copy.to), slot(copy.from), layout_.state.slot_bytes);
    case KvCopy::Kind::kSaveSnapshot:
      return SaveSnapshot(slot(copy.from), snapshot(copy.to), stream);
    case KvCopy::Kind::kLoadSnapshot:
      return LoadSnapshot(snapshot(copy.from), slot(copy.to), copy.position, stream);
    case KvCopy::Kind::kBlockToHost:
      return stream.Copy(host_block(copy.to), block(copy.from), layout_.block_bytes);
    case KvCopy::Kind::kBlockFromHost:
      return stream.Copy(block(copy.to), host_block(copy.from), layout_.block_bytes);
    case KvCopy::Kind::kSnapshotToHost:
      RETURN_IF_ERROR(
          stream.Copy(host_snapshot(copy.to), snapshot(copy.from), layout_.snapshot.bytes));
      return CopyPages(host_snapshot(copy.to), copy.pages, true, stream);
    case KvCopy::Kind::kSnapshotFromHost:
      RETURN_IF_ERROR(LoadSnapshot(host_snapshot(copy.from), slot(copy.to), copy.position, stream));
      return CopyPages(host_snapshot(copy.from), copy.pages, false, stream);
  }
  return OkStatus();
}

Status KvCache::SaveSnapshot(const std::byte* slot, std::byte* to, device::Stream& stream) const {
  for (const kv_cache::SnapshotLayout::Range& range : layout_.snapshot.ranges) {
    RETURN_IF_ERROR(stream.Copy(to + range.offset, slot + range.slot_offset, range.bytes));
  }
  return OkStatus();
}

Status KvCache::LoadSnapshot(const std::byte* from, std::byte* slot, int32_t position,
                             device::Stream& stream) const {
  for (const kv_cache::SnapshotLayout::Range& range : layout_.snapshot.ranges) {
    RETURN_IF_ERROR(stream.Copy(slot + range.slot_offset, from + range.offset, range.bytes));
  }
  const std::byte* boundary =
      boundaries_.data() + position / kv_cache::kBlockTokens * int64_t{sizeof(position)};
  for (const int64_t offset : layout_.snapshot.merged_ends) {
    RETURN_IF_ERROR(stream.Copy(slot + offset, boundary, sizeof(position)));
  }
  return OkStatus();
}

Status KvCache::CopyPages(std::byte* host, std::span<const int32_t> pages, bool to_host,
                          device::Stream& stream) const {
  host += layout_.snapshot.bytes;
  for (const int32_t id : pages) {
    std::byte* page = window_pages_.data() + id * layout_.window_page_bytes;
    RETURN_IF_ERROR(
        stream.Copy(to_host ? host : page, to_host ? page : host, layout_.window_page_bytes));
    host += layout_.window_page_bytes;
  }
  return OkStatus();
}

int64_t AutomaticKvCacheBytes(int64_t max_useful_bytes, const device::Device& device,
                              double memory_share) {
  const auto free_bytes = static_cast<double>(device.free_memory_bytes());
  double bytes = free_bytes * memory_share;
  if (device.kind() == device::DeviceKind::kCuda) {
    constexpr double kLater = 1 << 30;  // logits, the sampler's places, captured steps
    const auto total_bytes = static_cast<double>(device.total_memory_bytes());
    bytes = total_bytes * memory_share - (total_bytes - free_bytes);
    bytes = std::max(0.0, std::min(bytes, free_bytes - kLater));
  }
  return std::min(max_useful_bytes, static_cast<int64_t>(bytes));
}

}  // namespace fathom::runtime
