// Attention of steps of few tokens where a tile of 80 keys is enough for each of 2, 4 or 8 splits
// of a token, or two tiles for each of 2 or 8: the splits are a cluster of blocks, for 8, 16 or 32
// heads. Each has the output columns of some warps of all blocks, whose sums are sent to it
// (st.async counts on its barriers, so nobody meets), and adds them up in the order of the splits.
// How many splits there are depends on keys and tokens, so a head has the same bits with any number
// of heads a block. Behind a long selection queries and entries are awaited as words, of launches
// that have not ended, so blocks start beside it. Device code only.
#pragma once

#include "kernels/aligned_shared.cuh"
#include "kernels/launch.cuh"
#include "kernels/sparse_attention/attention_decode.cuh"
#include "kernels/sparse_attention/decode_tile.cuh"

namespace fathom::kernels {

inline constexpr int kClusterKeys = 80;
inline constexpr int kMaxClusterSplits = 8;

// Of a warp's 64 columns: [8 heads, 4 times 16 columns], a lane's as mma has them.
using WarpColumns = float4[4][32];

template <int kHeads, int kSplits>
struct ClusterShared : DecodeShared<kHeads, kClusterKeys> {
  static constexpr int kTiles = kHeads / 8, kWarpsEach = kHeadWarps / kSplits;
  alignas(16) WarpColumns sums[kSplits][kWarpsEach][kTiles];  // from every split
  float2 parts[kHeads][kSplits];                              // maximum (log2 units), sum
  alignas(16) float weights[kHeads][kSplits];
  float inverse[kHeads];
  float2 angles[kRopeDim / 2];
  uint64_t told, landed;  // parts, sums
};
template <int kHeads, int kSplits>
inline constexpr size_t kClusterSharedBytes = sizeof(ClusterShared<kHeads, kSplits>) + 1024;

template <int kHeads, int kSplits, bool kAwaits, bool kOneTile>
class ClusterAttention : DecodeTile<kHeads, kClusterKeys, kOneTile> {
  using Base = DecodeTile<kHeads, kClusterKeys, kOneTile>;
  using Base::first_head_, Base::lane_, Base::max_, Base::o_, Base::p_, Base::sum_, Base::token_,
      Base::warp_;

 public:
  using Shared = ClusterShared<kHeads, kSplits>;

  __device__ ClusterAttention(const CudaSparseAttentionParams& params, Shared& shared,
                              const TokenKeys& keys, int token, int first_head)
      : Base(params, shared, token, first_head),
        s_(shared),
        keys_(keys),
        rank_(static_cast<int>(ClusterRank())) {}

  // Keys [first, end) of the token, at most a tile, or two.
  __device__ void Run(int first, int end) {
    if (threadIdx.x == 0) {
      BarrierInit(&s_.told, 1), BarrierInit(&s_.landed, 1);
      BarrierInitFence();
      BarrierExpectBytes(&s_.told, sizeof(s_.parts));
      BarrierExpectBytes(&s_.landed, sizeof(s_.sums));
    }
    ClusterArrive();
    LoadTile(first, end);
    if constexpr (!kOneTile) AddFirstTile(first, end);
    __syncthreads();
    ClusterWait();  // every block has started
    const int count = end - first;
    if (warp_ % Base::kKeyRows * 16 < count) Base::Score();
    __syncthreads();
    if (Base::has_heads() && count > 0) Base::MakeProbabilities(count);
    __syncthreads();
    if (Base::has_heads()) {
      TellPart();
      if (kOneTile || count > 0) Base::AddValues(count);  // of no keys there is nothing to read
      SendSums();
    }
  }

  // This block's columns of the output.
  __device__ void Combine() {
    if (threadIdx.x < kWeighers) WeighParts();
    __syncthreads();
    if (!Base::has_heads()) return;
#pragma unroll
    for (int t = 0; t < Base::kTiles; ++t) {
      const Weights weights = LoadWeights(8 * t + ColumnHead());
      if (t == 0) BarrierWaitCluster(&s_.landed, 0);
#pragma unroll
      for (int i = 0; i < Shared::kWarpsEach; ++i) {
        const float2 o = SumOf(i, t, weights);
        WriteColumns(i, t, {o.x * weights.inverse.x, o.y * weights.inverse.y});
      }
    }
  }

 private:
  // A thread for each part, whole warps.
  static constexpr int kWeighers = (kHeads * kSplits + 31) / 32 * 32;

  // The first of two tiles, whose place the second one takes. That one's keys are on their way
  // meanwhile, where there are registers for them.
  __device__ void AddFirstTile(int& first, int end) {
    if (end - first <= kClusterKeys) return;
    constexpr bool kAhead = kHeads < 32;
    first += kClusterKeys;
    const int k = first + Base::key_row();
    const KeyBytes bytes = k < end ? keys_.Bytes(k, keys_.Entry(k)) : KeyBytes{};
    KeyRow key;
    if (kAhead) key.Fetch(bytes, Base::key_lane());
    __syncthreads();
    Base::Score();
    __syncthreads();
    if (Base::has_heads()) Base::MakeProbabilities(kClusterKeys);
    __syncthreads();
    if (Base::has_heads()) Base::AddValues(kClusterKeys);
    if (!kAhead) key.Fetch(bytes, Base::key_lane());
    __syncthreads();
    Place(key);
  }

  // Queries and keys: what is older than the last launch before the wait.
  __device__ void LoadTile(int first, int end) {
    const int k = first + Base::key_row();
    const auto angles = Base::LoadAngles();
    if (threadIdx.x < kRopeDim / 2) {
      s_.angles[threadIdx.x] =
          reinterpret_cast<const float2*>(p_.angles + int64_t{token_} * kRopeDim)[threadIdx.x];
    }
    const int weighed = first_head_ + static_cast<int>(threadIdx.x) / kSplits % kHeads;
    sink_ = weighed < p_.num_heads ? p_.sink[weighed] : 0;
    const bool early = k >= end || keys_.IsEarly(k);
    if constexpr (kAwaits) {
      AwaitTile(k, end, early, angles);
      return;
    }
    const bool queries_early = p_.q_is_early;
    uint4 q[Base::kTiles][2];
#pragma unroll 1  // instructions that run once are slow
    for (int after = 0; after < 2; ++after) {
      if (after == 1) {
        WaitForPredecessor();
        AllowSuccessor();
      }
      const bool prepare = (after == 0) == queries_early && Base::has_heads();
      if (prepare) Base::LoadHead(q);
      if (early == (after == 0)) {
        KeyRow key;
        key.Fetch(k < end ? keys_.Bytes(k, keys_.Entry(k)) : KeyBytes{}, Base::key_lane());
        Place(key);
      }
      if (prepare) Base::PrepareHead(q, angles);
    }
  }
  // What is early, then queries and the other keys as they are told, whichever comes first. Nothing
  // is placed before where such a key will be, so that the instructions are there by then.
  __device__ void AwaitTile(int k, int end, bool early, const typename Base::AngleQuad& angles) {
    const uint32_t number = ValueOf(p_.words.number);
    bool prepared = !Base::has_heads();
#pragma unroll 1
    for (int after = 0; after < 2; ++after) {
      const bool fetches = early == (after == 0);
      KeyRow key;
      bool asked = false;
#pragma unroll 1
      do {
        uint4 q[Base::kTiles][2];
        int entry;
        if (!asked && keys_.IsTold(k, fetches && after == 1, number, entry)) {
          key.Fetch(fetches && k < end ? keys_.Bytes(k, entry) : KeyBytes{}, Base::key_lane());
          asked = true;
        }
        if (!prepared && after == 1 && Base::IsTold(q, number)) {
          Base::PrepareHead(q, angles);
          prepared = true;
        }
      } while (!asked || (!prepared && after == 1));
      if (after == 1) AllowSuccessor();  // what it fetches queues behind these keys
      if (fetches || after == 0) Place(key);
    }
  }
  __device__ void Place(const KeyRow& key) const {
    key.template Place<kClusterKeys>(Base::tile(), Base::key_row(), Base::key_lane());
  }

  __device__ void TellPart() const {
    const int to = lane_ % Base::kHeadLanes;
    if (to >= kSplits) return;
    SendInCluster(AddressInBlock(&s_.parts[Base::scored_head()][rank_], to), float2{max_, sum_},
                  AddressInBlock(&s_.told, to));
  }

  __device__ void SendSums() const {
    const int to = warp_ / Shared::kWarpsEach;
    const uint32_t sums = AddressInBlock(s_.sums[rank_][warp_ % Shared::kWarpsEach], to);
    const uint32_t barrier = AddressInBlock(&s_.landed, to);
#pragma unroll
    for (int t = 0; t < Base::kTiles; ++t) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const auto& o = o_[t][m];
        const uint32_t place = sums + ((t * 4 + m) * 32 + lane_) * sizeof(float4);
        SendInCluster(place, float4{o[0], o[1], o[2], o[3]}, barrier);
      }
    }
  }

  // What each part is multiplied with, and the sums after that.
  __device__ void WeighParts() {
    BarrierWaitCluster(&s_.told, 0);
    const int head = static_cast<int>(threadIdx.x) / kSplits % kHeads;
    const int split = static_cast<int>(threadIdx.x) % kSplits;
    const float2 part = s_.parts[head][split];
    const float max = WarpMax<kSplits>(part.x);
    const float weight = exp2f(part.x - max);
    const float sum = WarpSum<kSplits>(__fmul_rn(weight, part.y)) + SinkWeight(sink_, max);
    s_.weights[head][split] = weight;
    if (split == 0) s_.inverse[head] = 1.0f / sum;
  }

  // Of a warp's columns and 8 heads a thread has a column of two heads, this one and the next: what
  // the lane SourceLane of that warp sent.
  __device__ static int SourceLane() { return static_cast<int>(threadIdx.x) / 2 % 32; }
  __device__ static int ColumnHead() { return SourceLane() % 4 * 2; }
  struct Weights {
    float2 parts[kSplits], inverse;
  };
  __device__ Weights LoadWeights(int head) const {
    Weights weights;
#pragma unroll
    for (int r = 0; r < kSplits; ++r) {
      weights.parts[r] = {s_.weights[head][r], s_.weights[head + 1][r]};
    }
    weights.inverse = {s_.inverse[head], s_.inverse[head + 1]};
    return weights;
  }
  __device__ float2 SumOf(int i, int t, const Weights& weights) const {
    float2 o{0, 0};
#pragma unroll
    for (int r = 0; r < kSplits; ++r) {
      const float2 v = reinterpret_cast<const float2*>(s_.sums[r][i][t])[threadIdx.x];
      o = {fmaf(weights.parts[r].x, v.x, o.x), fmaf(weights.parts[r].y, v.y, o.y)};
    }
    return o;
  }
  // Of the i-th warp's columns. Columns next to each other are eight lanes apart: each of two such
  // lanes finishes a pair of one head.
  __device__ void WriteColumns(int i, int t, float2 o) const {
    const bool second = lane_ / 8 % 2 != 0;
    const float other = __shfl_xor_sync(0xffffffffu, second ? o.x : o.y, 8);
    const float2 pair = second ? float2{other, o.y} : float2{o.x, other};
    const int head = first_head_ + 8 * t + ColumnHead() + (second ? 1 : 0);
    const int thread = static_cast<int>(threadIdx.x);
    const int column = (rank_ * Shared::kWarpsEach + i) * 64 + thread / 64 * 16 + thread % 2 * 8 +
                       thread / 2 % 32 / 8 * 2;
    if (head >= p_.num_heads) return;
    const int64_t offset =
        Bf16TileOffset(token_, int64_t{head} * kHeadDim + column, p_.out.row_groups);
    *reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(p_.out.values) + offset) =
        FinishPair(pair, column, s_.angles);
  }

  Shared& s_;
  const TokenKeys& keys_;
  int rank_;
  float sink_;
};

// Of 8 heads: registers and shared memory beside a block of the query products.
template <int kHeads, int kSplits, bool kAwaits, bool kOneTile>
__global__ void __maxnreg__(!kOneTile      ? 168
                            : kHeads == 8  ? 96
                            : kHeads == 16 ? 128
                                           : 200)
    ClusterAttentionKernel(const __grid_constant__ CudaSparseAttentionParams p) {
  extern __shared__ uint8_t dynamic[];
  auto& shared = AlignedShared<ClusterShared<kHeads, kSplits>>(dynamic);
  const int split = blockIdx.x, token = blockIdx.z;
  const TokenKeys keys(p, token);
  if (keys.is_padding()) {
    WaitForPredecessor();
    AllowSuccessor();
    return;
  }
  keys.PrefetchTable();
  keys.PrefetchEntries((blockIdx.y * kSplits + split) * blockDim.x + threadIdx.x,
                       gridDim.y * kSplits * blockDim.x);
  const int each = KeysOfSplit(keys.size(), kSplits, 0);
  const int first = min(split * each, keys.size()), end = min(first + each, keys.size());
  ClusterAttention<kHeads, kSplits, kAwaits, kOneTile> attention(
      p, shared, keys, token, static_cast<int>(blockIdx.y) * kHeads);
  attention.Run(first, end);
  attention.Combine();
  if (kAwaits) WaitForPredecessor();  // who waits for this, waits for both
}

}  // namespace fathom::kernels
