// Index queries, scores and selection: three kernels, the last two in rounds when the workspace
// does not hold all scores.
#include <algorithm>

#include "kernels/indexer/index_scores.cuh"
#include "kernels/indexer/top_k.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {
namespace {

using config::IndexKeyDType;

constexpr int kQueryThreads = 256;  // a warp a head

// One warp a (token, head row); rows past num_heads become zero.
__global__ void __launch_bounds__(kQueryThreads)
    IndexQueryKernel(const __grid_constant__ CudaIndexSelectParams p, IndexQueries out,
                     int head_rows) {
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t row = int64_t{blockIdx.x} * (kQueryThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, head = static_cast<int>(row % head_rows);
  const int64_t token = row / head_rows;
  if (token >= p.batch.num_tokens || ScoredEntries(p.batch, p.topk, static_cast<int>(token)) == 0) {
    return;
  }
  const IndexQueryRow query = MakeIndexQuery(p, token, head, lane);
  *reinterpret_cast<uint32_t*>(out.codes + QueryOffset(row, lane)) = query.codes;
  if (lane == 0) out.weights[row] = query.weight;
}

struct SelectParams {
  CudaBatch batch;
  int topk = 0;
  int first_token = 0;
  const float* scores = nullptr;
  int64_t stride = 0;
  int32_t* selected = nullptr;
  int32_t* counts = nullptr;
};

__global__ void __launch_bounds__(kTopkThreads) SelectKernel(SelectParams p) {
  extern __shared__ uint64_t topk_shared[];
  const int token = p.first_token + blockIdx.x;
  const bool padding = p.batch.token_seq[token] < 0;
  const int visible = (p.batch.positions[token] + 1) / 4;
  WaitForPredecessor();
  AllowSuccessor();
  if (padding) return;
  int32_t* selected = p.selected + int64_t{token} * p.topk;
  if (threadIdx.x == 0) p.counts[token] = min(visible, p.topk);
  if (visible <= p.topk) {
    for (int i = threadIdx.x; i < visible; i += kTopkThreads) selected[i] = i;
    return;
  }
  auto& shared = *reinterpret_cast<TopkShared*>(topk_shared);
  TopkRow(p.scores + blockIdx.x * p.stride, visible, p.topk, shared,
          reinterpret_cast<uint32_t*>(&shared + 1))
      .Run(selected);
}

// Decode: a row's entries are shared out among up to gridDim.x blocks.
struct SharedRows {
  TopkCounters* counters = nullptr;  // [num_tokens]
  uint64_t* candidates = nullptr;    // [num_tokens, kTopkCandidates]
  uint32_t* bits = nullptr;          // [num_tokens, stride / 32]
};
constexpr int kEntriesOfPart = 8192;  // at least

__global__ void __launch_bounds__(kTopkThreads)
    SelectSharedKernel(SelectParams p, SharedRows rows) {
  extern __shared__ uint64_t topk_shared[];
  const int token = blockIdx.y, part = blockIdx.x;
  const bool padding = p.batch.token_seq[token] < 0;
  const int visible = (p.batch.positions[token] + 1) / 4;
  WaitForPredecessor();
  AllowSuccessor();
  if (padding) return;
  int32_t* selected = p.selected + int64_t{token} * p.topk;
  const int wanted = (visible + kEntriesOfPart - 1) / kEntriesOfPart;
  const int parts = max(1, min(static_cast<int>(gridDim.x), wanted));
  if (part >= parts) return;
  if (part == 0 && threadIdx.x == 0) p.counts[token] = min(visible, p.topk);
  if (visible <= p.topk) {
    for (int i = threadIdx.x; i < visible; i += kTopkThreads) selected[i] = i;
    return;
  }
  auto& shared = *reinterpret_cast<TopkShared*>(topk_shared);
  uint32_t* bits = rows.bits + token * (p.stride / 32);
  uint64_t* candidates = rows.candidates + int64_t{token} * kTopkCandidates;
  TopkRow row(p.scores + token * p.stride, visible, p.topk, shared,
              reinterpret_cast<uint32_t*>(&shared + 1));
  const int words = (visible + 31) / 32, per_part = (words + parts - 1) / parts;
  const int first = part * per_part;
  if (row.RunPart(rows.counters[token], first, min(first + per_part, words), parts, bits,
                  candidates)) {
    row.Finish(rows.counters[token], bits, candidates, selected);
  }
}

template <IndexKeyDType kType, int kHeads, int kTokens, int kGroups>
void LaunchScores(const IndexScoreParams& p, int num_splits, device::Stream& stream) {
  LaunchKernel(IndexScoreKernel<kType, kHeads, kTokens, kGroups>,
               dim3(num_splits, (p.num_tokens + kTokens - 1) / kTokens), kGroups * 128,
               sizeof(IndexScoreShared<kHeads, kTokens, kGroups>) + 1024, stream, p);
}

constexpr int kMultiprocessors = 132;

template <int kHeads, int kTokens, int kGroups>
void LaunchScores(const IndexScoreParams& p, device::Stream& stream) {
  const int tiles = (p.in.max_entries + kIndexTile - 1) / kIndexTile;
  const int token_blocks = (p.num_tokens + kTokens - 1) / kTokens;
  const int splits =
      std::clamp(kMultiprocessors / token_blocks, 1, (tiles + kGroups - 1) / kGroups);
  if (p.in.dtype == IndexKeyDType::kFp4) {
    LaunchScores<IndexKeyDType::kFp4, kHeads, kTokens, kGroups>(p, splits, stream);
  } else {
    LaunchScores<IndexKeyDType::kFp8, kHeads, kTokens, kGroups>(p, splits, stream);
  }
}

int HeadRows(int num_heads) { return num_heads <= 8 ? 8 : 64; }
// Steps of few tokens: queries are prepared where they are used, rows are shared out.
bool IsDecode(int num_tokens, int num_heads) {
  return num_tokens <= kMaxIndexDecodeTokens && HeadRows(num_heads) == 64;
}
int64_t ScoreStride(int max_entries) { return (int64_t{max_entries} + 63) / 64 * 64; }
// Besides the scores: a row's candidates and bits, or the queries.
int64_t FixedBytes(int num_tokens, int num_heads, int max_entries) {
  if (IsDecode(num_tokens, num_heads)) {
    return num_tokens * (kTopkCandidates * 8 + ScoreStride(max_entries) / 8);
  }
  return int64_t{num_tokens} * HeadRows(num_heads) * (kIndexDim + int64_t{sizeof(float)});
}

void SelectDecode(const CudaIndexSelectParams& p, IndexScoreParams score, SelectParams select,
                  device::Stream& stream) {
  score.num_tokens = p.batch.num_tokens;
  score.counters = reinterpret_cast<TopkCounters*>(p.counters);
  LaunchScores<64, 1, 4>(score, stream);
  SharedRows rows{.counters = score.counters,
                  .candidates = reinterpret_cast<uint64_t*>(p.workspace)};
  rows.bits =
      reinterpret_cast<uint32_t*>(rows.candidates + int64_t{p.batch.num_tokens} * kTopkCandidates);
  const int parts = std::clamp(2 * kMultiprocessors / p.batch.num_tokens, 1,
                               (p.max_entries + kEntriesOfPart - 1) / kEntriesOfPart);
  LaunchKernel(SelectSharedKernel, dim3(parts, p.batch.num_tokens), kTopkThreads,
               TopkSharedBytes(p.max_entries), stream, select, rows);
}

void SelectRounds(const CudaIndexSelectParams& p, IndexScoreParams score, SelectParams select,
                  int64_t round_tokens, device::Stream& stream) {
  const int num_tokens = p.batch.num_tokens, head_rows = HeadRows(p.num_heads);
  score.queries.codes = reinterpret_cast<uint8_t*>(p.workspace);
  score.queries.weights =
      reinterpret_cast<float*>(p.workspace + int64_t{num_tokens} * head_rows * kIndexDim);
  LaunchKernel(IndexQueryKernel, (num_tokens * head_rows + 7) / 8, kQueryThreads, 0, stream, p,
               score.queries, head_rows);
  for (int first = 0; first < num_tokens; first += score.num_tokens) {
    score.first_token = select.first_token = first;
    score.num_tokens = static_cast<int>(std::min<int64_t>(round_tokens, num_tokens - first));
    if (head_rows == 8) {
      LaunchScores<8, 8, 4>(score, stream);
    } else {
      LaunchScores<64, 2, 3>(score, stream);
    }
    LaunchKernel(SelectKernel, score.num_tokens, kTopkThreads, TopkSharedBytes(p.max_entries),
                 stream, select);
  }
}

}  // namespace

int64_t IndexCountersBytes() { return kMaxIndexDecodeTokens * int64_t{sizeof(TopkCounters)}; }
int64_t IndexWorkspaceBytes(int num_tokens, int num_heads, int max_entries) {
  return FixedBytes(num_tokens, num_heads, max_entries) + num_tokens * ScoreStride(max_entries) * 4;
}
int64_t MinIndexWorkspaceBytes(int num_tokens, int num_heads, int max_entries) {
  const int rows = IsDecode(num_tokens, num_heads) ? num_tokens : 1;
  return FixedBytes(num_tokens, num_heads, max_entries) + rows * ScoreStride(max_entries) * 4;
}

void Launch(const CudaIndexSelectParams& p, device::Stream& stream) {
  const int num_tokens = p.batch.num_tokens;
  if (num_tokens == 0) return;
  SelectParams select{.batch = p.batch, .topk = p.topk, .selected = p.selected, .counts = p.counts};
  if (!p.any_scoring || p.max_entries <= p.topk) {
    LaunchKernel(SelectKernel, num_tokens, kTopkThreads, 0, stream, select);
    return;
  }
  CHECK_LE(p.num_heads, 64);
  CHECK_EQ(p.keys.entries_per_page, kIndexTile);
  CHECK_GE(p.workspace_bytes, MinIndexWorkspaceBytes(num_tokens, p.num_heads, p.max_entries));
  const int64_t fixed = FixedBytes(num_tokens, p.num_heads, p.max_entries);
  IndexScoreParams score{.in = p,
                         .queries = {},
                         .scores = reinterpret_cast<float*>(p.workspace + fixed),
                         .stride = ScoreStride(p.max_entries)};
  select.scores = score.scores;
  select.stride = score.stride;
  if (IsDecode(num_tokens, p.num_heads)) return SelectDecode(p, score, select, stream);
  SelectRounds(p, score, select, (p.workspace_bytes - fixed) / (score.stride * 4), stream);
}

}  // namespace fathom::kernels
