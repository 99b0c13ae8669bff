#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/gemm/gemm_stream_cuda.h"
#include "kernels/gemm/weight_stream.cuh"

namespace fathom::kernels {
namespace {

// How the items, problem after problem, are dealt out to the clusters: in rounds, every second one
// backwards, so that whoever got a long item first gets a short one next.
struct Deal {
  int first_item[kMaxGemmProblems + 1];
  int num_clusters;
  int split;

  __host__ __device__ int Item(int cluster, int round) const {
    return round * num_clusters + (round % 2 == 0 ? cluster : num_clusters - 1 - cluster);
  }
};

__host__ __device__ int BlocksEach(const GemmProblem& p, int split) {
  return (static_cast<int>(p.w.col_blocks()) + split - 1) / split;
}

// A cluster's items (weight_stream.cuh).
struct GemmItems {
  const CudaGemmParams& params;
  const Deal& deal;
  int cluster, rank;

  __device__ int count() const {
    const int items = deal.first_item[kMaxGemmProblems];
    const int rounds = items / deal.num_clusters;
    return rounds + (deal.Item(cluster, rounds) < items ? 1 : 0);
  }
  __device__ int known() const { return count(); }

  __device__ StreamItem operator()(int i) const {
    const int item = deal.Item(cluster, i);
    int index = 0;
    while (item >= deal.first_item[index + 1]) ++index;
    const GemmProblem& p = params.problems[index];
    const int tile = item - deal.first_item[index];
    const int row = tile * 128;
    const TileKind kind = p.w.kind;
    const auto col_blocks = static_cast<int>(p.w.col_blocks());
    const int each = BlocksEach(p, deal.split), first = rank * each;
    const bool fp8_x = kind == TileKind::kFp8, wide = kind == TileKind::kFp8AsBf16;
    const int64_t row_groups = fp8_x ? p.x_fp8.row_groups : p.x_bf16.row_groups;
    const int group = p.groups == 1 ? 0 : row / (static_cast<int>(p.w.rows) / p.groups);
    const int64_t x_block = int64_t{group * col_blocks + first} * (wide ? 2 : 1);
    const int64_t row_tile_bytes = col_blocks * TileMatrixBytes(kind);
    const std::byte* x = fp8_x ? reinterpret_cast<const std::byte*>(p.x_fp8.codes)
                               : reinterpret_cast<const std::byte*>(p.x_bf16.values);
    return {.info = {.kind = kind,
                     .num_blocks = min(each, col_blocks - first),
                     .num_tokens = static_cast<int>(params.num_tokens),
                     .place = {index, tile, 0}},
            .weights = p.w.tiles + row / 64 * row_tile_bytes + first * TileMatrixBytes(kind),
            .row_tile_bytes = row / 64 + 1 < p.w.row_tiles() ? row_tile_bytes : 0,
            .scales = p.w.scales == nullptr ? nullptr : p.w.scales + row / 128 * col_blocks + first,
            .scales_stride = 0,
            .x = x + x_block * row_groups * kTileBytes,
            .x_scales = fp8_x ? p.x_fp8.scales + x_block * row_groups * 8 : nullptr,
            .x_block_bytes = row_groups * kTileBytes,
            .x_scales_stride = row_groups * 8};
  }
};

// The tokens rank, rank + split, … of 128 rows.
template <typename Stream>
__device__ void WriteRows(const GemmProblem& p, int64_t row0, int num_tokens, const Stream& stream,
                          const float (*inbox)[Stream::kRows]) {
  const int row = static_cast<int>(threadIdx.x) % 64 * 2;
  if (row0 + row >= p.w.rows) return;
  for (int k = static_cast<int>(threadIdx.x) / 64;; k += Stream::kConsumers / 64) {
    const int token = k * stream.split() + stream.rank();
    if (token >= num_tokens) return;
    const float2 sum = stream.Sum2(inbox, k, row);
    const int64_t offset = token * p.y_stride + row0 + row;
    if (p.output == GemmOutput::kBf16) {
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.y) + offset) =
          __floats2bfloat162_rn(sum.x, sum.y);
    } else {
      *reinterpret_cast<float2*>(static_cast<float*>(p.y) + offset) = sum;
    }
  }
}

// One warp a token: 128 rows are one block of FP8 columns of y.
template <typename Stream>
__device__ void WriteFp8(const Fp8Tiles& y, int64_t row0, int num_tokens, const Stream& stream,
                         const float (*inbox)[Stream::kRows]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int k = static_cast<int>(threadIdx.x) / 32;; k += Stream::kWarps) {
    const int token = k * stream.split() + stream.rank();
    if (token >= num_tokens) return;
    const float4 sum = stream.Sum4(inbox, k, lane * 4);
    const float4 v{RoundBf16(sum.x), RoundBf16(sum.y), RoundBf16(sum.z), RoundBf16(sum.w)};
    const float largest =
        WarpMax(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    const uint32_t scale = Fp8Scale(largest);
    const float inverse = Ue8m0Inverse(scale);
    *reinterpret_cast<uint32_t*>(y.codes + Fp8TileOffset(token, row0 + lane * 4, y.row_groups)) =
        Fp8Codes(v.x * inverse, v.y * inverse) | Fp8Codes(v.z * inverse, v.w * inverse) << 16;
    if (lane == 0) y.scales[row0 / 128 * y.row_groups * 8 + token] = Ue8m0Value(scale);
  }
}

template <typename Stream>
struct Writer {
  const CudaGemmParams& params;
  const Stream& stream;

  __device__ void Begin(const StreamInfo&) const {}
  __device__ void Finish(const StreamInfo& info, const float (*inbox)[Stream::kRows]) const {
    const GemmProblem& p = params.problems[info.place[0]];
    const int64_t row = int64_t{info.place[1]} * 128;
    if (p.output == GemmOutput::kFp8Tiles) {
      WriteFp8(p.y_fp8, row, info.num_tokens, stream, inbox);
    } else {
      WriteRows(p, row, info.num_tokens, stream, inbox);
    }
  }
};

// Two blocks on a multiprocessor, this launch's and the next one's: 96 registers, 113 KB each.
// But widening takes all warps of a multiprocessor.
template <int kN, bool kWide>
using StreamOf =
    std::conditional_t<kWide, WeightStream<kN, StreamFormat::kWide, 2, 2, kN == 32 ? 3 : 4>,
                       WeightStream<kN, StreamFormat::kPlain, kN == 8 ? 2 : 1, 1,
                                    kN == 8    ? 3
                                    : kN == 16 ? 5
                                               : 4>>;

template <int kN, bool kWide>
__global__ void __launch_bounds__(kWide ? 544 : 288, kWide ? 1 : 2)
    GemmStreamKernel(const __grid_constant__ CudaGemmParams params,
                     const __grid_constant__ Deal deal) {
  using Stream = StreamOf<kN, kWide>;
  extern __shared__ __align__(1024) std::byte shared[];
  const int rank = static_cast<int>(blockIdx.x) % deal.split;
  Stream stream(*reinterpret_cast<typename Stream::Shared*>(shared), rank, deal.split);
  stream.Init();
  const GemmItems items{params, deal, static_cast<int>(blockIdx.x) / deal.split, rank};
  if (threadIdx.x >= Stream::kConsumers) return stream.Produce(items);
  stream.Consume(items.count(), Writer<Stream>{params, stream});
}

// The most blocks that the busiest cluster's block streams.
int64_t LongestShare(const CudaGemmParams& params, const Deal& deal) {
  std::vector<int64_t> shares(static_cast<size_t>(deal.num_clusters));
  const int item_cost = deal.split > 1 ? 2 : 1;  // its end, in column blocks
  int problem = 0;
  const int items = deal.first_item[kMaxGemmProblems];
  for (int place = 0; place < items; ++place) {
    const int round = place / deal.num_clusters, at = place % deal.num_clusters;
    const int cluster = round % 2 == 0 ? at : deal.num_clusters - 1 - at;
    while (place >= deal.first_item[problem + 1]) ++problem;
    shares[static_cast<size_t>(cluster)] +=
        BlocksEach(params.problems[problem], deal.split) + item_cost;
  }
  return *std::max_element(shares.begin(), shares.end());
}

constexpr int kMultiprocessors = 132;
// Clusters of 1, 2, 4 and 8 blocks that fit at one block a multiprocessor: a cluster stays within
// a group of 16 or 18 of them.
constexpr int kMaxClusters[] = {kMultiprocessors, kMultiprocessors / 2, 32, 16};

bool GivesEveryBlockColumns(const CudaGemmParams& params, int split) {
  return std::all_of(params.problems, params.problems + params.num_problems,
                     [split](const GemmProblem& p) {
                       return (split - 1) * BlocksEach(p, split) < p.w.col_blocks();
                     });
}

Deal MakeDeal(const CudaGemmParams& params) {
  Deal best{};
  int64_t shortest = 0;
  for (int i = 0; i < 4; ++i) {
    Deal deal{.first_item = {}, .num_clusters = kMaxClusters[i], .split = 1 << i};
    int items = 0;
    for (int p = 0; p < params.num_problems; ++p) {
      deal.first_item[p] = items;
      items += static_cast<int>((params.problems[p].w.rows + 127) / 128);
    }
    for (int p = params.num_problems; p <= kMaxGemmProblems; ++p) deal.first_item[p] = items;
    deal.num_clusters = std::min(deal.num_clusters, items);
    if (!GivesEveryBlockColumns(params, deal.split)) break;
    const int64_t share = LongestShare(params, deal);
    if (i == 0 || share < shortest) best = deal, shortest = share;
  }
  return best;
}

template <int kN, bool kWide>
void Run(const CudaGemmParams& params, device::Stream& stream) {
  using Stream = StreamOf<kN, kWide>;
  // Long columns first.
  CudaGemmParams sorted = params;
  std::stable_sort(sorted.problems, sorted.problems + sorted.num_problems,
                   [](const GemmProblem& a, const GemmProblem& b) {
                     return a.w.col_blocks() > b.w.col_blocks();
                   });
  const Deal deal = MakeDeal(sorted);
  LaunchClusters(GemmStreamKernel<kN, kWide>, static_cast<unsigned>(deal.num_clusters * deal.split),
                 static_cast<unsigned>(deal.split), Stream::kThreads,
                 sizeof(typename Stream::Shared), stream, sorted, deal);
}

}  // namespace

void LaunchGemmStream(const CudaGemmParams& params, device::Stream& stream) {
  const int64_t rows = PaddedTokens(params.num_tokens);
  if (params.problems[0].w.kind == TileKind::kFp8AsBf16) {
    if (rows == 8) return Run<8, true>(params, stream);
    if (rows == 16) return Run<16, true>(params, stream);
    return Run<32, true>(params, stream);
  }
  if (rows == 8) return Run<8, false>(params, stream);
  if (rows == 16) return Run<16, false>(params, stream);
  Run<32, false>(params, stream);
}

}  // namespace fathom::kernels
