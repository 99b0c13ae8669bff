#include "engine/data_rank_choice.h"

#include <algorithm>
#include <utility>

#include "kv_cache/kv_layout.h"

namespace fathom::engine {

size_t ChooseDataRank(std::span<const DataRankState> ranks, std::optional<size_t> session_rank) {
  const auto least = std::min_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) {
    return std::pair(a.load(), a.num_tokens) < std::pair(b.load(), b.num_tokens);
  });
  const auto may_take = [&](const DataRankState& rank) {
    return rank.load() <= least->load() + least->load() / 2 + 8;
  };
  auto best = least;
  for (auto rank = ranks.begin(); rank != ranks.end(); ++rank) {
    if (rank->num_cached_tokens > best->num_cached_tokens && may_take(*rank)) best = rank;
  }
  const bool saves = best->num_cached_tokens >= least->num_cached_tokens + kv_cache::kBlockTokens;
  if (saves) return static_cast<size_t>(best - ranks.begin());
  if (session_rank && may_take(ranks[*session_rank])) return *session_rank;
  return static_cast<size_t>(least - ranks.begin());
}

}  // namespace fathom::engine
