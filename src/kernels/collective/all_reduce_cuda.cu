// No grid has more blocks than run at once (at most two of 256 or 512 threads a multiprocessor), so
// every block that is waited for runs.
#include <algorithm>
#include <type_traits>

#include "base/check.h"
#include "kernels/collective/all_reduce_cuda.h"
#include "kernels/collective/packets.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kChunkThreads = 512;
constexpr int kBlocks = 132;
constexpr int kEach = 4;  // packets of a thread that are on their way at once

static_assert(kBlocks >= kMaxChunks);

// kValues (4 or 8) values of the output from value `at` on, as BF16 words.
template <int kValues>
__device__ __forceinline__ void Combine(const CudaCombineParams& p, int64_t at,
                                        uint32_t (&words)[kValues / 2]) {
  using Vector = std::conditional_t<kValues == 8, uint4, uint2>;
  const SublayerOutput& o = p.output;
  const auto load = [&](int64_t place, uint32_t (&to)[kValues / 2]) {
    *reinterpret_cast<Vector*>(to) = *reinterpret_cast<const Vector*>(o.y + place);
  };
  load(at, words);
  if (o.pair_of == nullptr) return;
  const int64_t token = at / p.hidden, column = at % p.hidden;
  float sum[kValues] = {};
#pragma unroll 8
  for (int i = 0; i < o.num_chosen; ++i) {
    alignas(16) uint32_t pair[kValues / 2];
    load(int64_t{o.pair_of[token * o.num_chosen + i]} * p.hidden + column, pair);
#pragma unroll
    for (int k = 0; k < kValues / 2; ++k) {
      const float2 values = UnpackBf16(pair[k]);
      sum[2 * k] += values.x;
      sum[2 * k + 1] += values.y;
    }
  }
#pragma unroll
  for (int k = 0; k < kValues / 2; ++k) {
    const float2 own = UnpackBf16(words[k]);
    words[k] = PackBf16(sum[2 * k] + own.x, sum[2 * k + 1] + own.y);
  }
}

__device__ uint2 CombinePacket(const CudaCombineParams& p, int64_t packet) {
  alignas(16) uint32_t words[2];
  Combine<4>(p, packet * kPacketValues, words);
  return {words[0], words[1]};
}

__global__ void __launch_bounds__(kThreads)
    CombineKernel(const __grid_constant__ CudaCombineParams p) {
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t num_packets = p.num_tokens * p.hidden / kPacketValues;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < num_packets) reinterpret_cast<uint2*>(p.y)[i] = CombinePacket(p, i);
}

// Runs send(i, k), then receive(i, k), for the items i < count of this thread, kEach at a time.
template <typename Send, typename Receive>
__device__ __forceinline__ void Exchange(int64_t count, const Send& send, const Receive& receive) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < count;
       first += kEach * stride) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (first + k * stride < count) send(first + k * stride, k);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (first + k * stride < count) receive(first + k * stride, k);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    PacketSumKernel(const __grid_constant__ CudaPacketSumParams p) {
  const PeerView& peers = p.exchange.peers;
  const uint64_t number = ExchangeNumber(p.exchange);
  WaitForPredecessor();
  AllowSuccessor();
  uint2 own[kEach];
  Exchange(
      p.combine.num_tokens * p.combine.hidden / kPacketValues,
      [&](int64_t i, int k) {
        own[k] = CombinePacket(p.combine, i);
        SendPacket(peers, number, i, own[k]);
      },
      [&](int64_t i, int k) {
        reinterpret_cast<uint2*>(p.combine.y)[i] = ReceiveSum(peers, number, i, own[k]);
      });
}

// `most`: pairs of columns of the rank that has most; a row has so many packets.
__global__ void __launch_bounds__(kThreads)
    GatherColumnsKernel(const __grid_constant__ CudaGatherColumnsParams p, int64_t most) {
  const PeerView& peers = p.exchange.peers;
  const uint64_t number = ExchangeNumber(p.exchange);
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t stride = p.columns.begin[peers.size];
  const auto has = [&](int64_t i, int rank) {
    return i % most * 2 < p.columns.begin[rank + 1] - p.columns.begin[rank];
  };
  const auto place = [&](int64_t i, int rank) {
    return reinterpret_cast<uint2*>(p.values + i / most * stride + p.columns.begin[rank]) +
           i % most;
  };
  Exchange(
      p.num_rows * most,
      [&](int64_t i, int) {
        if (has(i, peers.rank)) SendPacket(peers, number, i, *place(i, peers.rank));
      },
      [&](int64_t i, int) {
        for (int from = 0; from < peers.size; ++from) {
          if (from == peers.rank || !has(i, from)) continue;
          *place(i, from) = ReceivePacket(peers, number, i, from);
        }
      });
}

__device__ uint4* ScatterOf(const PeerView& peers, int to, int from) {
  return reinterpret_cast<uint4*>(peers.memory[to] + peers.layout.scatter_offset +
                                  from * peers.layout.max_slice * 2);
}

// A chunk's range of all values: of the slice of rank `of`.
struct Chunk {
  __device__ Chunk(const TwoPhaseSplit& split, int64_t count, int of, int chunk)
      : offset(chunk * split.chunk),
        begin(of * split.slice + offset),
        size(max(int64_t{0}, min(split.chunk, count - begin))) {}
  int64_t offset;  // in the slice
  int64_t begin;
  int64_t size;
};

// Every rank's values to the ranks that sum them, the neighbour's first.
__global__ void __launch_bounds__(kChunkThreads, 2)
    ScatterKernel(const __grid_constant__ CudaTwoPhaseSumParams p, const TwoPhaseSplit split) {
  const PeerView& peers = p.exchange.peers;
  const uint64_t number = ExchangeNumber(p.exchange);
  WaitForPredecessor();
  AllowSuccessor();
  const int num_tasks = peers.size * split.num_chunks;
  for (int task = static_cast<int>(blockIdx.x); task < num_tasks;
       task += static_cast<int>(gridDim.x)) {
    const int to = (peers.rank + 1 + task / split.num_chunks) % peers.size;
    const int index = task % split.num_chunks;
    const Chunk chunk(split, p.combine.num_tokens * p.combine.hidden, to, index);
    uint4* const out = ScatterOf(peers, to, peers.rank) + chunk.offset / 8;
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < chunk.size / 8; i += kChunkThreads) {
      alignas(16) uint32_t words[4];
      Combine<8>(p.combine, chunk.begin + i * 8, words);
      out[i] = {words[0], words[1], words[2], words[3]};
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      RaiseFlag(FlagAt(peers, to, PeerPhase::kScatter, peers.rank, index), number);
    }
  }
}

// A block a chunk of this rank's slice: sums it, sends the sums to all, and waits for the others'.
__global__ void __launch_bounds__(kChunkThreads, 1)
    SumKernel(const __grid_constant__ CudaTwoPhaseSumParams p, const TwoPhaseSplit split) {
  const PeerView& peers = p.exchange.peers;
  const uint64_t number = ExchangeNumber(p.exchange);
  WaitForPredecessor();
  AllowSuccessor();
  const int index = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const Chunk chunk(split, p.combine.num_tokens * p.combine.hidden, peers.rank, index);
  const auto await = [&](PeerPhase phase) {
    if (thread < peers.size) {
      AwaitFlag(peers, FlagAt(peers, peers.rank, phase, thread, index), number, thread);
    }
  };
  await(PeerPhase::kScatter);
  __syncthreads();
#pragma unroll 2
  for (int64_t i = thread; i < chunk.size / 8; i += kChunkThreads) {
    float sum[8] = {};
    for (int from = 0; from < peers.size; ++from) {
      const uint4 words = __ldcg(ScatterOf(peers, peers.rank, from) + chunk.offset / 8 + i);
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 values = UnpackBf16(pairs[k]);
        sum[2 * k] += values.x;
        sum[2 * k + 1] += values.y;
      }
    }
    const uint4 words{PackBf16(sum[0], sum[1]), PackBf16(sum[2], sum[3]), PackBf16(sum[4], sum[5]),
                      PackBf16(sum[6], sum[7])};
    for (int step = 0; step < peers.size; ++step) {
      const int to = (peers.rank + 1 + step) % peers.size;
      reinterpret_cast<uint4*>(peers.memory[to] + peers.layout.sums_offset)[chunk.begin / 8 + i] =
          words;
    }
  }
  __syncthreads();
  if (thread < peers.size) {
    RaiseFlag(FlagAt(peers, thread, PeerPhase::kSums, peers.rank, index), number);
  }
  await(PeerPhase::kSums);
}

__global__ void EndExchangesKernel(uint64_t* exchanges, uint32_t num_exchanges) {
  WaitForPredecessor();
  *exchanges += num_exchanges;
  __threadfence();  // the next kernel reads it before its wait
  AllowSuccessor();
}

void CheckCombine(const CudaCombineParams& p) {
  CHECK_EQ(p.hidden % 128, 0);
  CHECK(p.output.y != nullptr);
}

}  // namespace

void Launch(const CudaCombineParams& p, device::Stream& stream) {
  if (p.num_tokens == 0) return;
  CheckCombine(p);
  const int64_t packets = p.num_tokens * p.hidden / kPacketValues;
  LaunchKernel(CombineKernel, static_cast<unsigned>((packets + kThreads - 1) / kThreads), kThreads,
               0, stream, p);
}

void Launch(const CudaPacketSumParams& p, device::Stream& stream) {
  if (p.combine.num_tokens == 0) return;
  CheckCombine(p.combine);
  const int64_t packets = p.combine.num_tokens * p.combine.hidden / kPacketValues;
  CHECK_LE(packets, p.exchange.peers.layout.num_packets);
  const int64_t blocks = std::min<int64_t>((packets + kThreads - 1) / kThreads, kBlocks);
  LaunchKernel(PacketSumKernel, static_cast<unsigned>(blocks), kThreads, 0, stream, p);
}

void Launch(const CudaTwoPhaseSumParams& p, device::Stream& stream) {
  if (p.combine.num_tokens == 0) return;
  CheckCombine(p.combine);
  const PeerView& peers = p.exchange.peers;
  const int64_t count = p.combine.num_tokens * p.combine.hidden;
  CHECK_LE(count, peers.layout.max_values);
  const TwoPhaseSplit split = SplitTwoPhase(count, peers.size);
  CHECK_LE(split.slice, peers.layout.max_slice);
  const int tasks = peers.size * split.num_chunks;
  LaunchKernel(ScatterKernel, static_cast<unsigned>(std::min(tasks, 2 * kBlocks)), kChunkThreads, 0,
               stream, p, split);
  LaunchKernel(SumKernel, static_cast<unsigned>(split.num_chunks), kChunkThreads, 0, stream, p,
               split);
}

void Launch(const CudaGatherColumnsParams& p, device::Stream& stream) {
  const int size = p.exchange.peers.size;
  for (int r = 0; r < size; ++r) {
    CHECK_EQ(p.columns.begin[r] % 2, 0);
    CHECK_GT(p.columns.count(r), 0);  // whoever waits for a rank must hear of it
  }
  const int64_t most_rows = RowsOfGather(p.exchange.peers, p.columns);
  const int64_t most_pairs = p.columns.most(size) / 2;
  CHECK_GT(most_rows, 0);
  CudaGatherColumnsParams part = p;
  for (int64_t row = 0; row < p.num_rows; row += most_rows) {
    part.num_rows = std::min(most_rows, p.num_rows - row);
    const int64_t packets = part.num_rows * most_pairs;
    const int64_t blocks = std::min<int64_t>((packets + kThreads - 1) / kThreads, kBlocks);
    LaunchKernel(GatherColumnsKernel, static_cast<unsigned>(blocks), kThreads, 0, stream, part,
                 most_pairs);
    part.values += most_rows * p.columns.begin[size];
    ++part.exchange.index;
  }
}

void Launch(const CudaEndExchangesParams& p, device::Stream& stream) {
  LaunchKernel(EndExchangesKernel, 1, 1, 0, stream, p.peers.exchanges, p.num_exchanges);
}

}  // namespace fathom::kernels
