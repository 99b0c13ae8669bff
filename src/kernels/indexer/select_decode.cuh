// Scores and selection of a step of few tokens in one launch: a token's entries are shared out
// among the blocks of a grid row, all of which run at once. A block scores its part on the tensor
// cores (keys are the rows of wgmma, heads its columns; a warpgroup takes tiles of 64 keys), keeps
// the scores in shared memory where they fit, and selects with the others (list_select.cuh), or
// alone (rank_select.cuh). Keys are copied before the wait: the kernel before the last one has
// written them. Where the blocks make the queries themselves, weights are, and the keys come when
// these are multiplied: a block has half of a head, and the first block of each two, a cluster,
// tells all blocks the head's query (query_tile.cuh, query_packets.cuh). Device code only.
#pragma once

#include "kernels/aligned_shared.cuh"
#include "kernels/indexer/decode_scores.cuh"
#include "kernels/indexer/list_select.cuh"
#include "kernels/indexer/query_packets.cuh"
#include "kernels/indexer/query_tile.cuh"
#include "kernels/indexer/rank_select.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {

inline constexpr int kDecodeGroups = kSelectThreads / 128;
// A block alone selects from this many; from more, blocks of at least kEntriesOfPart each.
inline constexpr int kEntriesOfOneBlock = 2048, kEntriesOfPart = 512;
inline constexpr int kMaxSelectStages = 6;

struct SelectDecodeParams {
  CudaIndexSelectParams in;
  int stages = 0;           // of a group's keys
  int page_bytes = 0;       // of all groups' stages, a row tile's weights before, lists behind
  int most_parts = 0;       // of the blocks so many select
  int part_words = 0;       // a bit for each entry that a block selects from alone
  int shared_entries = 0;   // scores that a block's shared memory holds
  float* scores = nullptr;  // [num_tokens, stride], where that is not enough
  int64_t stride = 0;
  ToldLists* lists = nullptr;  // [num_tokens], where a token has several blocks
};

// Keys of a group that are on their way or in use, stages * IndexPageBytes for each; part_words
// words of bits and shared_entries scores follow.
struct alignas(1024) SelectDecodeShared {
  DecodeQueries queries;
  uint2 fold_table[kFoldTable];
  uint64_t full[kDecodeGroups][kMaxSelectStages];
  QueryTileShared query_tile;
  RankBins bins;
  union {
    RankSelectShared rank;
    ListSelectShared list;
  };
  // The block's, kept here while it scores.
  struct Part {
    int parts, first, end;  // entries
    float* scores;
    uint32_t number;
  } part;
};

// One warpgroup's tiles of a block's part: every kDecodeGroups-th from the first. Pages of keys are
// copied to shared memory, several ahead, and become operands of wgmma in registers: warps need
// not meet, but where a stage is filled again.
template <config::IndexKeyDType kType>
class DecodeScorer {
 public:
  // Tiles [first, end) of the part, entries [.., num_entries) of the token. `pages`: the block's
  // stages.
  __device__ DecodeScorer(const SelectDecodeParams& params, SelectDecodeShared& shared,
                          uint8_t* pages, int token, int first, int end, int num_entries,
                          float* scores, bool sums)
      : keys_(params.in.keys),
        s_(shared),
        table_(params.in.batch.block_tables +
               int64_t{params.in.batch.token_seq[token]} * params.in.batch.max_blocks),
        first_(first),
        end_(end),
        num_entries_(num_entries),
        stages_(params.stages),
        scores_(scores),
        sums_(sums) {
    group_ = threadIdx.x / 128;
    thread_ = threadIdx.x % 128;
    pages_ = pages + group_ * stages_ * kPageBytes;
    stage_ = thread_ / 32 + thread_ % 32 * 4;
    if (stage_ >= stages_) return;
    const int tile = first_ + group_ + stage_ * kDecodeGroups;
    page_ = PageOf(tile), next_page_ = PageOf(tile + stages_ * kDecodeGroups);
  }

  // Before the wait: the first tiles' keys.
  __device__ void Prefetch() {
    if (stage_ >= stages_) return;
    BarrierInit(s_.full[group_] + stage_, 1);
    BarrierInitFence();
    if (page_ >= 0 && stage_ < kFirstStages) Copy(page_);
  }
  // When the queries are there, which do not queue behind all keys. Run comes after a
  // __syncthreads.
  __device__ void PrefetchRest() {
    if (stage_ >= kFirstStages && stage_ < stages_ && page_ >= 0) Copy(page_);
  }

  // Scores into scores[entry - 64 first], counted in the bins.
  __device__ void Run() {
    const DecodeWeights weights(s_.queries);
    const uint64_t queries = SmemDescriptor(SharedAddress(s_.queries.codes));
    int stage = 0;
    uint32_t parity = 0;
    // Not unrolled: most steps run it a few times, and fetching instructions takes longer.
#pragma unroll 1
    for (int tile = first_ + group_; tile < end_; tile += kDecodeGroups) {
      BarrierWait(s_.full[group_] + stage, parity);
      IndexKeyRows<kType> keys;
      keys.Load(pages_ + stage * kPageBytes, s_.fold_table, row(), thread_ % 4);
      const int next = tile + stages_ * kDecodeGroups;
      if (next < end_) {
        NamedBarrier(1 + group_, 128);  // all have read the page
        if (stage_ == stage) {
          Copy(next_page_);
          next_page_ = PageOf(next + stages_ * kDecodeGroups);
        }
      }
      Score(tile, keys, queries, weights);
      if (++stage == stages_) stage = 0, parity ^= 1;
    }
  }

 private:
  static constexpr int kPageBytes = IndexPageBytes(kType);
  static constexpr int kFirstStages = 2;

  __device__ int PageOf(int tile) const { return tile < end_ ? table_[tile] : -1; }
  __device__ void Copy(int page) {
    uint64_t* const full = s_.full[group_] + stage_;
    BarrierExpectBytes(full, kPageBytes);
    BulkCopyOnce(pages_ + stage_ * kPageBytes, EntryAt(keys_, page, 0).data, kPageBytes, full);
  }
  __device__ int row() const { return thread_ / 32 * 16 + thread_ % 32 / 4; }

  __device__ void Score(int tile, IndexKeyRows<kType>& keys, uint64_t queries,
                        const DecodeWeights& weights) {
    const float score = ScoreKeyRows(keys, queries, weights);
    const int entry = tile * kIndexTile + row() + thread_ % 2 * 8;
    if (thread_ % 4 >= 2 || entry >= num_entries_) return;
    scores_[entry - first_ * kIndexTile] = score;
    s_.bins.Count(ScoreBin(score), sums_);
  }

  const PagedEntries& keys_;
  SelectDecodeShared& s_;
  const int32_t* table_;
  int first_, end_, num_entries_, stages_;
  float* scores_;
  bool sums_;
  uint8_t* pages_;
  int group_, thread_;
  int stage_;                       // the one that this thread fills, one of each warp first
  int page_ = -1, next_page_ = -1;  // with these pages
};

// 16 warps, four heads each.
__device__ inline void MakeIndexQueries(const CudaIndexSelectParams& p, int token,
                                        const IndexAngles<kQueryLanes>& angles,
                                        SelectDecodeShared& shared) {
  static_assert(kSelectThreads / kQueryLanes == kDecodeHeads);
  const int lane = threadIdx.x % 32, head = static_cast<int>(threadIdx.x) / kQueryLanes;
  const IndexQueryRow<kQueryLanes> query(
      p, IndexQueryInput<kQueryLanes>::Load(p, token, head, lane), angles, lane);
  StoreQueryCodes(shared.queries.codes, head, lane, query);
  if (lane % kQueryLanes == 0) shared.queries.weights[head] = 0.5f * query.weight;
  FenceSharedForWgmma();
}

// Of the one token, by the cluster's first block: a warp that has no keys to ask for first.
__device__ inline void TellHead(const CudaIndexSelectParams& p, const QueryTile& tile, int head,
                                const IndexAngles<32>& angles, uint32_t number) {
  if (threadIdx.x / 32 != kSelectThreads / 32 - 1) return;
  IndexQueryInput<32> in;
  in.LoadProjected(p, 0, head);
  tile.AwaitHead(in.pairs);
  TellQuery(IndexQueryRow<32>(p, in, angles, threadIdx.x % 32), head, p.query_packets, number);
}

template <bool kMakesQueries>
__device__ inline Selected SelectedOf(const CudaIndexSelectParams& p, int token, uint32_t number) {
  const int64_t first = int64_t{token} * p.topk;
  if (!kMakesQueries || p.selected_words == nullptr) return {p.selected + first};
  return {.words = p.selected_words + first, .number = number};
}

// Where the block makes queries, it finds room beside the prologue's blocks and those of the
// products that follow.
constexpr int SelectRegisters(bool makes_queries) { return makes_queries ? 88 : 128; }

template <config::IndexKeyDType kType, bool kMakesQueries>
__global__ void __maxnreg__(SelectRegisters(kMakesQueries))
    SelectDecodeKernel(const __grid_constant__ SelectDecodeParams p) {
  extern __shared__ uint8_t dynamic[];
  auto& shared = AlignedShared<SelectDecodeShared>(dynamic);
  auto* const pages = reinterpret_cast<uint8_t*>(&shared + 1);
  const int token = blockIdx.y, part = blockIdx.x;
  QueryTile tile(p.in.product, part, shared.query_tile,
                 *reinterpret_cast<QueryTile::Weights*>(pages));
  if (kMakesQueries && threadIdx.x < 32 && tile.exists()) tile.Prefetch();
  const uint32_t number = p.lists != nullptr ? ValueOf(p.in.number) : 0;
  const bool padding = p.in.batch.token_seq[token] < 0;
  const int visible = (p.in.batch.positions[token] + 1) / 4;
  const int wanted = visible <= kEntriesOfOneBlock ? 1 : (visible - 1) / kEntriesOfPart + 1;
  const int parts = min(p.most_parts, wanted);
  if (padding || visible <= p.in.topk || (part >= parts && !kMakesQueries)) {
    WaitForPredecessor();
    AllowSuccessor();
    if (kMakesQueries && threadIdx.x < 32 && tile.exists()) tile.AwaitWeights();
    if (padding || part > 0) return;
    if (threadIdx.x == 0) p.in.counts[token] = visible;
    const Selected selected = SelectedOf<kMakesQueries>(p.in, token, number);
    for (int i = threadIdx.x; i < visible; i += kSelectThreads) selected.Store(i, i);
    return;
  }
  const int tiles = (visible + kIndexTile - 1) / kIndexTile, each = (tiles + parts - 1) / parts;
  const int first = min(part * each, tiles), end = min(first + each, tiles);
  auto* const bits = reinterpret_cast<uint32_t*>(pages + p.page_bytes);
  float* scores = each * kIndexTile <= p.shared_entries
                      ? reinterpret_cast<float*>(bits + p.part_words)
                      : p.scores + token * p.stride + first * kIndexTile;
  DecodeScorer<kType> scorer(p, shared, pages, token, first, end, visible, scores, parts > 1);
  if (threadIdx.x < kFoldTable) shared.fold_table[threadIdx.x] = FoldedCodes(threadIdx.x);
  shared.bins.template Clear<kSelectThreads>();
  if constexpr (kMakesQueries) {
    const IndexAngles<32> angles(p.in, token, threadIdx.x % 32);
    if (threadIdx.x < 32 && tile.exists()) tile.KeepScales();
    ClusterSync();
    WaitForPredecessor();
    AllowSuccessor();
    if (threadIdx.x < kResidentThreads && tile.exists()) tile.Multiply();
    if (part < parts) {
      __syncthreads();  // pages come where weights were
      scorer.Prefetch();
    }
    if (part % kHeadTiles == 0 && tile.exists()) {
      TellHead(p.in, tile, part / kHeadTiles, angles, number);
    }
    if (part >= parts) return;
    AwaitQueries<kSelectThreads>(p.in.query_packets, number, shared.queries);
  } else {
    const IndexAngles<kQueryLanes> angles(p.in, token, threadIdx.x % 32);
    scorer.Prefetch();
    WaitForPredecessor();
    AllowSuccessor();
    MakeIndexQueries(p.in, token, angles, shared);
  }
  scorer.PrefetchRest();
  if (threadIdx.x == 0) {
    if (part == 0) p.in.counts[token] = p.in.topk;
    shared.part = {parts, min(first * kIndexTile, visible), min(end * kIndexTile, visible), scores,
                   number};
  }
  __syncthreads();
  scorer.Run();
  const SelectDecodeShared::Part& own = shared.part;
  const Selected selected = SelectedOf<kMakesQueries>(p.in, token, own.number);
  if (own.parts == 1) {
    RankSelect(shared.rank, shared.bins.bins, reinterpret_cast<uint32_t*>(pages + p.page_bytes),
               own.scores, own.end, p.in.topk)
        .Run(selected);
  } else {
    ListSelect<kSelectThreads>(
        shared.list, shared.bins, *reinterpret_cast<ListSelectWorkspace*>(pages), own.scores,
        own.first, own.end, p.in.topk, part, own.parts, p.lists[token], own.number)
        .Run(selected);
  }
}

}  // namespace fathom::kernels
