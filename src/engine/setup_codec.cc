// What nodes tell each other before the first step.
#include <limits>
#include <utility>

#include "comm/byte_codec.h"
#include "engine/rank_runtime.h"

namespace fathom::engine {

std::string EncodeMemory(const std::vector<RankMemory>& ranks) {
  comm::ByteWriter out;
  for (const RankMemory& rank : ranks) {
    for (const int64_t bytes :
         {rank.layout.block_bytes, rank.layout.window_page_bytes, rank.layout.state.slot_bytes,
          rank.layout.snapshot.bytes, rank.budget_bytes, rank.host_bytes}) {
      out.Put(bytes);
    }
    out.PutString(rank.origin);
  }
  return out.Take();
}

Result<std::vector<RankMemory>> DecodeMemory(std::string_view bytes, int num_ranks) {
  // Far more than there is; sums of pools of them are still numbers.
  constexpr int64_t kMostBytes = int64_t{1} << 50, kMostOfOne = int64_t{1} << 34;
  constexpr size_t kMaxOrigin = 1024;
  comm::ByteReader in(bytes);
  std::vector<RankMemory> ranks(static_cast<size_t>(num_ranks));
  bool in_range = true;
  for (RankMemory& rank : ranks) {
    for (int64_t* value :
         {&rank.layout.block_bytes, &rank.layout.window_page_bytes, &rank.layout.state.slot_bytes,
          &rank.layout.snapshot.bytes, &rank.budget_bytes, &rank.host_bytes}) {
      *value = in.Get<int64_t>();
      in_range = in_range && *value >= 0 && *value <= kMostBytes;
    }
    in_range = in_range && rank.layout.block_bytes <= kMostOfOne &&
               rank.layout.window_page_bytes <= kMostOfOne &&
               rank.layout.state.slot_bytes <= kMostOfOne &&
               rank.layout.snapshot.bytes <= kMostOfOne;
    rank.origin = in.GetString(kMaxOrigin);
  }
  if (!in.AtEnd() || !in_range) {
    return PeerError("another node does not say what memory its ranks have");
  }
  return ranks;
}

std::string EncodeKvPlan(const KvPlan& plan) {
  comm::ByteWriter out;
  out.Put(plan.max_model_len);
  for (const int32_t count :
       {plan.pools.num_blocks, plan.pools.num_window_pages, plan.pools.num_state_slots,
        plan.pools.num_snapshots, plan.host.num_blocks, plan.host.num_snapshots}) {
    out.Put(count);
  }
  out.Put(static_cast<uint8_t>(plan.disk_key.has_value()));
  for (const uint8_t byte : plan.disk_key.value_or(kv_cache::HashKey{})) out.Put(byte);
  return out.Take();
}

Result<KvPlan> DecodeKvPlan(std::string_view bytes, const EngineOptions& options,
                            const std::vector<RankMemory>& own) {
  comm::ByteReader in(bytes);
  KvPlan plan;
  plan.max_model_len = in.Get<int64_t>();
  bool fits = plan.max_model_len >= 1 && plan.max_model_len <= options.limits.max_model_len;
  for (int32_t* count :
       {&plan.pools.num_blocks, &plan.pools.num_window_pages, &plan.pools.num_state_slots,
        &plan.pools.num_snapshots, &plan.host.num_blocks, &plan.host.num_snapshots}) {
    *count = in.Get<int32_t>();
    fits = fits && *count >= 0;
  }
  const bool has_disk = in.Get<uint8_t>() != 0;
  kv_cache::HashKey key;
  for (uint8_t& byte : key) byte = in.Get<uint8_t>();
  if (has_disk) plan.disk_key = key;
  fits = fits && has_disk == KeepsOnDisk(options, plan);
  for (size_t i = 0; fits && i < own.size(); ++i) {
    const kv_cache::KvLayout& layout = own[i].layout;
    const int64_t host_bytes =
        plan.host.num_blocks * layout.block_bytes +
        plan.host.num_snapshots * kv_cache::SnapshotBytesWithPages(layout, options.sliding_window);
    // A slot of each kind at least, whatever was asked for.
    const int64_t most_host_bytes =
        own[i].host_bytes == 0
            ? 0
            : own[i].host_bytes + layout.block_bytes +
                  kv_cache::SnapshotBytesWithPages(layout, options.sliding_window);
    fits = kv_cache::PoolBytes(layout, plan.pools) <= own[i].budget_bytes &&
           host_bytes <= most_host_bytes;
  }
  if (in.AtEnd() && fits) return plan;
  return PeerError(
      "node 0's plan of the KV cache does not fit here: start all nodes with the same flags");
}

}  // namespace fathom::engine
