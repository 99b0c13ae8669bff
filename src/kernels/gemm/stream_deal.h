// How the work of a launch of gemm_stream_cuda.h is cut and dealt out to its blocks: into how many
// parts the columns are, which is all that sums depend on, and which rows a cluster of blocks has.
// Host code.
#pragma once

#include <cstdint>

#include "kernels/gemm/gemm_cuda.h"

namespace fathom::kernels {

inline constexpr int kMultiprocessors = 132;

// Problem after problem, 128 rows after 128 rows, tile of tokens after
// tile of tokens are items, of two halves each: 64 rows. A cluster has the halves begin[cluster] to
// begin[cluster + 1]; before these, where the first problem comes ahead of the others, ahead_each
// of its items, as far as there are.
struct StreamDeal {
  int first_item[kMaxGemmProblems + 1];
  int token_tiles;
  int num_clusters;
  int split, split_log2;  // blocks of a cluster
  int ahead_each;
  uint16_t begin[kMultiprocessors + 1];
  // Of each problem, so that a block can begin without divisions.
  struct Shape {
    int col_blocks, blocks_each, part_blocks;  // of a row, a block and a part
    int row_blocks;                            // from a row tile of weights to the next one
    int group_tiles;                           // row tiles of a group
  } shapes[kMaxGemmProblems];
};

// A few long columns of one problem (SlimStream): a block has one row tile at a time.
bool IsSlim(const CudaGemmParams& params);

// Parts of the columns of whole matrices, a power of two. The order of the sums depends on nothing
// but these columns and the tokens, so that a rank's rows have the bits that they have in the whole
// matrix.
int ColumnParts(const CudaGemmParams& params);
// Those of the columns that there are.
int OwnParts(const CudaGemmParams& params);
// As many blocks a row tile as leave a multiprocessor to each.
int SlimSplit(const CudaGemmParams& params);

// Tiles of tokens_each tokens, to clusters of `split` blocks, max_clusters at most: the least that
// the cluster with most can have. Halves only where they make that less; slim products have only
// halves.
StreamDeal DealOut(const CudaGemmParams& params, int tokens_each, int split, int max_clusters,
                   bool slim);

}  // namespace fathom::kernels
