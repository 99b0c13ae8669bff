// No grid has more blocks than run at once (at most two of 256 or 512 threads a multiprocessor), so
// every block that is waited for runs.
#include <algorithm>
#include <type_traits>

#include "base/check.h"
#include "kernels/collective/gather_cuda.h"
#include "kernels/collective/packets.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantize/quantize.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kPlainThreads = 512;
constexpr int kBlocks = 132;
constexpr int kEach = 4;  // packets, or chunks of plain values, of a thread that are on their way

static_assert(kBlocks <= kMaxGatherBlocks);

constexpr int kRowsAhead = 6;  // of a token's experts, on their way at once

// kValues (4 or 8) values of the output at a token and column, as BF16 words.
template <int kValues>
__device__ __forceinline__ void Combine(const SublayerOutput& o, int64_t hidden, int64_t token,
                                        int64_t column, uint32_t (&words)[kValues / 2]) {
  using Vector = std::conditional_t<kValues == 8, uint4, uint2>;
  const auto load = [&](int64_t row, uint32_t (&to)[kValues / 2]) {
    *reinterpret_cast<Vector*>(to) = *reinterpret_cast<const Vector*>(o.y + row * hidden + column);
  };
  load(token, words);
  if (o.pair_of == nullptr) return;
  float sum[kValues] = {};
  for (int first = 0; first < o.num_chosen; first += kRowsAhead) {
    int32_t rows[kRowsAhead];
    alignas(16) uint32_t pairs[kRowsAhead][kValues / 2];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const bool exists = first + i < o.num_chosen;
      rows[i] = exists ? o.pair_of[token * o.num_chosen + first + i] : -1;
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (rows[i] >= 0) load(rows[i], pairs[i]);
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      if (rows[i] < 0) continue;
#pragma unroll
      for (int k = 0; k < kValues / 2; ++k) {
        const float2 values = UnpackBf16(pairs[i][k]);
        sum[2 * k] += values.x;
        sum[2 * k + 1] += values.y;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kValues / 2; ++k) {
    const float2 own = UnpackBf16(words[k]);
    words[k] = PackBf16(sum[2 * k] + own.x, sum[2 * k + 1] + own.y);
  }
}

constexpr int kCombined = 8;  // values of a thread

__global__ void __launch_bounds__(kThreads)
    CombineKernel(const __grid_constant__ CudaCombineParams p) {
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, each = p.num_columns / kCombined;
  if (i >= p.num_tokens * each) return;
  const int64_t token = i / each, column = p.first_column + i % each * kCombined;
  alignas(16) uint32_t words[kCombined / 2];
  Combine<kCombined>(p.output, p.hidden, token, column, words);
  *reinterpret_cast<uint4*>(p.y + token * p.hidden + column) = {words[0], words[1], words[2],
                                                                words[3]};
}

// What the packets of a gather are. Rank r has count(r); Take has the i-th of this rank, Keep puts
// the i-th of another one in its place.
class TilePackets {
 public:
  // Of 128 columns of a row: 16 of codes, one of the scale.
  static constexpr int kOfBlock = 17;

  explicit TilePackets(const CudaGatherTilesParams& p) : p_(p) {}
  __host__ __device__ int count(int rank) const {
    return static_cast<int>(p_.num_tokens * (1 + p_.num_chosen) * p_.blocks.count(rank)) * kOfBlock;
  }
  __device__ uint2 Take(int i, int rank) const {
    const Place at(*this, i, rank);
    if (at.is_scale) return {__float_as_uint(*Scale(at)), 0};
    return *Codes(at);
  }
  __device__ void Keep(int i, int from, uint2 words) const {
    const Place at(*this, i, from);
    if (at.is_scale) {
      *Scale(at) = __uint_as_float(words.x);
    } else {
      *Codes(at) = words;
    }
  }

 private:
  struct Place {
    __device__ Place(const TilePackets& packets, int i, int rank) {
      const CudaGatherTilesParams& p = packets.p_;
      const auto blocks = static_cast<int>(p.blocks.count(rank));
      const int part = i % kOfBlock, of_row = i / kOfBlock;
      const int index = of_row / blocks, tokens = static_cast<int>(p.num_tokens);
      row = index < tokens ? index : p.pair_of[index - tokens];
      block = p.blocks.begin[rank] + of_row % blocks;
      column = block * 128 + part * 8;
      is_scale = part == kOfBlock - 1;
    }
    int64_t row, block, column;
    bool is_scale;
  };
  __device__ uint2* Codes(const Place& at) const {
    const int64_t offset = Fp8TileOffset(at.row, at.column, p_.tiles.row_groups);
    return reinterpret_cast<uint2*>(p_.tiles.codes + offset);
  }
  __device__ float* Scale(const Place& at) const {
    return p_.tiles.scales + at.block * p_.tiles.row_groups * 8 + at.row;
  }

  CudaGatherTilesParams p_;
};

class OutputPackets {
 public:
  OutputPackets(const CudaGatherOutputParams& p, int size)
      : p_(p), hidden_(p.columns.begin[size]) {}
  __host__ __device__ int count(int rank) const {
    return static_cast<int>(p_.num_tokens * p_.columns.count(rank)) / 4;
  }
  // Kept, too: this rank's columns of y.
  __device__ uint2 Take(int i, int rank) const {
    int64_t token, column;
    Find(i, rank, token, column);
    alignas(16) uint32_t words[2];
    Combine<4>(p_.output, hidden_, token, column, words);
    *Y(token, column) = {words[0], words[1]};
    return {words[0], words[1]};
  }
  __device__ void Keep(int i, int from, uint2 words) const {
    int64_t token, column;
    Find(i, from, token, column);
    *Y(token, column) = words;
  }

 private:
  __device__ void Find(int i, int rank, int64_t& token, int64_t& column) const {
    const int each = static_cast<int>(p_.columns.count(rank)) / 4;
    token = i / each, column = p_.columns.begin[rank] + i % each * 4;
  }
  __device__ uint2* Y(int64_t token, int64_t column) const {
    return reinterpret_cast<uint2*>(p_.y + token * hidden_ + column);
  }

  CudaGatherOutputParams p_;
  int64_t hidden_;
};

class ColumnPackets {
 public:
  ColumnPackets(const CudaGatherColumnsParams& p, int size)
      : p_(p), stride_(p.columns.begin[size]) {}
  __host__ __device__ int count(int rank) const {
    return static_cast<int>(p_.num_rows * p_.columns.count(rank)) / 2;
  }
  __device__ uint2 Take(int i, int rank) const { return *Find(i, rank); }
  __device__ void Keep(int i, int from, uint2 words) const { *Find(i, from) = words; }

 private:
  __device__ uint2* Find(int i, int rank) const {
    const int each = static_cast<int>(p_.columns.count(rank)) / 2;
    float* const row = p_.values + i / each * stride_ + p_.columns.begin[rank];
    return reinterpret_cast<uint2*>(row) + i % each;
  }

  CudaGatherColumnsParams p_;
  int64_t stride_;
};

// `most`: packets of the rank that has most, at least 1: who has none sends one without values.
template <typename Packets>
__global__ void __launch_bounds__(kThreads)
    PacketGatherKernel(const __grid_constant__ PeerExchange exchange,
                       const __grid_constant__ Packets packets, int most) {
  const PeerView& peers = exchange.peers;
  const uint64_t number = ExchangeNumber(exchange);
  WaitForPredecessor();
  AllowSuccessor();
  const int own = packets.count(peers.rank), stride = static_cast<int>(gridDim.x) * kThreads;
  for (int first = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); first < most;
       first += kEach * stride) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = first + k * stride;
      if (i >= max(own, 1)) continue;
      SendPacket(peers, number, i, i < own ? packets.Take(i, peers.rank) : uint2{});
    }
    for (int from = 0; from < peers.size; ++from) {
      if (from == peers.rank) continue;
      const int count = packets.count(from);
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int i = first + k * stride;
        if (i >= max(count, 1)) continue;
        const uint2 words = ReceivePacket(peers, number, i, from);
        if (i < count) packets.Keep(i, from, words);
      }
    }
  }
}

template <typename Packets>
int MostPackets(const Packets& packets, int size) {
  int most = 1;
  for (int r = 0; r < size; ++r) most = std::max(most, packets.count(r));
  return most;
}

template <typename Packets>
void LaunchPackets(const PeerExchange& exchange, const Packets& packets, device::Stream& stream) {
  const int most = MostPackets(packets, exchange.peers.size);
  CHECK_LE(most, kMaxPackets);
  LaunchKernel(PacketGatherKernel<Packets>,
               static_cast<unsigned>(std::min((most + kThreads - 1) / kThreads, kBlocks)), kThreads,
               0, stream, exchange, packets, most);
}

// This rank's part of a matrix to all others, at the same place.
__device__ void SendPart(const PeerView& peers, const GatheredMatrix& matrix) {
  const GatheredMatrix::Part& part = matrix.of[peers.rank];
  const auto each = static_cast<uint32_t>(part.width / 16);
  const auto count = static_cast<uint32_t>(part.bytes() / 16), stride = gridDim.x * kPlainThreads;
  const std::byte* const own = matrix.data + part.offset;
  const int64_t place = own - peers.memory[peers.rank];
  for (uint32_t first = blockIdx.x * kPlainThreads + threadIdx.x; first < count;
       first += kEach * stride) {
    uint4 chunks[kEach];
    int64_t offsets[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32_t i = first + k * stride;
      if (i >= count) break;
      offsets[k] = i / each * matrix.pitch + i % each * 16;
      chunks[k] = *reinterpret_cast<const uint4*>(own + offsets[k]);
    }
    for (int to = 0; to < peers.size; ++to) {
      if (to == peers.rank) continue;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        if (first + k * stride >= count) break;
        *reinterpret_cast<uint4*>(peers.memory[to] + place + offsets[k]) = chunks[k];
      }
    }
  }
}

// When the block has sent its values: until those of the same block of all others are here.
__device__ void AwaitOthers(const PeerView& peers, uint64_t number) {
  __syncthreads();
  const int other = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  if (other >= peers.size || other == peers.rank) return;
  RaiseFlag(FlagAt(peers, other, peers.rank, block), number);
  AwaitFlag(peers, FlagAt(peers, peers.rank, other, block), number, other);
}

__global__ void __launch_bounds__(kPlainThreads, 2)
    GatherKernel(const __grid_constant__ CudaGatherParams p) {
  const PeerView& peers = p.exchange.peers;
  const uint64_t number = ExchangeNumber(p.exchange);
  WaitForPredecessor();
  AllowSuccessor();
  for (int i = 0; i < p.num_matrices; ++i) SendPart(peers, p.matrices[i]);
  AwaitOthers(peers, number);
}

__global__ void __launch_bounds__(kPlainThreads, 2)
    GatherOutputKernel(const __grid_constant__ CudaGatherOutputParams p) {
  const PeerView& peers = p.exchange.peers;
  const uint64_t number = ExchangeNumber(p.exchange);
  WaitForPredecessor();
  AllowSuccessor();
  const int64_t hidden = p.columns.begin[peers.size], first = p.columns.begin[peers.rank];
  const auto each = static_cast<uint32_t>(p.columns.count(peers.rank) / kCombined);
  const auto count = static_cast<uint32_t>(p.num_tokens) * each;
  const int64_t place = reinterpret_cast<std::byte*>(p.y) - peers.memory[peers.rank];
  const bool is_shared_out = p.tokens.begin[peers.size] > 0;
  for (uint32_t i = blockIdx.x * kPlainThreads + threadIdx.x; i < count;
       i += gridDim.x * kPlainThreads) {
    const int64_t token = i / each, column = first + i % each * kCombined;
    alignas(16) uint32_t words[kCombined / 2];
    Combine<kCombined>(p.output, hidden, token, column, words);
    const int64_t at = place + (token * hidden + column) * int64_t{sizeof(__nv_bfloat16)};
    for (int to = 0; to < peers.size; ++to) {
      const bool needs = token >= p.tokens.begin[to] && token < p.tokens.begin[to + 1];
      if (is_shared_out && !needs) continue;
      *reinterpret_cast<uint4*>(peers.memory[to] + at) = {words[0], words[1], words[2], words[3]};
    }
  }
  AwaitOthers(peers, number);
}

// Eight threads take 128 columns of a row.
__global__ void __launch_bounds__(kPlainThreads, 2)
    GatherTilesKernel(const __grid_constant__ CudaGatherTilesParams p) {
  const PeerView& peers = p.exchange.peers;
  const uint64_t number = ExchangeNumber(p.exchange);
  WaitForPredecessor();
  AllowSuccessor();
  const auto blocks = static_cast<uint32_t>(p.blocks.count(peers.rank));
  const auto tokens = static_cast<uint32_t>(p.num_tokens);
  const uint32_t count = tokens * static_cast<uint32_t>(1 + p.num_chosen) * blocks * 8;
  const auto send = [&](auto* place) {
    const auto value = *place;
    const int64_t offset = reinterpret_cast<std::byte*>(place) - peers.memory[peers.rank];
    for (int to = 0; to < peers.size; ++to) {
      if (to == peers.rank) continue;
      *reinterpret_cast<decltype(place)>(peers.memory[to] + offset) = value;
    }
  };
  for (uint32_t i = blockIdx.x * kPlainThreads + threadIdx.x; i < count;
       i += gridDim.x * kPlainThreads) {
    const uint32_t index = i / 8 / blocks;
    const int64_t row = index < tokens ? index : p.pair_of[index - tokens];
    const int64_t block = p.blocks.begin[peers.rank] + i / 8 % blocks;
    const int64_t chunk = Fp8TileOffset(row, block * 128 + i % 8 * 16, p.tiles.row_groups);
    send(reinterpret_cast<uint4*>(p.tiles.codes + chunk));
    if (i % 8 == 0) send(p.tiles.scales + block * p.tiles.row_groups * 8 + row);
  }
  AwaitOthers(peers, number);
}

// Where the values of rank `from` land in the memory of rank `to`.
__device__ uint4* LandingAt(const PeerView& peers, int to, int from, uint64_t number) {
  const int64_t place = static_cast<int64_t>(number & 1) * peers.size + from;
  return reinterpret_cast<uint4*>(peers.memory[to] + peers.layout.landing_offset) +
         place * (kLandingBytes / 16 / peers.size);
}

// A block writes to the others what the same block of theirs then moves to its place.
__global__ void __launch_bounds__(kPlainThreads, 2)
    GatherColumnsKernel(const __grid_constant__ CudaGatherColumnsParams p) {
  const PeerView& peers = p.exchange.peers;
  const uint64_t number = ExchangeNumber(p.exchange);
  WaitForPredecessor();
  AllowSuccessor();
  // move(i, place): chunk i of a rank's.
  const auto each_chunk = [&](int rank, const auto& move) {
    const auto of_row = static_cast<uint32_t>(p.columns.count(rank) / 4);
    const auto count = static_cast<uint32_t>(p.num_rows) * of_row;
#pragma unroll 4
    for (uint32_t i = blockIdx.x * kPlainThreads + threadIdx.x; i < count;
         i += gridDim.x * kPlainThreads) {
      float* const row = p.values + i / of_row * p.columns.begin[peers.size];
      move(i, reinterpret_cast<uint4*>(row + p.columns.begin[rank]) + i % of_row);
    }
  };
  each_chunk(peers.rank, [&](uint32_t i, const uint4* place) {
    const uint4 chunk = *place;
    for (int to = 0; to < peers.size; ++to) {
      if (to != peers.rank) LandingAt(peers, to, peers.rank, number)[i] = chunk;
    }
  });
  AwaitOthers(peers, number);
  __syncthreads();
  for (int from = 0; from < peers.size; ++from) {
    if (from == peers.rank) continue;
    const uint4* const landing = LandingAt(peers, peers.rank, from, number);
    each_chunk(from, [&](uint32_t i, uint4* place) { *place = __ldcg(landing + i); });
  }
}

__global__ void EndExchangesKernel(uint64_t* exchanges, uint32_t num_exchanges) {
  WaitForPredecessor();
  *exchanges += num_exchanges;
  __threadfence();  // the next kernel reads it before its wait
  AllowSuccessor();
}

// What of a gather of columns is one exchange: all of it as packets if they have room, else as many
// rows as there is room for at the landing.
struct ColumnExchange {
  bool as_packets = true;
  int64_t rows = 0;
};
ColumnExchange SplitColumns(const CudaGatherColumnsParams& p) {
  const int size = p.exchange.peers.size;
  const int64_t most = p.columns.most(size);
  bool in_chunks = true;
  for (int r = 0; r <= size; ++r) in_chunks &= p.columns.begin[r] % 4 == 0;
  const int64_t packet_rows = kMaxPackets / (most / 2);
  if ((size == 2 && p.num_rows <= packet_rows) || !in_chunks) return {true, packet_rows};
  return {false, kLandingBytes / size / (most * int64_t{sizeof(float)})};
}

// Of a kernel of so many chunks of 16 bytes: as many on every rank.
unsigned PlainBlocks(const PeerView& peers, int64_t chunks) {
  const int most = peers.num_multiprocessors > 0
                       ? std::min(2 * peers.num_multiprocessors, kMaxGatherBlocks)
                       : kBlocks;
  return static_cast<unsigned>(
      std::clamp<int64_t>((chunks + kPlainThreads - 1) / kPlainThreads, 1, most));
}

}  // namespace

GatheredMatrix GatheredColumns(void* data, int64_t num_rows, int64_t value_bytes,
                               const RankParts& columns, int size) {
  GatheredMatrix matrix{.data = static_cast<std::byte*>(data),
                        .pitch = columns.begin[size] * value_bytes};
  for (int r = 0; r < size; ++r) {
    matrix.of[r] = {columns.begin[r] * value_bytes, columns.count(r) * value_bytes, num_rows};
  }
  return matrix;
}

GatheredMatrix GatheredRows(void* data, int64_t pitch, int64_t width, const RankParts& rows,
                            int size) {
  GatheredMatrix matrix{.data = static_cast<std::byte*>(data), .pitch = pitch};
  for (int r = 0; r < size; ++r) matrix.of[r] = {rows.begin[r] * pitch, width, rows.count(r)};
  return matrix;
}

void MatricesOf(const CudaGatherTilesParams& p, int size, GatheredMatrix (&matrices)[2]) {
  constexpr int64_t kScaleBytes = kTileRows * sizeof(float);  // of a tile
  const int64_t groups = p.tiles.row_groups, used = (p.num_rows + kTileRows - 1) / kTileRows;
  CHECK_LE(used, groups);
  matrices[0] = GatheredRows(p.tiles.codes, groups * kTileBytes, used * kTileBytes, p.blocks, size);
  matrices[1] =
      GatheredRows(p.tiles.scales, groups * kScaleBytes, used * kScaleBytes, p.blocks, size);
}

void Launch(const CudaGatherTilesParams& p, device::Stream& stream) {
  const PeerView& peers = p.exchange.peers;
  const int64_t most = p.num_tokens * (1 + p.num_chosen) * p.blocks.most(peers.size);
  if (GoesAsPackets(most * TilePackets::kOfBlock, peers.size)) {
    return LaunchPackets(p.exchange, TilePackets(p), stream);
  }
  const int64_t tiles = p.blocks.begin[peers.size] * p.tiles.row_groups;
  CHECK(IsShared(peers, p.tiles.codes, tiles * kTileBytes));
  CHECK(IsShared(peers, p.tiles.scales, tiles * kTileRows * 4));
  LaunchKernel(GatherTilesKernel, PlainBlocks(peers, most * 8), kPlainThreads, 0, stream, p);
}

void Launch(const CudaGatherOutputParams& p, device::Stream& stream) {
  const PeerView& peers = p.exchange.peers;
  const int64_t most = p.num_tokens * p.columns.most(peers.size);
  if (GoesAsPackets(most / 4, peers.size)) {
    return LaunchPackets(p.exchange, OutputPackets(p, peers.size), stream);
  }
  const int64_t row_bytes = p.columns.begin[peers.size] * int64_t{sizeof(__nv_bfloat16)};
  CHECK(IsShared(peers, p.y, p.num_tokens * row_bytes));
  LaunchKernel(GatherOutputKernel, PlainBlocks(peers, most / kCombined), kPlainThreads, 0, stream,
               p);
}

void Launch(const CudaCombineParams& p, device::Stream& stream) {
  const int64_t threads = p.num_tokens * p.num_columns / kCombined;
  if (threads == 0) return;
  LaunchKernel(CombineKernel, static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads,
               0, stream, p);
}

void Launch(const CudaGatherParams& p, device::Stream& stream) {
  const PeerView& peers = p.exchange.peers;
  int64_t most = 0;  // chunks of a rank
  for (int r = 0; r < peers.size; ++r) {
    int64_t chunks = 0;
    for (int i = 0; i < p.num_matrices; ++i) {
      const GatheredMatrix& matrix = p.matrices[i];
      const GatheredMatrix::Part& part = matrix.of[r];
      CHECK_EQ((part.offset | matrix.pitch | part.width) % 16, 0);
      CHECK_LT(part.bytes() / 16, int64_t{1} << 31);
      chunks += part.bytes() / 16;
      if (part.bytes() == 0) continue;
      CHECK(IsShared(peers, matrix.data,
                     part.offset + (part.height - 1) * matrix.pitch + part.width));
    }
    most = std::max(most, chunks);
  }
  LaunchKernel(GatherKernel, PlainBlocks(peers, most), kPlainThreads, 0, stream, p);
}

int64_t NumExchanges(const CudaGatherColumnsParams& p) {
  const int64_t rows = SplitColumns(p).rows;
  return (p.num_rows + rows - 1) / rows;
}

void Launch(const CudaGatherColumnsParams& p, device::Stream& stream) {
  const int size = p.exchange.peers.size;
  for (int r = 0; r <= size; ++r) CHECK_EQ(p.columns.begin[r] % 2, 0);
  const ColumnExchange each = SplitColumns(p);
  CHECK_GT(each.rows, 0);
  CudaGatherColumnsParams part = p;
  for (int64_t row = 0; row < p.num_rows; row += each.rows) {
    part.num_rows = std::min(each.rows, p.num_rows - row);
    if (each.as_packets) {
      LaunchPackets(part.exchange, ColumnPackets(part, size), stream);
    } else {
      LaunchKernel(GatherColumnsKernel,
                   PlainBlocks(p.exchange.peers, part.num_rows * p.columns.most(size) / 4),
                   kPlainThreads, 0, stream, part);
    }
    part.values += part.num_rows * p.columns.begin[size];
    ++part.exchange.index;
  }
}

void Launch(const CudaEndExchangesParams& p, device::Stream& stream) {
  LaunchKernel(EndExchangesKernel, 1, 1, 0, stream, p.peers.exchanges, p.num_exchanges);
}

}  // namespace fathom::kernels
