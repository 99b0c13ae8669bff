// The outputs of experts that are given out whole (expert_exchange_cuda.h), where ranks do not
// write to each other's memory: in pieces of so many pairs of a token and one of its experts. Each
// rank puts the rows that it computed into its part of a buffer, what carries the ranks' exchanges
// makes all parts everyone's, and each takes its tokens' rows, each from the rank that has the
// expert.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/device.h"
#include "kernels/collective/peer_view.h"

namespace fathom::kernels {

// Pairs [first, first + count) of all data ranks'.
struct ExpertPiece {
  int64_t first = 0;
  int64_t count = 0;
  int64_t hidden = 0;              // H
  __nv_bfloat16* parts = nullptr;  // BF16 [ranks, count, H]
};

// The rank's own part: rows of pairs that it did not compute stay as they are.
struct CudaPutPieceParams {
  ExpertPiece piece;
  int rank = 0;
  const int32_t* pair_of = nullptr;  // of all pairs, the plan's: -1 for another rank's
  const __nv_bfloat16* y = nullptr;  // [rows, H]
};
void Launch(const CudaPutPieceParams& params, device::Stream& stream);

// Of the pairs from `first_own` on, num_own that are of the rank's own tokens, those in the piece.
struct CudaTakePieceParams {
  ExpertPiece piece;
  int num_ranks = 0;
  RankParts experts;                    // of each rank
  const int32_t* expert_ids = nullptr;  // of all pairs; -1: none
  int64_t first_own = 0;
  int64_t num_own = 0;
  __nv_bfloat16* y = nullptr;  // [num_own, H]
};
void Launch(const CudaTakePieceParams& params, device::Stream& stream);

}  // namespace fathom::kernels
