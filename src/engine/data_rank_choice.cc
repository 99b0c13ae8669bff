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
  const bool stays = session_rank && may_take(ranks[*session_rank]);
  const size_t otherwise = stays ? *session_rank : static_cast<size_t>(least - ranks.begin());
  size_t best = otherwise;
  for (size_t d = 0; d < ranks.size(); ++d) {
    if (ranks[d].num_cached_tokens > ranks[best].num_cached_tokens && may_take(ranks[d])) best = d;
  }
  const bool saves =
      ranks[best].num_cached_tokens >= ranks[otherwise].num_cached_tokens + kv_cache::kBlockTokens;
  return saves ? best : otherwise;
}

}  // namespace fathom::engine
