#include <algorithm>
#include <bit>
#include <type_traits>

#include "kernels/collective/packets.cuh"
#include "kernels/gemm/gemm_large.h"
#include "kernels/gemm/gemm_stream_cuda.h"
#include "kernels/gemm/stream_deal.h"
#include "kernels/gemm/weight_stream.cuh"
#include "kernels/numbered_words.cuh"

namespace fathom::kernels {
namespace {

constexpr int64_t kWeightTileBytes = TileMatrixBytes(TileKind::kFp8);  // as of the other kinds here

// A cluster's items (weight_stream.cuh) of one or two halves.
template <int kN, int kHalves, int kApart, bool kAhead>
struct GemmItems {
  const CudaGemmParams& params;
  const StreamDeal& deal;
  int cluster, rank;

  // Whole items first: a half leaves half of a stage empty.
  __device__ int whole() const {
    return kHalves == 1 ? 0 : deal.begin[cluster + 1] / 2 - (deal.begin[cluster] + 1) / 2;
  }
  __device__ int ahead() const {
    if (!kAhead) return 0;
    return min(max(deal.first_item[1] - cluster * deal.ahead_each, 0), deal.ahead_each);
  }
  __device__ int count() const {
    const int begin = deal.begin[cluster], end = deal.begin[cluster + 1];
    return ahead() + (kHalves == 1 || begin == end ? end - begin : whole() + begin % 2 + end % 2);
  }
  // The half with which the i-th item begins.
  __device__ int FirstHalf(int i) const {
    const int begin = deal.begin[cluster], end = deal.begin[cluster + 1];
    if (kHalves == 1) return begin + i;
    if (i < whole()) return begin + begin % 2 + 2 * i;
    return i == whole() && begin % 2 != 0 ? begin : end - 1;
  }

  __device__ StreamItem operator()(int i) const {
    const int before = ahead();
    const bool is_ahead = i < before, is_whole = is_ahead || i - before < whole();
    const int half = is_ahead ? 2 * (cluster * deal.ahead_each + i) : FirstHalf(i - before);
    const int item = half / 2;
    int index = 0;
    while (item >= deal.first_item[index + 1]) ++index;
    const GemmProblem& p = params.problems[index];
    const StreamDeal::Shape& shape = deal.shapes[index];
    int pair = item - deal.first_item[index], token = 0;
    if (deal.token_tiles > 1) {
      token = pair % deal.token_tiles * kN;
      pair /= deal.token_tiles;
    }
    const int tile = 2 * pair + half % 2;
    const TileKind kind = p.w.kind;
    const int col_blocks = shape.col_blocks;
    const int first = rank / kApart * kApart * shape.blocks_each + rank % kApart;
    const bool fp8_x = kind == TileKind::kFp8, wide = kind == TileKind::kFp8AsBf16;
    const int64_t row_groups = fp8_x ? p.x_fp8.row_groups : p.x_bf16.row_groups;
    const int group = p.groups == 1 ? 0 : tile / shape.group_tiles;
    const int64_t x_block = int64_t{group * col_blocks + first} * (wide ? 2 : 1);
    const int64_t row_tile_bytes = shape.row_blocks * kWeightTileBytes;
    const std::byte* x = fp8_x ? reinterpret_cast<const std::byte*>(p.x_fp8.codes)
                               : reinterpret_cast<const std::byte*>(p.x_bf16.values);
    return {
        .info = {.kind = kind,
                 .num_blocks = min(shape.blocks_each, col_blocks - first),
                 .part_blocks = shape.part_blocks,
                 .num_tokens = min(kN, static_cast<int>(params.num_tokens) - token),
                 .place = {index, tile, 0},
                 .row_tiles = is_whole ? min(2, static_cast<int>(p.w.row_tiles()) - tile) : 1,
                 .first_token = token},
        .weights = p.w.tiles + tile * row_tile_bytes + first * kWeightTileBytes,
        .row_tile_bytes = row_tile_bytes,
        .scales = p.w.scales == nullptr ? nullptr : p.w.scales + pair * shape.row_blocks + first,
        .scales_stride = 0,
        .x = x + (x_block * row_groups + token / 8) * kTileBytes,
        .x_scales = fp8_x ? p.x_fp8.scales + x_block * row_groups * 8 + token : nullptr,
        .x_block_bytes = row_groups * kTileBytes,
        .x_scales_stride = row_groups * 8};
  }
};

// Who else gets two FP32 sums of a row: nobody, or all ranks.
struct NoExchange {};
// Nobody; x is early.
struct EarlyInput {
  LaunchNumber number;  // where y is words
};
struct NoSender {
  template <typename Exchange>
  __device__ explicit NoSender(const Exchange&) {}
  __device__ void Send(int64_t, int64_t, int64_t, float2) const {}
};
struct PacketSender {
  const PeerView& peers;
  const uint64_t number;

  __device__ explicit PacketSender(const PeerExchange& exchange)
      : peers(exchange.peers), number(peers.size == 1 ? 0 : ExchangeNumber(exchange)) {}
  __device__ void Send(int64_t row, int64_t width, int64_t column, float2 sum) const {
    if (peers.size == 1) return;
    SendPacketToAll(peers, number, SumPacket(row, width, column),
                    {__float_as_uint(sum.x), __float_as_uint(sum.y)});
  }
};
// The number beside words.
struct Numbering {
  const uint32_t number;

  __device__ explicit Numbering(const LaunchNumber& launch) : number(ValueOf(launch)) {}
  __device__ explicit Numbering(const EarlyInput& early)
      : number(early.number.of_step == nullptr ? 0 : ValueOf(early.number)) {}
  __device__ void Send(int64_t, int64_t, int64_t, float2) const {}
};
template <typename Exchange>
constexpr bool kIsNumbered = std::is_same_v<Exchange, LaunchNumber>;
template <typename Exchange>
using SenderOf = std::conditional_t<
    kIsNumbered<Exchange> || std::is_same_v<Exchange, EarlyInput>, Numbering,
    std::conditional_t<std::is_same_v<Exchange, PeerExchange>, PacketSender, NoSender>>;

// The tokens rank, rank + split, … of an item's rows.
template <typename Stream, typename Sender>
__device__ void WriteRows(const GemmProblem& p, const StreamInfo& info, const Stream& stream,
                          const float (*inbox)[Stream::kRows], const Sender& sender) {
  constexpr int kThreadsEach = 32 * Stream::kRowTiles;  // of a token
  const int row = static_cast<int>(threadIdx.x % kThreadsEach) * 2;
  const int in_matrix = info.place[1] * 64 + row;
  if (row >= info.row_tiles * 64 || in_matrix >= p.w.rows) return;
  const auto first = static_cast<int>(threadIdx.x / kThreadsEach);
  for (int k = first;; k += Stream::kConsumers / kThreadsEach) {
    const int token = k * stream.split() + stream.rank();
    if (token >= info.num_tokens) return;
    const float2 sum = stream.Sum2(inbox, k, row);
    const int64_t offset = (info.first_token + token) * p.y_stride + in_matrix;
    if constexpr (std::is_same_v<Sender, Numbering>) {
      if (p.output == GemmOutput::kNumbered) {
        StoreNumbered(static_cast<uint2*>(p.y) + offset / 2, PackBf16(sum.x, sum.y), sender.number);
        continue;
      }
    }
    if (p.output == GemmOutput::kBf16) {
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.y) + offset) =
          __floats2bfloat162_rn(sum.x, sum.y);
    } else {
      *reinterpret_cast<float2*>(static_cast<float*>(p.y) + offset) = sum;
      sender.Send(info.first_token + token, p.y_stride, in_matrix, sum);
    }
  }
}

// One warp a token: 128 rows are one block of FP8 columns of y.
template <typename Stream>
__device__ void WriteFp8(const Fp8Tiles& y, const StreamInfo& info, const Stream& stream,
                         const float (*inbox)[Stream::kRows]) {
  const int lane = static_cast<int>(threadIdx.x % 32), block = info.place[1] / 2;
  for (int k = static_cast<int>(threadIdx.x / 32);; k += Stream::kWarps) {
    const int in_part = k * stream.split() + stream.rank();
    if (in_part >= info.num_tokens) return;
    const int token = info.first_token + in_part;
    const float4 sum = stream.Sum4(inbox, k, lane * 4);
    const float4 v{RoundBf16(sum.x), RoundBf16(sum.y), RoundBf16(sum.z), RoundBf16(sum.w)};
    const float largest =
        WarpMax(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    const uint32_t scale = Fp8Scale(largest);
    const float inverse = Ue8m0Inverse(scale);
    *reinterpret_cast<uint32_t*>(y.codes +
                                 Fp8TileOffset(token, block * 128 + lane * 4, y.row_groups)) =
        Fp8Codes(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
    if (lane == 0) y.scales[block * y.row_groups * 8 + token] = Ue8m0Value(scale);
  }
}

template <typename Stream, typename Sender>
struct Writer {
  const CudaGemmParams& params;
  const Stream& stream;
  const Sender sender;

  __device__ void Begin(const StreamInfo&) const {}
  __device__ void Finish(const StreamInfo& info, const float (*inbox)[Stream::kRows]) const {
    const GemmProblem& p = params.problems[info.place[0]];
    if (p.output == GemmOutput::kFp8Tiles) {
      WriteFp8(p.y_fp8, info, stream, inbox);
    } else {
      WriteRows(p, info, stream, inbox, sender);
    }
  }
};

// Up to 32 tokens two blocks run on a multiprocessor, this launch's and the next one's: 96
// registers, 113 KB each. But widening takes all warps of a multiprocessor, and more tokens all of
// its shared memory.
template <int kN, bool kWide>
using StreamOf = std::conditional_t<kWide,
                                    WeightStream<kN, StreamFormat::kWide, kN <= 32 ? 2 : 1,
                                                 kN <= 32 ? 2 : 1, kN == 16 || kN == 64 ? 4 : 3>,
                                    WeightStream<kN, StreamFormat::kPlain, kN == 8 ? 2 : 1, 1,
                                                 kN == 8    ? 3
                                                 : kN == 16 ? 5
                                                 : kN == 64 ? 6
                                                            : 4>>;
// Where blocks that widen leave most multiprocessors free, on a rank, a longer ring is worth more
// than room beside them.
using WideStreamOfFew = WeightStream<8, StreamFormat::kWide, 2, 2, 4>;
// A product of long columns and up to 8 tokens, as the output product behind the grouped one: its
// blocks have one warpgroup and 95 KB, with which they fit beside blocks that widen, and fill their
// rings while these end. Of up to 64 tokens a rank's few rows, which are one row tile a block: of
// others' stages, for two, that would leave half of the ring empty.
template <int kN>
using SlimStream = WeightStream<kN, StreamFormat::kPlain, 2, 1, kN <= 16 ? 5 : 4, 1>;
// A rank's few rows of weights that are widened: a block for each of a block's two pairs.
template <int kN>
using PairStream = WeightStream<kN, StreamFormat::kWide, 1, 1, 6, 2, 2>;

// What the registers are dealt out for. With up to 8 tokens widening leaves some of a
// multiprocessor's: for the blocks that add up attention's parts, and for slim ones.
template <typename Stream>
constexpr bool kIsSlim = Stream::kRowTiles == 1;
template <typename Stream>
constexpr int kMostThreads =
    kIsSlim<Stream> && Stream::kTokens == 8                        ? 288
    : Stream::kWide && Stream::kTokens == 8 && Stream::kApart == 1 ? 736
                                                                   : Stream::kThreads;
template <typename Stream>
constexpr int kMostBlocks = kIsSlim<Stream> && Stream::kTokens == 8 ? 4
                            : Stream::kWide || Stream::kTokens > 32 ? 1
                                                                    : 2;

template <typename Stream, typename Exchange>
__global__ void __launch_bounds__(kMostThreads<Stream>, kMostBlocks<Stream>)
    GemmStreamKernel(const __grid_constant__ CudaGemmParams params,
                     const __grid_constant__ StreamDeal deal,
                     const __grid_constant__ Exchange exchange) {
  extern __shared__ __align__(1024) std::byte shared[];
  const int rank = static_cast<int>(blockIdx.x) & (deal.split - 1);
  Stream stream(*reinterpret_cast<typename Stream::Shared*>(shared), rank, deal.split_log2);
  const GemmItems<Stream::kTokens, Stream::kRowTiles, Stream::kApart, kIsNumbered<Exchange>> items{
      params, deal, static_cast<int>(blockIdx.x) >> deal.split_log2, rank};
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < Stream::kWarps) {
    using Sender = SenderOf<Exchange>;
    stream.Consume(items.count(), Writer<Stream, Sender>{params, stream, Sender(exchange)});
  } else if (warp == Stream::kWarps) {
    stream.FetchWeights(items, deal.token_tiles == 1);
  } else {
    const auto wait = [&] {
      if constexpr (kIsNumbered<Exchange>) {
        const uint32_t number = ValueOf(exchange);
        AllowSuccessor();
        WaitForPredecessor();
        const bool tells = blockIdx.x == 0 && threadIdx.x % 32 == 0;
        if (tells) *static_cast<volatile uint32_t*>(exchange.begun) = number;
      } else {
        WaitForPredecessor();
      }
    };
    constexpr bool kIsEarly = std::is_same_v<Exchange, EarlyInput>;
    stream.template FetchActivations<kIsEarly>(items, wait);
    // Who waits for this launch, waits for both; blocks that leave make room for it.
    if (kIsEarly && blockIdx.x == 0) WaitForPredecessor();
  }
}

// At most a block for every multiprocessor: a cluster stays within a group of multiprocessors, and
// these differ from GPU to GPU.
template <typename Stream, typename Exchange = NoExchange>
int MostClusters(int split) {
  const auto most = [](int blocks) {
    return std::clamp(MaxClusters(GemmStreamKernel<Stream, Exchange>, static_cast<unsigned>(blocks),
                                  Stream::kThreads, sizeof(typename Stream::Shared)),
                      1, kMultiprocessors / blocks);
  };
  static const int kMost[] = {most(1), most(2), most(4), most(8)};
  return kMost[std::min(3, std::countr_zero(static_cast<unsigned>(split)))];
}

template <typename Stream, typename Exchange = NoExchange>
void Run(const CudaGemmParams& params, int split, device::Stream& stream,
         const Exchange& exchange = {}) {
  // Blocks that are no cluster start wherever there is room, while the launch before still runs:
  // two of them on a multiprocessor would leave another without. So they ask for what only fits
  // beside a block of another launch.
  const size_t bytes = sizeof(typename Stream::Shared);
  const size_t shared_bytes = split == 1 ? std::max(bytes, kAloneSharedBytes) : bytes;
  // Of a rank's columns not more than find a multiprocessor for themselves while the launch before
  // still holds the others.
  const bool is_beside = !kIsSlim<Stream> && !params.problems[0].w.is_whole();
  const int room = is_beside ? kMultiprocessors / 2 / split : MostClusters<Stream, Exchange>(split);
  const int max_clusters =
      params.max_blocks == 0 ? room : std::min(room, params.max_blocks / split);
  const StreamDeal deal = DealOut(params, Stream::kTokens, split, max_clusters, kIsSlim<Stream>);
  LaunchClusters(GemmStreamKernel<Stream, Exchange>,
                 static_cast<unsigned>(deal.num_clusters * deal.split),
                 static_cast<unsigned>(deal.split), Stream::kThreads, shared_bytes, stream, params,
                 deal, exchange);
}

// Whether clusters of a block for each of two pairs, twice as many, all run at once. Then a block's
// parts are whole stages of two column blocks.
template <typename Stream>
bool HasBlocksForPairs(const CudaGemmParams& params, int split) {
  const TiledMatrix& w = params.problems[0].w;
  return params.num_problems == 1 && split <= 4 && w.col_blocks() % (2 * split) == 0 &&
         (w.row_tiles() + 1) / 2 <= MostClusters<Stream>(2 * split);
}

template <typename Exchange>
void RunSlim(const CudaGemmParams& params, device::Stream& stream, const Exchange& exchange) {
  const int split = SlimSplit(params);
  switch (PaddedTokens(params.num_tokens)) {
    case 8:
      return Run<SlimStream<8>>(params, split, stream, exchange);
    case 16:
      return Run<SlimStream<16>>(params, split, stream, exchange);
    case 32:
      return Run<SlimStream<32>>(params, split, stream, exchange);
    default:
      return Run<SlimStream<64>>(params, split, stream, exchange);
  }
}

template <int kN, bool kWide>
void RunSorted(const CudaGemmParams& params, device::Stream& stream) {
  // Long columns first.
  CudaGemmParams sorted = params;
  std::stable_sort(sorted.problems, sorted.problems + sorted.num_problems,
                   [](const GemmProblem& a, const GemmProblem& b) {
                     return a.w.col_blocks() > b.w.col_blocks();
                   });
  const int split = OwnParts(sorted);
  if constexpr (kWide && kN <= 32) {
    if (HasBlocksForPairs<PairStream<kN>>(sorted, split)) {
      return Run<PairStream<kN>>(sorted, 2 * split, stream);
    }
  }
  if constexpr (kWide && kN == 8) {
    const bool few = sorted.problems[0].w.row_tiles() / 2 * split <= kMultiprocessors / 2;
    if (few) return Run<WideStreamOfFew>(sorted, split, stream);
  }
  Run<StreamOf<kN, kWide>>(sorted, split, stream);
}

}  // namespace

int NumColumnParts(const CudaGemmParams& params) {
  return IsLarge(params) ? 1 : ColumnParts(params);
}

void LaunchColumnSums(const CudaColumnSumsParams& params, device::Stream& stream) {
  const CudaGemmParams& product = params.product;
  if (IsSlim(product)) return RunSlim(product, stream, params.exchange);
  const int split = OwnParts(product);
  product.num_tokens <= 8 ? Run<StreamOf<8, false>>(product, split, stream, params.exchange)
                          : Run<StreamOf<16, false>>(product, split, stream, params.exchange);
}

void LaunchGemmStream(const CudaGemmParams& params, device::Stream& stream) {
  if (params.x_is_early) {  // slim blocks, where they run beside others
    const EarlyInput early{params.number};
    return params.max_blocks > 0 ? Run<StreamOf<8, false>>(params, 1, stream, early)
                                 : Run<SlimStream<8>>(params, 1, stream, early);
  }
  if (params.number.of_step != nullptr) {
    return Run<StreamOf<8, false>>(params, OwnParts(params), stream, params.number);
  }
  if (IsSlim(params)) return RunSlim(params, stream, NoExchange{});
  const bool wide = params.problems[0].w.kind == TileKind::kFp8AsBf16;
  switch (std::min<int64_t>(128, PaddedTokens(params.num_tokens))) {
    case 8:
      return wide ? RunSorted<8, true>(params, stream) : RunSorted<8, false>(params, stream);
    case 16:
      return wide ? RunSorted<16, true>(params, stream) : RunSorted<16, false>(params, stream);
    case 32:
      return wide ? RunSorted<32, true>(params, stream) : RunSorted<32, false>(params, stream);
    case 64:
      return wide ? RunSorted<64, true>(params, stream) : RunSorted<64, false>(params, stream);
    default:
      wide ? RunSorted<128, true>(params, stream) : RunSorted<128, false>(params, stream);
  }
}

}  // namespace fathom::kernels
