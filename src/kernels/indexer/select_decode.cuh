// Scores and selection of a step of few tokens in one launch: a token's entries are shared out
// among the blocks of a grid row, slices of 16 in turn; all of these run at once. A block scores
// its part on the tensor cores (keys are the rows of wgmma, heads its columns; a warpgroup takes
// tiles of 64 keys), keeps the scores in shared memory where they fit, and selects with the others
// (list_select.cuh), or alone (rank_select.cuh). Keys are copied before the wait: the kernel before
// the last one has written them. Where the blocks make the queries themselves, weights are, and the
// keys come when these are multiplied: a block has half of a head, and the first block of each two,
// a cluster, tells all blocks the head's query (query_tile.cuh, query_packets.cuh). Device code
// only.
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
  int most_blocks = 0;      // that select
  int part_words = 0;       // a bit for each entry that a block selects from alone
  int shared_entries = 0;   // scores that a block's shared memory holds
  float* scores = nullptr;  // [num_tokens, stride], where that is not enough
  int64_t stride = 0;
  ToldLists* lists = nullptr;  // [num_tokens], where a token has several parts
};

// The slices, kSlice entries each, of a token's entries that are this block's: its part and every
// parts-th behind it. Those that follow each other in the part are tiles.
template <bool kOfRanks>
struct PartSlices {
  static constexpr int kSlice = PartSlice(kOfRanks);
  static constexpr int kTileSlices = kIndexTile / kSlice;  // of a page, too
  int parts, count;

  PartSlices() = default;
  __device__ PartSlices(int visible, int part, int num_parts)
      : parts(num_parts), count((NumSlices(visible) - part + num_parts - 1) / num_parts) {}
  __device__ static int NumSlices(int entries) { return (entries + kSlice - 1) / kSlice; }
  __device__ int NumTiles() const { return (count + kTileSlices - 1) / kTileSlices; }
  __device__ int At(int i, int part) const { return i * parts + part; }
  // Of `visible` ones those of the part, and those of the parts before.
  __device__ int NumEntries(int visible, int part) const {
    return (count - 1) * kSlice + min(kSlice, visible - At(count - 1, part) * kSlice);
  }
  __device__ int NumBefore(int visible, int part) const {
    const int slices = NumSlices(visible);
    return (part * (slices / parts) + min(part, slices % parts)) * kSlice;
  }
};

// Keys of a group that are on their way or in use, stages * IndexPageBytes for each; part_words
// words of bits and shared_entries scores follow.
template <bool kOfRanks>
struct alignas(1024) SelectDecodeShared {
  DecodeQueries queries;
  uint2 fold_table[kFoldTable];
  uint64_t full[kDecodeGroups][kMaxSelectStages];
  QueryTileShared query_tile;
  RankBins<kSelectThreads> bins;
  union {
    RankSelectShared rank;
    ListSelectShared list;
  };
  // The block's, kept here while it scores.
  struct Part {
    PartSlices<kOfRanks> slices;
    int entries;
    float* scores;
    uint32_t number;
  } part;
};

// One warpgroup's tiles of a block's part: every kDecodeGroups-th from the first. Slices of pages
// of keys are copied to shared memory, several tiles ahead, where a tile is as a page, and become
// operands of wgmma in registers: warps need not meet, but where a stage is filled again.
template <config::IndexKeyDType kType, bool kOfRanks>
class DecodeScorer {
  using Slices = PartSlices<kOfRanks>;

 public:
  // `pages`: the block's stages.
  __device__ DecodeScorer(const SelectDecodeParams& params, SelectDecodeShared<kOfRanks>& shared,
                          uint8_t* pages, int token, const Slices& slices)
      : keys_(params.in.keys),
        peers_(params.in.peers),
        s_(shared),
        table_(params.in.batch.block_tables +
               int64_t{params.in.batch.token_seq[token]} * params.in.batch.max_blocks),
        stages_(params.stages) {
    pages_ = pages + group() * stages_ * kPageBytes;
    if (stage() >= stages_) return;
    const int tile = group() + stage() * kDecodeGroups;
    place_ = PlaceOf(slices, tile);
    next_place_ = PlaceOf(slices, tile + stages_ * kDecodeGroups);
  }

  // Before the wait: the first tiles' keys.
  __device__ void Prefetch() {
    if (thread() % 32 == 0) {  // of the warp's stages: racecheck does not follow more lanes
      const int last = HasFirstStage() ? kFirstStages : kMaxSelectStages;
      for (int i = stage(); i < last; i += 2) BarrierInit(s_.full[group()] + i, kTileSlices);
      BarrierInitFence();
    }
    __syncwarp();
    if (stage() < kFirstStages && stage() < stages_) Copy(place_);
  }
  // Of the first warps of a warpgroup, which have nothing to do in PrefetchRest.
  static constexpr int kFirstStages = 2, kFirstThreads = kFirstStages * 32;
  __device__ static bool HasFirstStage() { return thread() / 32 < kFirstStages; }
  // When the queries are there, which do not queue behind all keys. Run comes after a
  // __syncthreads.
  __device__ void PrefetchRest() {
    if (stage() >= kFirstStages && stage() < stages_) Copy(place_);
  }

  // Of the block's part its scores, slice behind slice, counted in the bins.
  __device__ void Run() {
    const int num_tiles = s_.part.slices.NumTiles();
    const DecodeWeights weights(s_.queries);
    const uint64_t queries = SmemDescriptor(SharedAddress(s_.queries.codes));
    int from = 0;
    uint32_t parity = 0;
    // Not unrolled: most steps run it a few times, and fetching instructions takes longer.
#pragma unroll 1
    for (int tile = group(); tile < num_tiles; tile += kDecodeGroups) {
      BarrierWait(s_.full[group()] + from, parity);
      IndexKeyRows<kType> keys;
      keys.Load(pages_ + from * kPageBytes, s_.fold_table, row(), thread() % 4);
      const int next = tile + stages_ * kDecodeGroups;
      if (next < num_tiles) {
        NamedBarrier(1 + group(), 128);  // all have read the tile
        if (stage() == from) {
          Copy(next_place_);
          next_place_ = PlaceOf(s_.part.slices, next + stages_ * kDecodeGroups);
        }
      }
      Score(tile, keys, queries, weights);
      if (++from == stages_) from = 0, parity ^= 1;
    }
  }

 private:
  static constexpr int kPageBytes = IndexPageBytes(kType), kSlice = Slices::kSlice;
  static constexpr int kTileSlices = Slices::kTileSlices, kScaleBytes = 4 * kSlice;
  static constexpr int kCodeBytes = kPageBytes / kTileSlices - kScaleBytes;

  __device__ static int group() { return static_cast<int>(threadIdx.x) / 128; }
  __device__ static int thread() { return static_cast<int>(threadIdx.x) % 128; }
  // That the thread fills a slice of: the first two warps one each, the others the rest.
  static_assert(2 + 2 * (32 / kTileSlices) >= kMaxSelectStages);
  __device__ static int stage() {
    const int warp = thread() / 32, more = thread() % 32 / kTileSlices;
    return HasFirstStage() ? (more == 0 ? warp : kMaxSelectStages) : warp + 2 * more;
  }
  __device__ static int slice() { return thread() % kTileSlices; }  // that the thread copies
  // Where the thread's slice of the part's tile is: the page's, and in it. -1: nowhere.
  __device__ int PlaceOf(const Slices& slices, int tile) const {
    const int i = tile * kTileSlices + slice();
    if (i >= slices.count) return -1;
    const int at = slices.At(i, PartOfBlock<kOfRanks>(peers_));
    return table_[at / kTileSlices] * kTileSlices + at % kTileSlices;
  }
  __device__ void Copy(int place) {
    uint64_t* const full = s_.full[group()] + stage();
    if (place < 0) return BarrierArrive(full);
    BarrierExpectBytes(full, kCodeBytes + kScaleBytes);
    const DeviceEntry from = EntryAt(keys_, place / kTileSlices, place % kTileSlices * kSlice);
    uint8_t* const to = pages_ + stage() * kPageBytes;
    BulkCopyOnce(to + slice() * kCodeBytes, from.data, kCodeBytes, full);
    BulkCopyOnce(to + kTileSlices * kCodeBytes + slice() * kScaleBytes, from.scales, kScaleBytes,
                 full);
  }
  __device__ static int row() { return thread() / 32 * 16 + thread() % 32 / 4; }

  __device__ void Score(int tile, IndexKeyRows<kType>& keys, uint64_t queries,
                        const DecodeWeights& weights) {
    const float score = ScoreKeyRows(keys, queries, weights);
    const int place = tile * kIndexTile + row() + thread() % 2 * 8;
    if (thread() % 4 >= 2 || place >= s_.part.entries) return;
    s_.part.scores[place] = score;
    s_.bins.Count(ScoreBin(score));
  }

  const PagedEntries& keys_;
  const PeerView& peers_;
  SelectDecodeShared<kOfRanks>& s_;
  const int32_t* table_;
  int stages_;
  uint8_t* pages_;
  int place_ = -1, next_place_ = -1;  // of what the thread copies to its stage
};

// 16 warps, four heads each.
__device__ inline void MakeIndexQueries(const CudaIndexSelectParams& p, int token,
                                        const IndexAngles<kQueryLanes>& angles,
                                        DecodeQueries& queries) {
  static_assert(kSelectThreads / kQueryLanes == kDecodeHeads);
  const int lane = threadIdx.x % 32, head = static_cast<int>(threadIdx.x) / kQueryLanes;
  const IndexQueryRow<kQueryLanes> query(
      p, IndexQueryInput<kQueryLanes>::Load(p, token, head, lane), angles, lane);
  StoreQueryCodes(queries.codes, head, lane, query);
  if (lane % kQueryLanes == 0) queries.weights[head] = 0.5f * query.weight;
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

// kOfRanks: a token's entries are shared out among the blocks of all ranks, block i of each rank
// next to those of the others.
template <config::IndexKeyDType kType, bool kMakesQueries, bool kOfRanks>
__global__ void __maxnreg__(SelectRegisters(kMakesQueries))
    SelectDecodeKernel(const __grid_constant__ SelectDecodeParams p) {
  extern __shared__ uint8_t dynamic[];
  auto& shared = AlignedShared<SelectDecodeShared<kOfRanks>>(dynamic);
  auto* const pages = reinterpret_cast<uint8_t*>(&shared + 1);
  const int token = blockIdx.y, block = blockIdx.x;
  QueryTile tile(p.in.product, block, shared.query_tile,
                 *reinterpret_cast<QueryTile::Weights*>(pages));
  if (kMakesQueries && threadIdx.x < 32 && tile.exists()) tile.Prefetch();
  const uint32_t number = p.lists != nullptr ? ValueOf(p.in.number) : 0;
  const bool padding = p.in.batch.token_seq[token] < 0;
  const int visible = (p.in.batch.positions[token] + 1) / 4;
  const int wanted = visible <= kEntriesOfOneBlock ? 1 : (visible - 1) / kEntriesOfPart + 1;
  const int blocks = min(p.most_blocks, wanted);
  if (padding || visible <= p.in.topk || (block >= blocks && !kMakesQueries)) {
    WaitForPredecessor();
    AllowSuccessor();
    if (kMakesQueries && threadIdx.x < 32 && tile.exists()) tile.AwaitWeights();
    if (padding || block > 0) return;
    if (threadIdx.x == 0) p.in.counts[token] = visible;
    const Selected selected = SelectedOf<kMakesQueries>(p.in, token, number);
    for (int i = threadIdx.x; i < visible; i += kSelectThreads) selected.Store(i, i);
    return;
  }
  // Of a block that only makes queries not used.
  const int part = PartOfBlock<kOfRanks>(p.in.peers);
  const PartSlices<kOfRanks> slices(visible, part, blocks * (kOfRanks ? p.in.peers.size : 1));
  const int entries = slices.NumEntries(visible, part);
  auto* const bits = reinterpret_cast<uint32_t*>(pages + p.page_bytes);
  float* scores = entries <= p.shared_entries
                      ? reinterpret_cast<float*>(bits + p.part_words)
                      : p.scores + token * p.stride + slices.NumBefore(visible, part);
  DecodeScorer<kType, kOfRanks> scorer(p, shared, pages, token, slices);
  if (threadIdx.x < kFoldTable) shared.fold_table[threadIdx.x] = FoldedCodes(threadIdx.x);
  shared.bins.Clear();
  if constexpr (kMakesQueries) {
    const IndexAngles<32> angles(p.in, token, threadIdx.x % 32);
    if (threadIdx.x < 32 && tile.exists()) tile.KeepScales();
    ClusterSync();
    WaitForPredecessor();
    AllowSuccessor();
    if (threadIdx.x < kResidentThreads && tile.exists()) tile.Multiply();
    if (block < blocks) {
      __syncthreads();  // pages come where weights were
      scorer.Prefetch();
    }
    if (block % kHeadTiles == 0 && tile.exists()) {
      TellHead(p.in, tile, block / kHeadTiles, angles, number);
    }
    if (block >= blocks) return;
    if (scorer.HasFirstStage()) {
      constexpr int kThreads = scorer.kFirstThreads;  // of each warpgroup
      const int thread = threadIdx.x / 128 * kThreads + threadIdx.x % kThreads;
      AwaitQueries<kDecodeGroups * kThreads>(thread, p.in.query_packets, number, shared.queries);
    } else {
      AwaitTold(p.in.query_packets, number);
    }
  } else {
    const IndexAngles<kQueryLanes> angles(p.in, token, threadIdx.x % 32);
    scorer.Prefetch();
    WaitForPredecessor();
    AllowSuccessor();
    MakeIndexQueries(p.in, token, angles, shared.queries);
  }
  scorer.PrefetchRest();
  if (threadIdx.x == 0) {
    if (block == 0) p.in.counts[token] = p.in.topk;
    shared.part = {slices, entries, scores, number};
  }
  __syncthreads();
  scorer.Run();
  const auto& own = shared.part;
  const Selected selected = SelectedOf<kMakesQueries>(p.in, token, own.number);
  if (!kOfRanks && own.slices.parts == 1) {
    RankSelect(shared.rank, shared.bins.bins, reinterpret_cast<uint32_t*>(pages + p.page_bytes),
               own.scores, own.entries, p.in.topk)
        .Run(selected);
  } else {
    ListSelect<kSelectThreads, kOfRanks>(
        shared.list, shared.bins, *reinterpret_cast<ListSelectWorkspace*>(pages), own.scores,
        own.entries, p.in.topk, own.slices.parts, p.in.peers, p.lists[token], own.number)
        .Run(selected);
  }
}

}  // namespace fathom::kernels
