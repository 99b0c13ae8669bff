// How tensor ranks share out the tokens of a prompt's step: each runs all that needs no other token
// (boundaries, routing, attention's products, selection and attention itself) for its own, and what
// others read is gathered. A token's bits are the same in a step of any size (docs/kernels.md), so
// they are those of one rank that has all tokens.
#pragma once

#include <cstdint>

#include "checkpoint/shard.h"
#include "kernels/collective/peer_view.h"

namespace fathom::model {

// Shares are whole units: what the products read at once. Each rank has at least one, or the
// tokens are not shared out.
inline constexpr int64_t kShareUnit = 128;

constexpr bool SharesTokens(int64_t num_tokens, int num_ranks) {
  return num_ranks > 1 && num_tokens >= kShareUnit * num_ranks;
}

// In tokens; the last range may end within a unit.
inline kernels::RankParts TokenShares(int64_t num_tokens, int num_ranks) {
  kernels::RankParts shares;
  for (int r = 0; r < num_ranks; ++r) {
    shares.begin[r + 1] = checkpoint::Part(num_tokens, kShareUnit, r, num_ranks).end;
  }
  return shares;
}

// The most tokens of a rank, in a step of up to `num_tokens`, as whole units.
inline int64_t LargestShare(int64_t num_tokens, int num_ranks) {
  const int64_t units = (num_tokens + kShareUnit - 1) / kShareUnit;
  return (units + num_ranks - 1) / num_ranks * kShareUnit;
}

// The same ranges in groups of 8 tokens, as they lie in tiles (kernels/tiles.cuh); the last one has
// what is left of `row_groups`, padding included.
inline kernels::RankParts RowGroupShares(int64_t num_tokens, int64_t row_groups, int num_ranks) {
  kernels::RankParts groups = TokenShares(num_tokens, num_ranks);
  for (int r = 1; r < num_ranks; ++r) groups.begin[r] /= 8;
  groups.begin[num_ranks] = row_groups;
  return groups;
}

}  // namespace fathom::model
