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

int64_t MaxUsefulBlocks(const PoolDemand& demand) {
  const int64_t num_blocks = NumBlocksFor(demand.max_model_len) * demand.max_num_seqs;
  return std::min<int64_t>(num_blocks, std::numeric_limits<int32_t>::max());
}

int64_t NumAffordableBlocks(const KvLayout& layout, const PoolDemand& demand,
                            int64_t budget_bytes) {
  const int64_t left = budget_bytes - PoolBytes(layout, SizesWithoutBlocks(demand));
  if (left < 0) return 0;
  const int64_t useful = MaxUsefulBlocks(demand);
  // A model of window layers alone has no history bytes.
  return layout.block_bytes == 0 ? useful : std::min(useful, left / layout.block_bytes);
}

std::string Mebibytes(int64_t bytes) {
  constexpr int64_t kMebibyte = 1 << 20;
  return fmt::format("{} MiB", (bytes + kMebibyte - 1) / kMebibyte);
}

}  // namespace

int64_t PoolBytes(const KvLayout& layout, const PoolSizes& sizes) {
  return sizes.num_blocks * layout.block_bytes + sizes.num_window_pages * layout.window_page_bytes +
         sizes.num_state_slots * layout.state.slot_bytes;
}

int64_t MaxUsefulBytes(const KvLayout& layout, const PoolDemand& demand) {
  PoolSizes sizes = SizesWithoutBlocks(demand);
  sizes.num_blocks = static_cast<int32_t>(MaxUsefulBlocks(demand));
  return PoolBytes(layout, sizes);
}

int64_t LongestSequence(const KvLayout& layout, const PoolDemand& demand, int64_t budget_bytes) {
  return NumAffordableBlocks(layout, demand, budget_bytes) * kBlockTokens;
}

Result<PoolSizes> PlanPools(const KvLayout& layout, const PoolDemand& demand,
                            int64_t budget_bytes) {
  PoolSizes sizes = SizesWithoutBlocks(demand);
  sizes.num_blocks = static_cast<int32_t>(NumAffordableBlocks(layout, demand, budget_bytes));
  const int64_t num_needed = NumBlocksFor(demand.max_model_len);
  if (sizes.num_blocks >= num_needed) return sizes;

  PoolSizes needed = sizes;
  needed.num_blocks = static_cast<int32_t>(num_needed);
  return OutOfMemory(fmt::format(
      "a KV cache of {} holds {} tokens, fewer than the context of {}: it needs {} for {} "
      "sequences "
      "at once; give it more with --kv-cache-memory, or lower --max-model-len or --max-num-seqs",
      Mebibytes(budget_bytes), int64_t{sizes.num_blocks} * kBlockTokens, demand.max_model_len,
      Mebibytes(PoolBytes(layout, needed)), demand.max_num_seqs));
}

}  // namespace fathom::kv_cache
