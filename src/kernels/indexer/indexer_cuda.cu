// Index queries, scores and selection: three kernels, the last two in rounds when the workspace
// does not hold all scores.
#include <algorithm>

#include "kernels/indexer/index_scores.cuh"
#include "kernels/indexer/select_cluster.cuh"
#include "kernels/indexer/select_decode.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {
namespace {

using config::IndexKeyDType;

constexpr int kQueryThreads = 256;
constexpr int kQueryRows = kQueryThreads / kQueryLanes;  // of a block

// Eight lanes a (token, head row); rows past num_heads become zero.
__global__ void __launch_bounds__(kQueryThreads)
    IndexQueryKernel(const __grid_constant__ CudaIndexSelectParams p, IndexQueries out,
                     int head_rows) {
  WaitForPredecessor();
  AllowSuccessor();
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * kQueryRows + threadIdx.x / kQueryLanes;
  const int64_t token = row / head_rows;
  if (token >= p.batch.num_tokens || ScoredEntries(p.batch, p.topk, static_cast<int>(token)) == 0) {
    return;
  }
  const IndexAngles<kQueryLanes> angles(p, token, lane);
  const int head = static_cast<int>(row % head_rows);
  const IndexQueryRow<kQueryLanes> query(
      p, IndexQueryInput<kQueryLanes>::Load(p, token, head, lane), angles, lane);
  StoreQueryCodes(out.codes, row, lane, query);
  if (lane % kQueryLanes == 0) out.weights[row] = query.weight;
}

// A token's selection, in ascending order; a block a token.
__global__ void __launch_bounds__(kSelectThreads)
    AscendKernel(CudaBatch batch, int topk, const int32_t* counts, int32_t* selected) {
  __shared__ int32_t entries[kMaxIndexTopk];
  const int token = blockIdx.x;
  WaitForPredecessor();
  AllowSuccessor();
  if (batch.token_seq[token] < 0) return;
  int32_t* const own = selected + int64_t{token} * topk;
  const int count = counts[token];
  for (int i = threadIdx.x; i < count; i += kSelectThreads) entries[i] = own[i];
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kSelectThreads) {
    const int32_t entry = entries[i];
    int lower = 0;
    for (int k = 0; k < count; ++k) lower += entries[k] < entry;
    own[lower] = entry;
  }
}

struct SelectShared {
  alignas(16) int bins[kRankBins];
  RankSelectShared rank;
};
struct SelectParams {
  CudaBatch batch;
  int topk = 0;
  int first_token = 0;
  const float* scores = nullptr;
  int64_t stride = 0;
  int32_t* selected = nullptr;
  int32_t* counts = nullptr;
};

// A block a token; bits of its entries follow the shared memory of the selection.
__global__ void __launch_bounds__(kSelectThreads, 3) SelectKernel(SelectParams p) {
  extern __shared__ __align__(16) uint8_t dynamic[];
  const int token = p.first_token + blockIdx.x;
  const bool padding = p.batch.token_seq[token] < 0;
  const int visible = (p.batch.positions[token] + 1) / 4;
  WaitForPredecessor();
  AllowSuccessor();
  if (padding) return;
  int32_t* selected = p.selected + int64_t{token} * p.topk;
  if (threadIdx.x == 0) p.counts[token] = min(visible, p.topk);
  if (visible <= p.topk) {
    for (int i = threadIdx.x; i < visible; i += kSelectThreads) selected[i] = i;
    return;
  }
  auto& shared = *reinterpret_cast<SelectShared*>(dynamic);
  RankSelect select(shared.rank, shared.bins, reinterpret_cast<uint32_t*>(&shared + 1),
                    p.scores + blockIdx.x * p.stride, visible, p.topk);
  select.CountScores();
  select.Run({selected});
}

template <int kHeads, int kTokens>
void LaunchScores(const IndexScoreParams& p, device::Stream& stream) {
  constexpr int kTokensOfBlock = kScoreGroups * kTokens;
  const int tiles = (p.in.max_entries + kIndexTile - 1) / kIndexTile;
  const int token_blocks = (p.num_tokens + kTokensOfBlock - 1) / kTokensOfBlock;
  const int splits = std::clamp(NumMultiprocessors() / token_blocks, 1, tiles);
  const auto kernel = p.in.dtype == IndexKeyDType::kFp4
                          ? IndexScoreKernel<IndexKeyDType::kFp4, kHeads, kTokens>
                          : IndexScoreKernel<IndexKeyDType::kFp8, kHeads, kTokens>;
  LaunchKernel(kernel, dim3(splits, token_blocks), kScoreThreads,
               sizeof(IndexScoreShared<kHeads, kTokens>) + 1024, stream, p);
}

int HeadRows(int num_heads) { return num_heads <= 8 ? 8 : 64; }
// Steps of few tokens: queries are prepared where they are used, rows are shared out.
bool IsDecode(int num_tokens, int num_heads) {
  return num_tokens <= kMaxIndexDecodeTokens && HeadRows(num_heads) == 64;
}
// Steps of few tokens at short contexts: a token is a cluster's, of which 30 run at once. Of more
// than 12 tokens attention of few entries takes whole multiprocessors, which these would hold.
bool TakesClusters(int num_tokens, int max_entries, int topk) {
  constexpr int kManySelected = 1024;
  return num_tokens <= (topk >= kManySelected ? 30 : 12) && max_entries <= kMaxFewEntries;
}
// Blocks of a selection that makes its queries. All run at once, though they are clusters of two:
// multiprocessors come in pairs.
int MakingBlocks() { return NumMultiprocessors() / kHeadTiles * kHeadTiles; }
// How many multiprocessors it leaves to the products behind it, half of them or more. 0: of so many
// entries it takes all, and finds room beside their blocks.
constexpr int kMostOfHalf = 1 << 17;
int BlocksBehind(const PeerView& peers, int max_entries) {
  if (max_entries > kMostOfHalf && !RanksShareEntries(peers, max_entries)) return 0;
  const int all = NumMultiprocessors();
  return all - std::min((max_entries - 1) / kEntriesOfPart + 1, all / 2);
}
int64_t ScoreStride(int max_entries) { return (int64_t{max_entries} + 63) / 64 * 64; }
// Blocks of each rank that a decode step's token is shared out among, at most; all tokens' run at
// once, on `room` multiprocessors.
int DecodeBlocks(int num_tokens, int ranks, int max_entries, int room) {
  if (max_entries <= kEntriesOfOneBlock) return 1;
  const int lists = std::min(2 * kMaxListTokens, kMaxListBlocks / ranks);
  const int most = std::max(std::min(room, lists) / num_tokens, 1);
  return std::min(most, (max_entries - 1) / kEntriesOfPart + 1);
}
// Besides the scores: the queries.
int64_t FixedBytes(int num_tokens, int num_heads) {
  if (IsDecode(num_tokens, num_heads)) return 0;
  return int64_t{num_tokens} * HeadRows(num_heads) * (kIndexDim + int64_t{sizeof(float)});
}

constexpr int kMaxSharedEntries = 16384;

// What is left of a multiprocessor beside a block that shares it with none of its launch.
constexpr int kBesideSharedBytes = (226 << 10) - static_cast<int>(kAloneSharedBytes);

template <bool kMakesQueries, bool kOfRanks>
void SelectDecode(const CudaIndexSelectParams& p, float* scores, device::Stream& stream) {
  const int num_tokens = p.batch.num_tokens;
  const int others = kMakesQueries ? BlocksBehind(p.peers, p.max_entries) : 0;
  const int all = kMakesQueries ? MakingBlocks() : NumMultiprocessors();
  const int ranks = kOfRanks ? p.peers.size : 1;
  const int blocks = DecodeBlocks(num_tokens, ranks, p.max_entries, all - others);
  const int parts = blocks * ranks;
  SelectDecodeParams params{.in = p, .scores = scores, .stride = ScoreStride(p.max_entries)};
  const int tiles = (p.max_entries + kIndexTile - 1) / kIndexTile;
  const int most = std::max((tiles + parts - 1) / parts * kIndexTile,
                            std::min(kEntriesOfOneBlock, tiles * kIndexTile));
  params.part_words = (parts > 1 ? kEntriesOfOneBlock : most) / 32;
  const int own_bytes =
      static_cast<int>(sizeof(SelectDecodeShared<kOfRanks>)) + 1024 + params.part_words * 4;
  const int stage_bytes = kDecodeGroups * IndexPageBytes(p.dtype);
  params.stages =
      std::clamp((most / kIndexTile + kDecodeGroups - 1) / kDecodeGroups, 1,
                 p.dtype == IndexKeyDType::kFp4 ? kMaxSelectStages : kMaxSelectStages / 2);
  const bool shares = kMakesQueries && others == 0;  // multiprocessors with the products' blocks
  if (shares) {
    const int left = kBesideSharedBytes - own_bytes - std::min(most, kMaxSharedEntries) * 4;
    params.stages = std::clamp(left / stage_bytes, 1, params.stages);
  }
  params.page_bytes = std::max(params.stages * stage_bytes,
                               kMakesQueries ? static_cast<int>(sizeof(QueryTile::Weights)) : 0);
  params.most_blocks = blocks;
  if (parts > 1) {
    CHECK(p.number.of_step != nullptr);
    params.page_bytes = std::max(params.page_bytes, static_cast<int>(sizeof(ListSelectWorkspace)));
    params.lists = reinterpret_cast<ToldLists*>(p.lists);
  }
  const auto kernel = p.dtype == IndexKeyDType::kFp4
                          ? SelectDecodeKernel<IndexKeyDType::kFp4, kMakesQueries, kOfRanks>
                          : SelectDecodeKernel<IndexKeyDType::kFp8, kMakesQueries, kOfRanks>;
  const size_t fixed_bytes = static_cast<size_t>(own_bytes + params.page_bytes);
  // Of a block alone with a table for a million tokens, the bits leave less room.
  const auto room = static_cast<int>((kMaxSharedBytes - fixed_bytes) / sizeof(float));
  params.shared_entries = std::min({most, kMaxSharedEntries, room});
  const size_t bytes = fixed_bytes + params.shared_entries * sizeof(float);
  LaunchClusters(kernel, dim3(kMakesQueries ? all : blocks, num_tokens),
                 kMakesQueries ? kHeadTiles : 1, kSelectThreads,
                 shares ? bytes : std::max(bytes, kAloneSharedBytes), stream, params);
  if (p.prefill && parts > 1) {
    LaunchKernel(AscendKernel, num_tokens, kSelectThreads, 0, stream, p.batch, p.topk, p.counts,
                 p.selected);
  }
}

void SelectClusters(const CudaIndexSelectParams& p, device::Stream& stream) {
  SelectClusterParams params{.in = p};
  const int tiles = (p.max_entries + kIndexTile - 1) / kIndexTile;
  params.stages = (tiles + kTilesAtOnce - 1) / kTilesAtOnce;
  const auto kernel = p.dtype == IndexKeyDType::kFp4 ? SelectClusterKernel<IndexKeyDType::kFp4>
                                                     : SelectClusterKernel<IndexKeyDType::kFp8>;
  LaunchClusters(
      kernel, dim3(kClusterBlocks, p.batch.num_tokens), kClusterBlocks, kClusterThreads,
      sizeof(SelectClusterShared) + 1024 + kClusterGroups * params.stages * IndexPageBytes(p.dtype),
      stream, params);
}

void SelectRounds(const CudaIndexSelectParams& p, IndexScoreParams score, SelectParams select,
                  int64_t round_tokens, device::Stream& stream) {
  const int num_tokens = p.batch.num_tokens, head_rows = HeadRows(p.num_heads);
  score.queries.codes = reinterpret_cast<uint8_t*>(p.workspace);
  score.queries.weights =
      reinterpret_cast<float*>(p.workspace + int64_t{num_tokens} * head_rows * kIndexDim);
  LaunchKernel(IndexQueryKernel, (num_tokens * head_rows + kQueryRows - 1) / kQueryRows,
               kQueryThreads, 0, stream, p, score.queries, head_rows);
  // Whole waves of blocks.
  const int64_t wave = int64_t{NumMultiprocessors()} * kScoreGroups * (head_rows == 8 ? 8 : 2);
  if (round_tokens > wave) round_tokens -= round_tokens % wave;
  for (int first = 0; first < num_tokens; first += score.num_tokens) {
    score.first_token = select.first_token = first;
    score.num_tokens = static_cast<int>(std::min<int64_t>(round_tokens, num_tokens - first));
    if (head_rows == 8) {
      LaunchScores<8, 8>(score, stream);
    } else {
      LaunchScores<64, 2>(score, stream);
    }
    LaunchKernel(SelectKernel, score.num_tokens, kSelectThreads,
                 sizeof(SelectShared) + (p.max_entries + 31) / 32 * 4, stream, select);
  }
}

}  // namespace

int64_t IndexListsBytes() { return kMaxListTokens * int64_t{sizeof(ToldLists)}; }
int64_t SharedIndexListsBytes() { return sizeof(ToldLists); }
int64_t IndexWorkspaceBytes(int num_tokens, int num_heads, int max_entries) {
  return FixedBytes(num_tokens, num_heads) + num_tokens * ScoreStride(max_entries) * 4;
}
int64_t MinIndexWorkspaceBytes(int num_tokens, int num_heads, int max_entries) {
  const int rows = IsDecode(num_tokens, num_heads) ? num_tokens : 1;
  return FixedBytes(num_tokens, num_heads) + rows * ScoreStride(max_entries) * 4;
}

bool AwaitsWords(const CudaGemmParams& products, int num_heads, int max_entries) {
  const auto num_tokens = static_cast<int>(products.num_tokens);
  return !products.prefill && num_tokens <= kMaxNumberedTokens && IsDecode(num_tokens, num_heads) &&
         TakesClusters(num_tokens, max_entries, /*topk=*/0);  // so few with any
}
bool MakesIndexQueries(const CudaGemmParams& products, int num_heads, int max_entries) {
  const TiledMatrix& w = products.problems[0].w;
  return products.num_tokens == 1 && !products.prefill && products.num_problems == 2 &&
         !TakesClusters(1, max_entries, /*topk=*/0) && w.kind == TileKind::kFp8 && w.is_whole() &&
         w.col_blocks() == kResidentBlocks && num_heads == kDecodeHeads &&
         w.rows == kDecodeHeads * kIndexDim && w.row_tiles() <= MakingBlocks();
}
// Where that makes two tiles a warpgroup less: what ranks tell each other takes somewhat less.
bool RanksShareEntries(const PeerView& peers, int max_entries) {
  constexpr int kTilesLess = 2;
  if (peers.size == 1 || peers.num_multiprocessors != NumMultiprocessors()) return false;
  const int of_rank = (max_entries - 1) / peers.size + 1, half = NumMultiprocessors() / 2;
  const auto tiles = [](int entries, int blocks) {
    return (entries - 1) / (blocks * kDecodeGroups * kIndexTile) + 1;
  };
  const int blocks = DecodeBlocks(1, peers.size, max_entries, half);
  return of_rank <= kMostOfHalf && tiles(max_entries, half) - tiles(of_rank, blocks) >= kTilesLess;
}
CudaGemmParams ProductsBehindSelection(const CudaGemmParams& products, const PeerView& peers,
                                       int max_entries) {
  return {.problems = {products.problems[1]},
          .num_problems = 1,
          .num_tokens = products.num_tokens,
          .x_is_early = true,
          .max_blocks = BlocksBehind(peers, max_entries)};
}

void Launch(const CudaIndexSelectParams& p, device::Stream& stream) {
  const int num_tokens = p.batch.num_tokens;
  if (num_tokens == 0) return;
  const bool makes_queries = p.product.w.tiles != nullptr;
  CHECK(!makes_queries || (num_tokens == 1 && p.product.w.col_blocks() == kResidentBlocks &&
                           p.product.w.rows == kDecodeHeads * kIndexDim &&
                           p.product.w.row_tiles() <= MakingBlocks()));
  CHECK(p.q_words == nullptr || TakesClusters(num_tokens, p.max_entries, p.topk));
  // Who awaits words that nobody tells waits for ever.
  CHECK(p.selected_words == nullptr || (makes_queries && p.any_scoring && p.max_entries > p.topk));
  SelectParams select{.batch = p.batch, .topk = p.topk, .selected = p.selected, .counts = p.counts};
  if (!p.any_scoring || p.max_entries <= p.topk) {
    LaunchKernel(SelectKernel, num_tokens, kSelectThreads, 0, stream, select);
    return;
  }
  CHECK_LE(p.num_heads, 64);
  CHECK_LE(p.topk, kMaxIndexTopk);
  CHECK_EQ(p.keys.entries_per_page, kIndexTile);
  CHECK_GE(p.workspace_bytes, MinIndexWorkspaceBytes(num_tokens, p.num_heads, p.max_entries));
  const int64_t fixed = FixedBytes(num_tokens, p.num_heads);
  IndexScoreParams score{.in = p,
                         .queries = {},
                         .scores = reinterpret_cast<float*>(p.workspace + fixed),
                         .stride = ScoreStride(p.max_entries)};
  select.scores = score.scores;
  select.stride = score.stride;
  if (IsDecode(num_tokens, p.num_heads)) {
    if (TakesClusters(num_tokens, p.max_entries, p.topk)) return SelectClusters(p, stream);
    if (!makes_queries) return SelectDecode<false, false>(p, score.scores, stream);
    return RanksShareEntries(p.peers, p.max_entries)
               ? SelectDecode<true, true>(p, score.scores, stream)
               : SelectDecode<true, false>(p, score.scores, stream);
  }
  SelectRounds(p, score, select, (p.workspace_bytes - fixed) / (score.stride * 4), stream);
}

}  // namespace fathom::kernels
