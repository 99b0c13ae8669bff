// Index queries, scores and selection: three kernels, the last two in rounds when the workspace
// does not hold all scores.
#include <algorithm>

#include "kernels/indexer/index_scores.cuh"
#include "kernels/indexer/index_vector.cuh"
#include "kernels/indexer/top_k.cuh"
#include "kernels/launch.cuh"
#include "kernels/rope/rope.cuh"

namespace fathom::kernels {
namespace {

using config::IndexKeyDType;

constexpr int kQueryThreads = 256;  // a warp a head

// The values of lane l: 4 * l .. 4 * l + 3. Quantizes them as the keys are, as FP8 codes of one
// scale; returns that scale.
__device__ float QuantizeQuery(const float (&x)[4], IndexKeyDType dtype, uint32_t& codes) {
  const float max = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
  float v[4];
  float scale;
  if (dtype == IndexKeyDType::kFp4) {
    const uint32_t block = Fp4Scale(WarpMax<8>(max));
    const auto top = static_cast<uint32_t>(WarpMax(static_cast<float>(block)));
    const float inverse = Ue8m0Inverse(block);
    const float fold = exp2f(static_cast<float>(kFoldTop) - static_cast<float>(top - block));
    constexpr float kValues[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = Fp4Code(x[i] * inverse);
      float magnitude = 0;
#pragma unroll
      for (uint32_t c = 1; c < 8; ++c) magnitude = (code & 7u) == c ? kValues[c] : magnitude;
      v[i] = copysignf(magnitude * fold, x[i]);
    }
    scale = Ue8m0Value(top) * (1.0f / (1 << kFoldTop));
  } else {
    const uint32_t block = Fp8Scale(WarpMax(max));
    const float inverse = Ue8m0Inverse(block);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = x[i] * inverse;
    scale = Ue8m0Value(block);
  }
  codes = Fp8Codes(v[0], v[1]) | Fp8Codes(v[2], v[3]) << 16;
  return scale;
}

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
  uint32_t codes = 0;
  float weight = 0;
  if (head < p.num_heads) {
    const uint2 raw =
        reinterpret_cast<const uint2*>(p.q + (token * p.num_heads + head) * kIndexDim)[lane];
    float2 a = UnpackBf16(raw.x), b = UnpackBf16(raw.y);
    if (lane >= 16) {
      const float4 angles = reinterpret_cast<const float4*>(p.angles + token * kRopeDim)[lane - 16];
      a = RotatePair(a, {angles.x, angles.y});
      b = RotatePair(b, {angles.z, angles.w});
    }
    float x[4] = {RoundBf16(a.x), RoundBf16(a.y), RoundBf16(b.x), RoundBf16(b.y)};
    RotateIndexVectorWarp(x, lane);
    const float scale = QuantizeQuery(x, p.dtype, codes);
    const float projected = __bfloat162float(p.projected[token * p.projected_stride + head]);
    weight = RoundBf16(projected * p.weight_scale) * scale;
  }
  const int64_t offset =
      row / 8 * 1024 + row % 8 * 128 + ((lane / 4) ^ (row % 8)) * 16 + lane % 4 * 4;
  *reinterpret_cast<uint32_t*>(out.codes + offset) = codes;
  if (lane == 0) out.weights[row] = weight;
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
  WaitForPredecessor();
  AllowSuccessor();
  const int token = p.first_token + blockIdx.x;
  if (p.batch.token_seq[token] < 0) return;
  int32_t* selected = p.selected + int64_t{token} * p.topk;
  const int visible = (p.batch.positions[token] + 1) / 4;
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

template <IndexKeyDType kType, int kHeads, int kTokens, int kGroups>
void LaunchScores(const IndexScoreParams& p, int num_splits, device::Stream& stream) {
  LaunchKernel(IndexScoreKernel<kType, kHeads, kTokens, kGroups>,
               dim3(num_splits, (p.num_tokens + kTokens - 1) / kTokens), kGroups * 128,
               sizeof(IndexScoreShared<kHeads, kTokens, kGroups>) + 1024, stream, p);
}

template <IndexKeyDType kType>
void LaunchScores(const IndexScoreParams& p, int head_rows, int max_entries,
                  device::Stream& stream) {
  constexpr int kGroups = 4;
  const int tiles = (max_entries + kIndexTile - 1) / kIndexTile;
  const int most = (tiles + kGroups - 1) / kGroups;
  const auto splits = [&](int tokens) {
    return std::clamp(2 * 132 / ((p.num_tokens + tokens - 1) / tokens), 1, most);
  };
  if (head_rows == 8) return LaunchScores<kType, 8, 8, kGroups>(p, splits(8), stream);
  if (p.num_tokens <= 32) return LaunchScores<kType, 64, 1, kGroups>(p, splits(1), stream);
  LaunchScores<kType, 64, 2, kGroups>(p, splits(2), stream);
}

int HeadRows(int num_heads) { return num_heads <= 8 ? 8 : 64; }
int64_t QueryBytes(int num_tokens, int num_heads) {
  return int64_t{num_tokens} * HeadRows(num_heads) * (kIndexDim + int64_t{sizeof(float)});
}
int64_t ScoreStride(int max_entries) { return (int64_t{max_entries} + 63) / 64 * 64; }

}  // namespace

int64_t IndexWorkspaceBytes(int num_tokens, int num_heads, int max_entries) {
  return QueryBytes(num_tokens, num_heads) + num_tokens * ScoreStride(max_entries) * 4;
}
int64_t MinIndexWorkspaceBytes(int num_tokens, int num_heads, int max_entries) {
  return QueryBytes(num_tokens, num_heads) + ScoreStride(max_entries) * 4;
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
  const int head_rows = HeadRows(p.num_heads);
  IndexQueries queries{reinterpret_cast<uint8_t*>(p.workspace), nullptr};
  queries.weights =
      reinterpret_cast<float*>(p.workspace + int64_t{num_tokens} * head_rows * kIndexDim);
  LaunchKernel(IndexQueryKernel, (num_tokens * head_rows + 7) / 8, kQueryThreads, 0, stream, p,
               queries, head_rows);
  const int64_t query_bytes = QueryBytes(num_tokens, p.num_heads);
  IndexScoreParams score{.batch = p.batch,
                         .keys = p.keys,
                         .queries = queries,
                         .topk = p.topk,
                         .scores = reinterpret_cast<float*>(p.workspace + query_bytes),
                         .stride = ScoreStride(p.max_entries)};
  const int64_t fitting = (p.workspace_bytes - query_bytes) / (score.stride * 4);
  CHECK_GE(fitting, 1);
  select.scores = score.scores;
  select.stride = score.stride;
  for (int first = 0; first < num_tokens; first += score.num_tokens) {
    score.first_token = select.first_token = first;
    score.num_tokens = static_cast<int>(std::min<int64_t>(fitting, num_tokens - first));
    if (p.dtype == IndexKeyDType::kFp4) {
      LaunchScores<IndexKeyDType::kFp4>(score, head_rows, p.max_entries, stream);
    } else {
      LaunchScores<IndexKeyDType::kFp8>(score, head_rows, p.max_entries, stream);
    }
    LaunchKernel(SelectKernel, score.num_tokens, kTopkThreads, TopkSharedBytes(p.max_entries),
                 stream, select);
  }
}

}  // namespace fathom::kernels
