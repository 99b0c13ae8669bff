#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/weight_stream.cuh"
#include "kernels/grouped_gemm/experts_stream_cuda.h"
#include "kernels/grouped_gemm/swiglu.cuh"

namespace fathom::kernels {
namespace {

constexpr int kMultiprocessors = 132;
constexpr int kSharedExpert = -1;  // as an expert's id

// How items are dealt out to the clusters. An item is a tile of tokens times 128 rows (w2), or 128
// columns of t (w1 and w3). First come the shared expert's items, in rounds. An FP8 item of it
// takes as long as `weight` FP4 items: clusters without one in the last round take that many routed
// items first; then these, too, go round.
struct Deal {
  int items_of_tile;
  int num_shared;  // items
  int num_clusters;
  int weight;

  __device__ int NumShared(int cluster) const {
    return (num_shared - cluster + num_clusters - 1) / num_clusters;
  }
  // The clusters that have one shared item more than the others.
  __device__ int busy() const { return num_shared % num_clusters; }

  // The j-th routed item of a cluster.
  __device__ int Routed(int cluster, int j) const {
    const int idle = num_clusters - busy();
    if (cluster < busy()) return weight * idle + j * num_clusters + cluster;
    if (j < weight) return j * idle + cluster - busy();
    return weight * idle + (j - weight) * num_clusters + cluster;
  }
  __device__ int NumRouted(int cluster, int num_tiles) const {
    const int items = num_tiles * items_of_tile;
    int count = max(0, items - weight * (num_clusters - busy())) / num_clusters;
    while (Routed(cluster, count) < items) ++count;
    return count;
  }
};

// kGateUp: block `rank` of a cluster of two takes 64 of the 128 columns of t, w1's rows with one
// warpgroup and w3's with the other. Else: 128 rows of w2.
template <bool kGateUp, int kN>
struct ExpertItems {
  const CudaExpertParams& p;
  const ExpertScope& scope;
  const Deal& deal;
  int cluster, rank;

  __device__ int known() const {
    const int shared = deal.NumShared(cluster);
    return scope.routed && scope.plan_is_early ? count() : shared;
  }
  __device__ int count() const {
    const int shared = deal.NumShared(cluster);
    return shared + (scope.routed ? deal.NumRouted(cluster, *p.plan.num_tiles) : 0);
  }

  __device__ StreamItem operator()(int i) const {
    const int shared = deal.NumShared(cluster);
    const int item =
        i < shared ? cluster + i * deal.num_clusters : deal.Routed(cluster, i - shared);
    const int part = item % deal.items_of_tile;
    const ExpertTile tile = i < shared ? SharedTile(item / deal.items_of_tile)
                                       : p.plan.tiles[item / deal.items_of_tile];
    return kGateUp ? GateUp(tile, part) : Down(tile, part);
  }

  __device__ ExpertTile SharedTile(int tile) const {
    const int group = tile * kN / 8;
    return {kSharedExpert, group, group,
            static_cast<int>(min(int64_t{kN}, p.num_tokens - tile * kN))};
  }

  __device__ StreamItem Make(const ExpertTile& tile, const ExpertTiles& w, const std::byte* tiles,
                             const uint8_t* scales, int64_t rows, int64_t cols, int row_tile,
                             int row_tiles_apart, const Fp8Tiles& x, int x_group, int part) const {
    const int64_t col_blocks = cols / 128, row_tile_bytes = col_blocks * TileMatrixBytes(w.kind);
    const int64_t expert = max(tile.expert, 0);
    return {.info = {.kind = w.kind,
                     .num_blocks = static_cast<int>(col_blocks),
                     .num_tokens = tile.num_rows,
                     .place = {part, tile.pair_group, tile.expert}},
            .weights = tiles + (expert * (rows / 64) + row_tile) * row_tile_bytes,
            .row_tile_bytes = row_tiles_apart * row_tile_bytes,
            .scales = w.kind == TileKind::kFp4
                          ? nullptr
                          : scales + (expert * (rows / 128) + row_tile / 2) * col_blocks,
            .scales_stride = row_tiles_apart / 2 * col_blocks,
            .x = reinterpret_cast<const std::byte*>(x.codes) + int64_t{x_group} * kTileBytes,
            .x_scales = x.scales + x_group * 8,
            .x_block_bytes = x.row_groups * kTileBytes,
            .x_scales_stride = x.row_groups * 8};
  }
  __device__ StreamItem GateUp(const ExpertTile& tile, int part) const {
    const bool routed = tile.expert != kSharedExpert;
    const ExpertTiles& w = routed ? p.routed : p.shared;
    const Fp8Tiles& x = routed && p.num_tokens > kDirectTokens ? p.gathered : p.x;
    return Make(tile, w, w.gate_up, w.gate_up_scales, 2 * p.intermediate, p.hidden, part * 4 + rank,
                2, x, tile.x_group, part);
  }
  __device__ StreamItem Down(const ExpertTile& tile, int part) const {
    const ExpertTiles& w = tile.expert != kSharedExpert ? p.routed : p.shared;
    return Make(tile, w, w.down, w.down_scales, p.hidden, p.intermediate, part * 2, 1, p.t,
                tile.pair_group, part);
  }
};

// What the two blocks of a cluster tell each other: the largest magnitude of each token's 64
// columns, for two items in turn.
template <int kN>
struct Largest {
  float of[2][2][kN];  // [item][rank][token]
  uint64_t full[2];
};

// t = b(weight * silu(gate) * up) of this block's 64 columns, as FP8: one warp a row.
template <typename Stream, int kN>
class IntermediateWriter {
 public:
  static constexpr int kEach = (kN + Stream::kWarps - 1) / Stream::kWarps;  // rows of a warp

  __device__ IntermediateWriter(const CudaExpertParams& p, const Stream& stream,
                                Largest<kN>& largest, int rank)
      : p_(p), stream_(stream), largest_(largest), rank_(rank) {}

  __device__ void Begin(const StreamInfo& info) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int row = warp() + k * Stream::kWarps;
      const bool weighted = info.place[2] != kSharedExpert && row < info.num_tokens;
      weight_[k] = weighted ? p_.plan.pair_weight[info.place[1] * 8 + row] : 1.0f;
    }
  }

  __device__ void Finish(const StreamInfo& info, const float (*inbox)[Stream::kRows]) {
    auto& largest = largest_.of[items_ & 1];
    uint64_t* const full = &largest_.full[items_ & 1];
    float2 v[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int row = warp() + k * Stream::kWarps;
      if (row >= info.num_tokens) continue;
      const float2 gate = stream_.Sum2(inbox, row, 2 * lane());
      const float2 up = stream_.Sum2(inbox, row, 64 + 2 * lane());
      v[k] = {Intermediate(gate.x, up.x, weight_[k], p_.swiglu_limit),
              Intermediate(gate.y, up.y, weight_[k], p_.swiglu_limit)};
      const float max = WarpMax(fmaxf(fabsf(v[k].x), fabsf(v[k].y)));
      if (lane() < 2) StoreToBlock(&largest[rank_][row], static_cast<uint32_t>(lane()), max);
    }
    __syncwarp();
    if (lane() < 2) BarrierArriveAt(full, static_cast<uint32_t>(lane()));
    BarrierWaitCluster(full, items_ / 2 & 1);
    ++items_;
    const int column = info.place[0] * 128 + rank_ * 64 + 2 * lane();
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int row = warp() + k * Stream::kWarps;
      if (row >= info.num_tokens) continue;
      const uint32_t scale = Fp8Scale(fmaxf(largest[0][row], largest[1][row]));
      const float inverse = Ue8m0Inverse(scale);
      const int64_t pair = int64_t{info.place[1]} * 8 + row;
      *reinterpret_cast<uint16_t*>(p_.t.codes + Fp8TileOffset(pair, column, p_.t.row_groups)) =
          static_cast<uint16_t>(Fp8Codes(v[k].x * inverse, v[k].y * inverse));
      if (lane() == 0 && rank_ == 0) {
        p_.t.scales[info.place[0] * p_.t.row_groups * 8 + pair] = Ue8m0Value(scale);
      }
    }
  }

 private:
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  const CudaExpertParams& p_;
  const Stream& stream_;
  Largest<kN>& largest_;
  const int rank_;
  int items_ = 0;
  float weight_[kEach];
};

// Rows of y: 128 columns of each pair.
template <typename Stream>
struct OutputWriter {
  const CudaExpertParams& p;
  const Stream& stream;

  __device__ void Begin(const StreamInfo&) const {}
  __device__ void Finish(const StreamInfo& info, const float (*inbox)[Stream::kRows]) const {
    const int column = static_cast<int>(threadIdx.x) % 64 * 2;
    for (int row = static_cast<int>(threadIdx.x) / 64; row < info.num_tokens;
         row += Stream::kConsumers / 64) {
      const int64_t pair = int64_t{info.place[1]} * 8 + row;
      *reinterpret_cast<__nv_bfloat162*>(p.y + pair * p.y_stride + info.place[0] * 128 + column) =
          __float22bfloat162_rn(stream.Sum2(inbox, row, column));
    }
  }
};

// Expanding FP4 keeps all warps of a multiprocessor busy.
template <bool kGateUp, int kN, int kStages>
__global__ void __launch_bounds__(544, 1)
    ExpertStreamKernel(const __grid_constant__ CudaExpertParams p,
                       const __grid_constant__ ExpertScope scope, const Deal deal) {
  using Stream = WeightStream<kN, StreamFormat::kFp4, 2, 2, kStages>;
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ Largest<kN> largest;
  constexpr int kCluster = kGateUp ? 2 : 1;
  const int rank = static_cast<int>(blockIdx.x) % kCluster;
  if (kGateUp && threadIdx.x == 0) {
    for (auto& barrier : largest.full) BarrierInit(&barrier, 2 * Stream::kWarps);
  }
  Stream stream(*reinterpret_cast<typename Stream::Shared*>(shared), 0, 1);
  stream.Init();
  if (kGateUp) ClusterArrive();
  const ExpertItems<kGateUp, kN> items{p, scope, deal, static_cast<int>(blockIdx.x) / kCluster,
                                       rank};
  if (threadIdx.x >= Stream::kConsumers) {
    stream.Produce(items);
    if (kGateUp) ClusterWait();
    return;
  }
  if (scope.routed && !scope.plan_is_early) WaitForPredecessor();
  if constexpr (kGateUp) {
    ClusterWait();  // the other block has made its barriers
    stream.Consume(items.count(), IntermediateWriter<Stream, kN>(p, stream, largest, rank));
  } else {
    stream.Consume(items.count(), OutputWriter<Stream>{p, stream});
  }
}

template <bool kGateUp, int kN, int kStages>
void Run(CudaExpertParams p, const ExpertScope& scope, device::Stream& stream) {
  using Stream = WeightStream<kN, StreamFormat::kFp4, 2, 2, kStages>;
  constexpr int kCluster = kGateUp ? 2 : 1;
  const auto items_of_tile = static_cast<int>((kGateUp ? p.intermediate : p.hidden) / 128);
  const int64_t tiles =
      scope.num_shared_tiles +
      (scope.routed ? MaxExpertTiles(p.num_tokens, p.num_experts, p.num_chosen) : 0);
  Deal deal{.items_of_tile = items_of_tile,
            .num_shared = scope.num_shared_tiles * items_of_tile,
            .num_clusters = static_cast<int>(
                std::min<int64_t>(kMultiprocessors / kCluster, tiles * items_of_tile)),
            .weight = p.routed.kind == TileKind::kFp4 ? 2 : 1};
  LaunchClusters(ExpertStreamKernel<kGateUp, kN, kStages>,
                 static_cast<unsigned>(deal.num_clusters * kCluster), kCluster, Stream::kThreads,
                 sizeof(typename Stream::Shared), stream, p, scope, deal);
}

template <bool kGateUp>
void RunRows(const CudaExpertParams& p, int tile_rows, const ExpertScope& scope,
             device::Stream& stream) {
  CHECK_LE(tile_rows, kMaxStreamRows);
  tile_rows == 8 ? Run<kGateUp, 8, 5>(p, scope, stream) : Run<kGateUp, 16, 4>(p, scope, stream);
}

}  // namespace

void LaunchGateUpStream(const CudaExpertParams& params, int tile_rows, const ExpertScope& scope,
                        device::Stream& stream) {
  RunRows<true>(params, tile_rows, scope, stream);
}
void LaunchDownStream(const CudaExpertParams& params, int tile_rows, const ExpertScope& scope,
                      device::Stream& stream) {
  RunRows<false>(params, tile_rows, scope, stream);
}

}  // namespace fathom::kernels
