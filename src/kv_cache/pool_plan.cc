#include "kv_cache/pool_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace fathom::kv_cache {
namespace {

PoolSizes SizesWithoutBlocks(const PoolDemand& demand) {
  // A sum of MaxWindowPages over sequences whose tokens add up to the budget of a step.
  const int64_t num_pages = demand.max_num_seqs * MaxWindowPages(demand.sliding_window, 1) +
                            demand.max_num_batched_tokens / kWindowPageTokens + demand.max_num_seqs;
  return {.num_blocks = 0,
          .num_window_pages = static_cast<int32_t>(num_pages),
          .num_state_slots = demand.max_num_seqs};
}

// A snapshot for every 4,096 tokens, and a few for each sequence.
int64_t MaxUsefulSnapshots(const PoolDemand& demand) {
  return (demand.max_model_len / 4096 + 4) * demand.max_num_seqs;
}

// What `bytes` buy for the prefix cache: the ends of at most max_num_seqs sequences, and snapshots.
void AddKeptStates(const KvLayout& layout, const PoolDemand& demand, int64_t bytes,
                   PoolSizes& sizes) {
  const int64_t num_tail_pages = MaxWindowPages(demand.sliding_window, 1);
  const int64_t num_snapshot_pages = NumSnapshotPages(demand.sliding_window);
  const int64_t tail_bytes = layout.state.slot_bytes + num_tail_pages * layout.window_page_bytes;
  const int64_t snapshot_bytes =
      layout.snapshot.bytes + num_snapshot_pages * layout.window_page_bytes;
  const int64_t num_tails =
      std::min<int64_t>(demand.max_num_seqs, bytes / 4 / std::max<int64_t>(1, tail_bytes));
  const int64_t num_snapshots =
      std::min<int64_t>(MaxUsefulSnapshots(demand),
                        (bytes - num_tails * tail_bytes) / std::max<int64_t>(1, snapshot_bytes));
  sizes.num_state_slots += static_cast<int32_t>(num_tails);
  sizes.num_snapshots = static_cast<int32_t>(num_snapshots);
  sizes.num_window_pages +=
      static_cast<int32_t>(num_tails * num_tail_pages + num_snapshots * num_snapshot_pages);
}

int64_t MaxUsefulBlocks(const PoolDemand& demand) {
  const int64_t num_blocks = NumBlocksFor(demand.max_model_len) * demand.max_num_seqs;
  return std::min<int64_t>(num_blocks, std::numeric_limits<int32_t>::max());
}

int64_t NumAffordableBlocks(const KvLayout& layout, const PoolDemand& demand,
                            const PoolSizes& without_blocks, int64_t budget_bytes) {
  const int64_t left = budget_bytes - PoolBytes(layout, without_blocks);
  if (left < 0) return 0;
  const int64_t useful = MaxUsefulBlocks(demand);
  // A model of window layers alone has no history bytes.
  return layout.block_bytes == 0 ? useful : std::min(useful, left / layout.block_bytes);
}

int64_t Mebibytes(int64_t bytes) {
  constexpr int64_t kMebibyte = 1 << 20;
  return (bytes + kMebibyte - 1) / kMebibyte;
}

// `sizes` and what the prefix cache gets of the rest of the budget, beside `num_blocks`.
PoolSizes WithKeptStates(const KvLayout& layout, const PoolDemand& demand, PoolSizes sizes,
                         int64_t num_blocks, int64_t budget_bytes) {
  const int64_t left = budget_bytes - PoolBytes(layout, sizes);
  const int64_t bytes = std::min(left / 8, left - num_blocks * layout.block_bytes);
  if (demand.prefix_cache && bytes > 0) AddKeptStates(layout, demand, bytes, sizes);
  return sizes;
}

}  // namespace

int64_t PoolBytes(const KvLayout& layout, const PoolSizes& sizes) {
  return sizes.num_blocks * layout.block_bytes + sizes.num_window_pages * layout.window_page_bytes +
         sizes.num_state_slots * layout.state.slot_bytes +
         sizes.num_snapshots * layout.snapshot.bytes;
}

int64_t MaxUsefulBytes(const KvLayout& layout, const PoolDemand& demand) {
  PoolSizes sizes = SizesWithoutBlocks(demand);
  if (demand.prefix_cache) {
    AddKeptStates(layout, demand, std::numeric_limits<int64_t>::max() / 2, sizes);
  }
  sizes.num_blocks = static_cast<int32_t>(MaxUsefulBlocks(demand));
  return PoolBytes(layout, sizes);
}

HostSlots PlanHostSlots(const KvLayout& layout, int sliding_window, int64_t bytes) {
  if (bytes <= 0) return {};
  const auto at_least_one = [](int64_t budget, int64_t each) {
    return static_cast<int32_t>(std::clamp<int64_t>(budget / std::max<int64_t>(1, each), 1,
                                                    std::numeric_limits<int32_t>::max()));
  };
  return {.num_blocks = at_least_one(bytes - bytes / 5, layout.block_bytes),
          .num_snapshots = at_least_one(bytes / 5, SnapshotBytesWithPages(layout, sliding_window))};
}

std::string DescribePools(const KvLayout& layout, const PoolSizes& sizes) {
  return fmt::format(
      "{} MiB: {} for history blocks, {} for window pages, {} for the states of sequences, {} for "
      "snapshots",
      Mebibytes(PoolBytes(layout, sizes)), Mebibytes(sizes.num_blocks * layout.block_bytes),
      Mebibytes(sizes.num_window_pages * layout.window_page_bytes),
      Mebibytes(sizes.num_state_slots * layout.state.slot_bytes),
      Mebibytes(sizes.num_snapshots * layout.snapshot.bytes));
}

int64_t LongestSequence(const KvLayout& layout, const PoolDemand& demand, int64_t budget_bytes) {
  const PoolSizes others =
      WithKeptStates(layout, demand, SizesWithoutBlocks(demand), 0, budget_bytes);
  const int64_t num_blocks = NumAffordableBlocks(layout, demand, others, budget_bytes);
  return std::min(demand.max_model_len, num_blocks * kBlockTokens);
}

Result<PoolSizes> PlanPools(const KvLayout& layout, const PoolDemand& demand,
                            int64_t budget_bytes) {
  const auto num_needed = static_cast<int32_t>(NumBlocksFor(demand.max_model_len));
  PoolSizes sizes =
      WithKeptStates(layout, demand, SizesWithoutBlocks(demand), num_needed, budget_bytes);
  sizes.num_blocks = static_cast<int32_t>(NumAffordableBlocks(layout, demand, sizes, budget_bytes));
  if (sizes.num_blocks >= num_needed) return sizes;
  PoolSizes needed = sizes;
  needed.num_blocks = num_needed;
  return OutOfMemory(fmt::format(
      "a KV cache of {} MiB holds {} tokens, fewer than the context of {}, which needs {} ({} "
      "sequences at once); give it more with --kv-cache-memory or --gpu-memory-utilization, or "
      "lower --max-model-len or --max-num-seqs",
      Mebibytes(budget_bytes), int64_t{sizes.num_blocks} * kBlockTokens, demand.max_model_len,
      DescribePools(layout, needed), demand.max_num_seqs));
}

}  // namespace fathom::kv_cache
