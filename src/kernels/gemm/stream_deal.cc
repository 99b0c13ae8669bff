#include "kernels/gemm/stream_deal.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "base/check.h"

namespace fathom::kernels {
namespace {

int BlocksEach(int64_t col_blocks, int split) {
  return (static_cast<int>(col_blocks) + split - 1) / split;
}

// Slim products have so many parts of their columns, of whole stages, which any power of two of
// blocks may share.
constexpr int kSlimParts = 8;
constexpr int64_t kMostSlimTokens = 64;  // of a rank's few rows

// Into how many parts it pays to cut columns of which the longest matrix has so many. The output
// product's are cut into more than one GPU needs, for the few rows that its ranks have.
int PartsThatPay(const CudaGemmParams& params, int64_t columns) {
  const bool wide = params.problems[0].w.kind == TileKind::kFp8AsBf16;
  const bool is_output = columns >= 8192 && !wide && params.num_problems == 1;
  const int64_t tokens = params.num_tokens;
  if (columns < 2048) return 1;
  // Of Pro's input products a quarter of a row tile's columns is too much to be dealt out evenly.
  if (columns >= 7168 && params.num_problems > 1 && tokens <= 16) return 8;
  if (params.few_rows) return wide ? 4 : 8;
  if (is_output) return tokens > 16 && tokens <= 32 ? 8 : 4;
  return columns < 4096 || wide || tokens > 32 ? 2 : 4;
}

// Whether every one of so many parts has some, of all matrices.
bool HaveColumns(const CudaGemmParams& params, int parts) {
  for (int i = 0; i < params.num_problems; ++i) {
    const int64_t blocks = params.problems[i].w.matrix_col_blocks();
    if ((parts - 1) * BlocksEach(blocks, parts) >= blocks) return false;
  }
  return true;
}

// What a cluster can take: one or two halves of an item, and what they cost in column blocks.
struct Piece {
  int end;  // in halves
  int cost;
};

std::vector<Piece> MakePieces(const CudaGemmParams& params, const StreamDeal& deal, bool halves) {
  std::vector<Piece> pieces;
  for (int i = deal.ahead_each > 0 ? 1 : 0; i < params.num_problems; ++i) {
    const GemmProblem& p = params.problems[i];
    const int each = BlocksEach(p.w.col_blocks(), deal.split) + 1;  // and its end
    for (int item = deal.first_item[i]; item < deal.first_item[i + 1]; ++item) {
      const int64_t tile = 2 * int64_t{(item - deal.first_item[i]) / deal.token_tiles};
      const bool has_second = tile + 1 < p.w.row_tiles();
      const bool apart = halves && has_second && p.output != GemmOutput::kFp8Tiles;
      if (apart) pieces.push_back({2 * item + 1, each});
      pieces.push_back({2 * item + 2, apart || !has_second ? each : 2 * each});
    }
  }
  return pieces;
}

// What the items cost that each cluster has ahead of the others.
std::vector<int> CostsAhead(const CudaGemmParams& params, const StreamDeal& deal,
                            int max_clusters) {
  std::vector<int> costs(static_cast<size_t>(max_clusters));
  if (deal.ahead_each == 0) return costs;
  const int each = 2 * (BlocksEach(params.problems[0].w.col_blocks(), deal.split) + 1);
  for (int item = 0; item < deal.first_item[1]; ++item) {
    costs[static_cast<size_t>(item / deal.ahead_each)] += each;
  }
  return costs;
}

// Fills clusters, which cost something before, one after another, none beyond `most`. False: that
// is too little.
bool Fill(const std::vector<Piece>& pieces, const std::vector<int>& costs, int most,
          StreamDeal& deal) {
  size_t cluster = 0;
  int cost = costs[0];
  uint16_t end = deal.begin[0];
  for (const Piece& piece : pieces) {
    while (cost + piece.cost > most) {
      deal.begin[++cluster] = end;
      if (cluster == costs.size()) return false;
      cost = costs[cluster];
    }
    cost += piece.cost;
    end = static_cast<uint16_t>(piece.end);
  }
  const auto is_ahead = [](int c) { return c > 0; };
  const auto ahead = static_cast<size_t>(std::count_if(costs.begin(), costs.end(), is_ahead));
  const size_t used = std::max(cluster + 1, ahead);
  std::fill(deal.begin + cluster + 1, deal.begin + used + 1, end);
  deal.num_clusters = static_cast<int>(used);
  return true;
}

}  // namespace

bool IsSlim(const CudaGemmParams& params) {
  const TiledMatrix& w = params.problems[0].w;
  const int64_t blocks = w.matrix_col_blocks();
  // As many parts as other products of few rows have.
  const bool of_rank = params.few_rows && w.row_tiles() * kSlimParts <= kMultiprocessors;
  return params.num_problems == 1 && params.num_tokens <= (of_rank ? kMostSlimTokens : 8) &&
         w.kind == TileKind::kFp8 && blocks >= 64 && blocks % (2 * kSlimParts) == 0;
}

int ColumnParts(const CudaGemmParams& params) {
  if (params.many_rows) return 1;
  if (IsSlim(params)) return kSlimParts;
  int64_t most = 0;
  for (int i = 0; i < params.num_problems; ++i) {
    const TiledMatrix& w = params.problems[i].w;
    most = std::max(most, w.matrix_col_blocks() * TileMatrixCols(w.kind));
  }
  int parts = PartsThatPay(params, most);
  while (!HaveColumns(params, parts)) parts /= 2;
  return parts;
}

int OwnParts(const CudaGemmParams& params) {
  const int parts = ColumnParts(params);
  const TiledMatrix& w = params.problems[0].w;
  if (w.is_whole()) return parts;
  CHECK_EQ(params.num_problems, 1);
  CHECK_EQ(w.col_blocks() * parts % w.matrix_col_blocks(), 0);
  return static_cast<int>(w.col_blocks() * parts / w.matrix_col_blocks());
}

int SlimSplit(const CudaGemmParams& params) {
  int split = OwnParts(params);
  while (split > 1 && params.problems[0].w.row_tiles() * split > kMultiprocessors) split /= 2;
  return split;
}

StreamDeal DealOut(const CudaGemmParams& params, int tokens_each, int split, int max_clusters,
                   bool slim) {
  StreamDeal deal{};
  deal.token_tiles = static_cast<int>((params.num_tokens + tokens_each - 1) / tokens_each);
  deal.split = split;
  deal.split_log2 = std::countr_zero(static_cast<unsigned>(split));
  for (int i = 0; i < kMaxGemmProblems; ++i) {
    const int64_t tiles = i < params.num_problems ? params.problems[i].w.row_tiles() : 0;
    deal.first_item[i + 1] =
        deal.first_item[i] + static_cast<int>((tiles + 1) / 2) * deal.token_tiles;
    if (i >= params.num_problems) continue;
    const GemmProblem& p = params.problems[i];
    deal.shapes[i] = {
        .col_blocks = static_cast<int>(p.w.col_blocks()),
        .blocks_each = BlocksEach(p.w.col_blocks(), split),
        .part_blocks = BlocksEach(p.w.matrix_col_blocks(), params.x_is_early ? 1 : kSlimParts),
        .row_blocks = static_cast<int>(p.w.matrix_col_blocks()),
        .group_tiles = static_cast<int>(p.w.rows / kTileMatrixRows / p.groups)};
  }
  if (params.number.of_step != nullptr && !params.x_is_early) {
    deal.ahead_each = (deal.first_item[1] + max_clusters - 1) / max_clusters;
    deal.begin[0] = static_cast<uint16_t>(2 * deal.first_item[1]);
  }
  const std::vector<int> costs = CostsAhead(params, deal, max_clusters);
  const std::vector<Piece> wholes = MakePieces(params, deal, false);
  const std::vector<Piece> halves = MakePieces(params, deal, true);
  int64_t total = std::accumulate(costs.begin(), costs.end(), int64_t{0});
  for (const Piece& piece : wholes) total += piece.cost;
  for (int most = static_cast<int>(total / max_clusters);; ++most) {
    if (!slim && Fill(wholes, costs, most, deal)) return deal;
    if (!Fill(halves, costs, most, deal)) continue;
    // Here an odd row tile's item has no second half.
    if (slim) {
      deal.begin[deal.num_clusters] = static_cast<uint16_t>(params.problems[0].w.row_tiles());
    }
    return deal;
  }
}

}  // namespace fathom::kernels
