// ChooseDataRank: where a new request runs. A pure function.
//
// The load of a rank is what vLLM balances by: four for a request that waits, one for one that
// runs. A request goes to the rank of its session, whose requests are held to a fair share there,
// or else to the least loaded, of equals to the one with fewest tokens; but to the rank whose
// prefix cache has most of its prompt where that saves at least a block. For its session or its
// cache no rank is taken that is much more loaded: by more than half of the least loaded one's,
// and 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace fathom::engine {

struct DataRankState {
  int num_waiting = 0;
  int num_running = 0;
  int64_t num_tokens = 0;         // of all its requests
  int64_t num_cached_tokens = 0;  // of the new request's prompt

  int load() const { return 4 * num_waiting + num_running; }
};

// `session_rank`: where the session's last request went, while it has live ones.
size_t ChooseDataRank(std::span<const DataRankState> ranks, std::optional<size_t> session_rank);

}  // namespace fathom::engine
