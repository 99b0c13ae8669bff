#include <type_traits>

#include "base/check.h"
#include "kernels/grouped_gemm/expert_activations.cuh"
#include "kernels/grouped_gemm/expert_items.cuh"
#include "kernels/grouped_gemm/expert_progress.cuh"
#include "kernels/grouped_gemm/expert_stream.cuh"
#include "kernels/grouped_gemm/expert_writer.cuh"
#include "kernels/grouped_gemm/experts_stream_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int kSlimColumns = 1024;  // whole stages of one token's slim items
// Of one token, each alone on its multiprocessor (route_direct.cuh). Slim items leave them that: a
// cluster that waited for them would be late, and the next boundary gets ready there meanwhile.
constexpr int kRoutingBlocks = 16;

// Of one token on ranks the launch starts before its activations are there (route_alone.cuh).
template <typename Stream, typename Progress>
constexpr bool kStartsEarly = Stream::kAlone && std::is_same_v<Progress, RankProgress>;

// Progress: OwnProgress; or RankProgress, of `rank`.
template <typename Stream, typename Progress>
__global__ void __launch_bounds__(Stream::kThreads, 1)
    ExpertStreamKernel(const __grid_constant__ CudaExpertParams p,
                       const __grid_constant__ ExpertWork work,
                       const __grid_constant__ ExpertRank rank) {
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ ToldInCluster<Stream> told;
  __shared__ WrittenItems written;
  if (threadIdx.x == 0) {
    for (auto& barrier : told.full) BarrierInit(&barrier, 1);
    for (auto& barrier : written.full) BarrierInit(&barrier, 1);
    for (auto& barrier : written.empty) BarrierInit(&barrier, kWarpArrivals);
  }
  Stream stream(*reinterpret_cast<typename Stream::Shared*>(shared));
  stream.Init();
  ClusterArrive();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 16) {
    stream.Multiply();
  } else if (warp == 16) {
    stream.FetchWeights(ExpertItems<Stream>(p, work), work.once);
  } else if (warp == 17 || (Stream::kSlim && warp == 19)) {
    const Progress progress(p, work, rank);
    if (warp == 19) {
      WaitForPredecessor();
      AllowSuccessor();
    } else if constexpr (kStartsEarly<Stream, Progress>) {
      AwaitInput(*p.plan.board, PlanLaunch(*p.plan.board));
    }
    ExpertActivations(stream).Fetch(ItemActivations<Progress>(work, progress), warp == 19 ? 1 : 0);
  } else if (warp == 18) {
    const Progress progress(p, work, rank);
    WaitForPredecessor();
    ClusterWait();  // the other block has made its barriers
    ExpertWriter<Stream, Progress> writer(p, progress, told, written);
    stream.Write(writer);
    writer.End();
    return;
  } else if (warp == 20) {
    if constexpr (Stream::kNamesTokens) {
      // Else nothing would wait for this warp, and items be overwritten before it has read them.
      if (work.are_apart()) ExpertActivations(stream).HandOverLanded();
    }
  } else {
    const Progress progress(p, work, rank);
    WaitForPredecessor();
    AllowSuccessor();
    written.TellAll(progress);
  }
  ClusterWait();
}

template <typename Stream, typename Progress>
int MostClusters() {
  static const int most =
      MaxClusters(ExpertStreamKernel<Stream, Progress>, kExpertCluster<Stream::kSlim>,
                  Stream::kThreads, sizeof(typename Stream::Shared));
  return most;
}

// Blocks wait for what others write: all of them must run at once.
template <typename Stream, typename Progress>
void Run(const CudaExpertParams& p, ExpertWork work, const ExpertRank& rank,
         device::Stream& stream) {
  constexpr unsigned kBlocks = kExpertCluster<Stream::kSlim>;
  work.deal.num_clusters = MostClusters<Stream, Progress>();
  if constexpr (Stream::kSlim) {
    work.deal.num_clusters -= kRoutingBlocks / kBlocks;
    work.deal.weight = 1;
  }
  if (work.deal.num_clusters <= 0) return;  // the device is broken
  LaunchClusters(ExpertStreamKernel<Stream, Progress>,
                 static_cast<unsigned>(work.deal.num_clusters) * kBlocks, kBlocks, Stream::kThreads,
                 sizeof(typename Stream::Shared), stream, p, work, rank);
}

// One token: slim items where there is a cluster for each.
template <typename Progress>
void RunAlone(const CudaExpertParams& p, const ExpertWork& work, const ExpertRank& rank,
              device::Stream& stream) {
  using Slim = ExpertStream<1, 5, 1>;
  const bool fits = p.hidden % kSlimColumns == 0 && p.intermediate % kSlimColumns == 0;
  const int items = work.deal.items_of_tile * (1 + p.num_chosen);
  if (work.by_packets && fits && items <= MostClusters<Slim, Progress>()) {
    return Run<Slim, Progress>(p, work, rank, stream);
  }
  Run<ExpertStream<1, 5, 2>, Progress>(p, work, rank, stream);
}

template <typename Progress>
void Run(const CudaExpertParams& p, ExpertWork work, const ExpertRank& rank,
         device::Stream& stream) {
  work.once = p.num_tokens <= kWordTokens;
  work.shared_rows = SharedTileRows(p.num_tokens);
  work.shared_tiles = NumSharedTiles(p.shared_tokens(), p.num_tokens);
  work.max_tiles = static_cast<int>(MaxExpertTiles(p.num_tokens, p.num_experts, p.num_chosen));
  work.is_direct = p.num_tokens <= kDirectTokens;
  work.by_words = work.is_direct || p.plan.as_words;
  CHECK(!p.plan.as_words || p.num_tokens <= kWordTokens);
  const bool alone = AreExpertsAlone(p.num_tokens, p.hidden, p.intermediate);
  work.by_packets = alone && work.gate_up && work.down;
  CHECK(!work.by_packets || p.t_packets != nullptr);
  work.deal.items_of_tile = work.gate_up ? static_cast<int>(work.gate_up_rows / 128) : 0;
  work.deal.num_shared = work.shared_tiles * work.deal.items_of_tile;
  work.deal.num_routed = work.max_tiles * work.deal.items_of_tile;
  work.deal.weight = p.routed.kind == TileKind::kFp4 ? 2 : 1;
  if (alone) return RunAlone<Progress>(p, work, rank, stream);
  if (work.is_direct) return Run<ExpertStream<8, 5, 2, true>, Progress>(p, work, rank, stream);
  ExpertTileRows(p.num_tokens) == 8 ? Run<ExpertStream<8, 5, 2>, Progress>(p, work, rank, stream)
                                    : Run<ExpertStream<16, 3, 2>, Progress>(p, work, rank, stream);
}

}  // namespace

void LaunchStream(const CudaExpertParams& p, bool gate_up, bool down, device::Stream& stream) {
  ExpertWork work;
  work.gate_up = gate_up, work.down = down;
  work.gate_up_rows = p.intermediate, work.down_rows = p.hidden;
  Run<OwnProgress>(p, work, {}, stream);
}

void LaunchStream(const CudaExpertParams& p, const ExpertRank& rank, device::Stream& stream) {
  const int own = rank.exchange.peers.rank;
  CHECK(rank.outputs.peers.size == 1 || p.num_tokens == 1);
  ExpertWork work;
  work.gate_up = work.down = true;
  work.gate_up_rows = rank.blocks.count(own) * 128, work.down_rows = rank.down_rows;
  work.first_block = static_cast<int>(rank.blocks.begin[own]);
  Run<RankProgress>(p, work, rank, stream);
}

}  // namespace fathom::kernels
