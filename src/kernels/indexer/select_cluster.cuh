// Scores and selection of a step of very few tokens at short contexts in one launch: a token is a
// cluster's. Each block makes an eighth of the queries and sends them to all; a warpgroup scores a
// tile of 64 keys, which it has widened before the wait, or a few; the scores go to the first
// block, which selects (few_select.cuh). What blocks send lands in the other's shared memory and
// counts on a barrier there. Device code only.
#pragma once

#include "kernels/aligned_shared.cuh"
#include "kernels/indexer/decode_scores.cuh"
#include "kernels/indexer/few_select.cuh"
#include "kernels/launch.cuh"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kClusterBlocks = 8, kClusterGroups = 3;
inline constexpr int kClusterThreads = 128 * kClusterGroups;
inline constexpr int kTilesAtOnce = kClusterBlocks * kClusterGroups;
inline constexpr int kMaxGroupTiles = (kMaxFewEntries / kIndexTile - 1) / kTilesAtOnce + 1;
// So that a block starts beside one of the query products, of 10 warps and 72 registers, and two
// share a multiprocessor.
inline constexpr int kClusterRegisters = 80;

struct SelectClusterParams {
  CudaIndexSelectParams in;
  int stages = 0;  // the most tiles of a warpgroup
};

// Pages of keys follow, `stages` of each warpgroup.
struct SelectClusterShared {
  DecodeQueries queries;
  uint2 fold_table[kFoldTable];
  uint64_t pages_full[kClusterGroups][kMaxGroupTiles], queries_full, scores_full;
  FewSelect<kClusterThreads>::Shared select;
};

// One head a warp: its codes and its weight to all blocks.
class QuerySender {
 public:
  // Before the wait. `full` of each block counts what it receives.
  __device__ QuerySender(const CudaIndexSelectParams& p, int token, DecodeQueries& queries,
                         uint64_t* full)
      : lane_(threadIdx.x % 32),
        head_(blockIdx.x * kHeads + threadIdx.x / 32),
        angles_(p, token, lane_) {
    const uint8_t* codes = queries.codes + QueryCodesOffset(head_, lane_);
#pragma unroll
    for (int r = 0; r < kClusterBlocks; ++r) codes_[r] = AddressInBlock(codes, r);
    weight_ = AddressInBlock(queries.weights + head_, lane_ % kClusterBlocks);
    codes_to_full_ = SharedAddress(full) - SharedAddress(codes);
    weight_to_full_ = SharedAddress(full) - SharedAddress(queries.weights + head_);
  }
  // When the products are there, or awaits their words.
  __device__ void Run(const CudaIndexSelectParams& p, int token) const {
    if (threadIdx.x >= 32 * kHeads) return;
    p.q_words == nullptr ? Send(p, IndexQueryInput<32>::Load(p, token, head_, lane_))
                         : Send(p, IndexQueryInput<32>::Await(p, token, head_, lane_));
  }

 private:
  __device__ void Send(const CudaIndexSelectParams& p, const IndexQueryInput<32>& in) const {
    const IndexQueryRow<32> query(p, in, angles_, lane_);
#pragma unroll
    for (const uint32_t codes : codes_) {
      SendInCluster(codes, __uint_as_float(query.codes[0]), codes + codes_to_full_);
    }
    if (lane_ < kClusterBlocks) {
      SendInCluster(weight_, 0.5f * query.weight, weight_ + weight_to_full_);
    }
  }

  static constexpr int kHeads = kDecodeHeads / kClusterBlocks;  // of a block

  int lane_, head_;
  IndexAngles<32> angles_;
  uint32_t codes_[kClusterBlocks];  // the lane's, in each block
  uint32_t weight_;                 // in one
  uint32_t codes_to_full_, weight_to_full_;
};

// A warpgroup's tiles, every kTilesAtOnce-th from `first` on: their pages are on their way from the
// beginning.
template <config::IndexKeyDType kType>
class ClusterScorer {
 public:
  // `pages`: the block's.
  __device__ ClusterScorer(const SelectClusterParams& p, SelectClusterShared& shared,
                           uint8_t* pages, int token, int num_entries)
      : s_(shared),
        full_(shared.pages_full[threadIdx.x / 128]),
        pages_(pages + threadIdx.x / 128 * p.stages * kPageBytes),
        num_entries_(num_entries),
        first_(threadIdx.x / 128 * kClusterBlocks + blockIdx.x) {
    const int thread = threadIdx.x % 128, tile = first_ + thread * kTilesAtOnce;
    if (thread >= p.stages) return;
    BarrierInit(full_ + thread, 1);
    BarrierInitFence();
    if (!IsTile(tile)) return;
    const CudaBatch& batch = p.in.batch;
    const int before_step = batch.num_computed[batch.token_seq[token]] / 4;
    is_fresh_ = p.in.q_words != nullptr && (tile + 1) * kIndexTile > before_step;
    if (!is_fresh_) Copy(p, token);
  }
  // Tiles that may hold entries of this step, when these are there and not before.
  __device__ void CopyFresh(const SelectClusterParams& p, int token) const {
    if (is_fresh_) Copy(p, token);
  }

  // After a __syncthreads(): widens the first tile.
  __device__ void WidenFirst() {
    if (IsTile(first_)) Widen(0);
  }
  // When the queries are there: sends all scores to the first block.
  __device__ void Run() {
    const uint32_t scores = AddressInBlock(s_.select.scores, 0);
    const uint32_t scores_full = AddressInBlock(&s_.scores_full, 0);
    const DecodeWeights weights(s_.queries);
    const uint64_t queries = SmemDescriptor(SharedAddress(s_.queries.codes));
    // Not unrolled: fetching instructions takes longer.
#pragma unroll 1
    for (int tile = first_, i = 0; IsTile(tile);) {
      const float score = ScoreKeyRows(keys_, queries, weights);
      const int entry = tile * kIndexTile + row() + threadIdx.x % 2 * 8;
      if (threadIdx.x % 4 < 2 && entry < num_entries_) {
        SendInCluster(scores + entry * sizeof(float), score, scores_full);
      }
      tile += kTilesAtOnce, ++i;
      if (IsTile(tile)) Widen(i);
    }
  }

 private:
  static constexpr int kPageBytes = IndexPageBytes(kType);

  // The page of the thread's tile.
  __device__ void Copy(const SelectClusterParams& p, int token) const {
    const int thread = threadIdx.x % 128, tile = first_ + thread * kTilesAtOnce;
    const CudaBatch& batch = p.in.batch;
    const int page = batch.block_tables[int64_t{batch.token_seq[token]} * batch.max_blocks + tile];
    BarrierExpectBytes(full_ + thread, kPageBytes);
    BulkCopy(pages_ + thread * kPageBytes, EntryAt(p.in.keys, page, 0).data, kPageBytes,
             full_ + thread);
  }
  __device__ bool IsTile(int tile) const { return tile * kIndexTile < num_entries_; }
  __device__ static int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
  __device__ void Widen(int i) {
    BarrierWait(full_ + i, 0);
    keys_.Load(pages_ + i * kPageBytes, s_.fold_table, row(), threadIdx.x % 4);
    keys_.Keep();
  }

  SelectClusterShared& s_;
  uint64_t* full_;
  uint8_t* pages_;
  int num_entries_, first_;
  bool is_fresh_ = false;
  IndexKeyRows<kType> keys_;
};

template <config::IndexKeyDType kType>
__global__ void __maxnreg__(kClusterRegisters)
    SelectClusterKernel(const __grid_constant__ SelectClusterParams p) {
  extern __shared__ uint8_t dynamic[];
  auto& shared = AlignedShared<SelectClusterShared>(dynamic);
  const int token = blockIdx.y;
  const bool padding = p.in.batch.token_seq[token] < 0, leads = blockIdx.x == 0;
  const int visible = (p.in.batch.positions[token] + 1) / 4;
  int32_t* selected = p.in.selected + int64_t{token} * p.in.topk;
  if (padding || visible <= p.in.topk) {
    WaitForPredecessor();
    AllowSuccessor();
    if (padding || !leads) return;
    if (threadIdx.x == 0) p.in.counts[token] = visible;
    for (int i = threadIdx.x; i < visible; i += kClusterThreads) selected[i] = i;
    return;
  }
  ClusterScorer<kType> scorer(p, shared, reinterpret_cast<uint8_t*>(&shared + 1), token, visible);
  if (threadIdx.x == kClusterThreads - 1) {
    BarrierInit(&shared.queries_full, 1);
    BarrierInit(&shared.scores_full, 1);
    BarrierInitFence();
    BarrierExpectBytes(&shared.queries_full, sizeof(DecodeQueries));
    if (leads) BarrierExpectBytes(&shared.scores_full, visible * sizeof(float));
  }
  if (threadIdx.x < kFoldTable) shared.fold_table[threadIdx.x] = FoldedCodes(threadIdx.x);
  FewSelect<kClusterThreads> select(shared.select, visible, p.in.topk);
  if (leads) select.Prepare();
  __syncthreads();
  ClusterArrive();
  const QuerySender sender(p.in, token, shared.queries, &shared.queries_full);
  // Beside the products: what is older than these is there when they have begun, and a block that
  // starts late waits for its first tile and for its queries at once.
  const bool beside = p.in.q_words != nullptr;
  if (beside) {
    AwaitBegun(p.in.number);
    scorer.CopyFresh(p, token);
  } else {
    scorer.WidenFirst();
  }
  ClusterWait();
  if (!beside) WaitForPredecessor();
  AllowSuccessor();
  sender.Run(p.in, token);
  if (beside) scorer.WidenFirst();
  if (leads && threadIdx.x == 0) p.in.counts[token] = p.in.topk;
  BarrierWaitCluster(&shared.queries_full, 0);
  FenceSharedForWgmma();
  scorer.Run();
  if (!leads) return;
  BarrierWaitCluster(&shared.scores_full, 0);
  select.Run(selected);
  if (beside) WaitForPredecessor();  // who waits for this launch, waits for both
}

}  // namespace fathom::kernels
