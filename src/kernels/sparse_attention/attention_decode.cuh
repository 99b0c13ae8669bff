// Attention of steps of few tokens: latency counts, so a token's work is spread thin. A block takes
// 8, 16 or 32 heads and a split of the keys, a tile of 64 at a time. A tile is fetched while the
// one before is added up, the first before the wait where earlier launches than the last wrote it.
// Splits leave their parts to CombineKernel, whose blocks start beside them; where a tile each is
// enough they are a cluster (attention_cluster.cuh). Device code only.
#pragma once

#include "kernels/aligned_shared.cuh"
#include "kernels/launch.cuh"
#include "kernels/sparse_attention/decode_tile.cuh"

namespace fathom::kernels {

inline constexpr int kDecodeThreads = 256;
inline constexpr int kSplitGranule = 8;  // keys

// The splits' parts of each head: 512 sums; their maximum (log2 units) and sum of p.
struct AttentionParts {
  float* sums = nullptr;     // [num_tokens, num_heads, max_splits, 512]
  float2* scales = nullptr;  // [num_tokens, num_heads, max_splits]
  int max_splits = 0;
  int least_keys = 0;  // of a decode's splits (KeysOfSplit); 0: KeySplits says how many there are
};

// Keys of each of at most `splits` splits of a token, at least `least` of them.
__device__ __forceinline__ int KeysOfSplit(int num_keys, int splits, int least) {
  const int each = (num_keys + splits - 1) / splits;
  return max((each + kSplitGranule - 1) / kSplitGranule * kSplitGranule, least);
}

template <int kHeads>
struct PartShared : DecodeShared<kHeads, kKeyTile> {
  float2 part[kHeads];  // maximum (log2 units), sum
};
template <int kHeads>
inline constexpr size_t kDecodeSharedBytes = sizeof(PartShared<kHeads>) + 1024;

template <int kHeads>
class DecodeAttention : DecodeTile<kHeads, kKeyTile, false> {
  using Base = DecodeTile<kHeads, kKeyTile, false>;
  using Base::first_head_, Base::lane_, Base::max_, Base::o_, Base::p_, Base::sum_, Base::token_,
      Base::warp_;

 public:
  static_assert(Base::kThreads == kDecodeThreads);

  __device__ DecodeAttention(const CudaSparseAttentionParams& params, PartShared<kHeads>& shared,
                             const TokenKeys& keys, int token, int first_head)
      : Base(params, shared, token, first_head), s_(shared), keys_(keys) {}

  // Keys [first, end) of the token: this block's part of the sums.
  __device__ void Run(int first, int end) {
    const int num_tiles = (end - first + kKeyTile - 1) / kKeyTile;
    const int row = Base::key_row(), lane = Base::key_lane();
    KeyRow key;
    // The next key's entry and page are read ahead of its bytes.
    int entry = 0, page = 0;
    const auto locate = [&](int i) {
      const int k = first + i * kKeyTile + row;
      if (k < end) entry = keys_.Entry(k), page = keys_.Page(k, entry);
    };
    const auto fetch = [&](int i) {
      const int k = first + i * kKeyTile + row;
      key.Fetch(k < end ? keys_.Bytes(k, entry, page) : KeyBytes{}, lane);
    };
    // Before the wait: what the last launch has not written, and all that can be done with it.
    const bool early = keys_.IsEarly(first + row);
    const auto angles = Base::LoadAngles();
    const bool queries_early = p_.q_is_early;
    uint4 q[Base::kTiles][2];
#pragma unroll 1  // instructions that run once are slow
    for (int after = 0; after < 2; ++after) {
      if (after == 1) {
        WaitForPredecessor();
        AllowSuccessor();
      }
      const bool prepare = (after == 0) == queries_early;
      if (prepare) Base::LoadHead(q);
      if (early == (after == 0)) {
        locate(0);
        fetch(0);
        key.Place(Base::tile(), row, lane);
      }
      if (after == 1) locate(1);
      if (prepare) Base::PrepareHead(q, angles);
    }
    for (int i = 0; i < num_tiles; ++i) {
      if (i > 0) {
        __syncthreads();  // all are done with the tile before
        key.Place(Base::tile(), row, lane);
      }
      if (i + 1 < num_tiles) {  // on its way while this tile is added up
        fetch(i + 1);
        locate(i + 2);
      }
      __syncthreads();
      Base::Score();
      __syncthreads();
      const int count = end - first - i * kKeyTile;
      Base::MakeProbabilities(count);
      __syncthreads();
      Base::AddValues(count);
    }
    __syncthreads();
    KeepPart();
  }

  // This block's part, where another kernel adds the parts up.
  __device__ void WritePart(const AttentionParts& parts, int split) const {
    __syncthreads();
    const auto* from = reinterpret_cast<const float*>(s_.keys);
    for (int i = threadIdx.x; i < kHeads * kHeadDim / 4; i += kDecodeThreads) {
      const int h = i / (kHeadDim / 4), column = i % (kHeadDim / 4) * 4;
      if (first_head_ + h >= p_.num_heads) break;
      const int64_t head = int64_t{token_} * p_.num_heads + first_head_ + h;
      const int64_t part = head * parts.max_splits + split;
      *reinterpret_cast<float4*>(parts.sums + part * kHeadDim + column) =
          *reinterpret_cast<const float4*>(from + PartOffset(h, column));
      if (column == 0) parts.scales[part] = s_.part[h];
    }
  }

 private:
  __device__ static int PartOffset(int head, int column) { return head * (kHeadDim + 4) + column; }

  // Over the keys, which are no longer needed.
  __device__ void KeepPart() {
    auto* sums = reinterpret_cast<float*>(s_.keys);
#pragma unroll
    for (int t = 0; t < Base::kTiles; ++t) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int head = 8 * t + lane_ % 4 * 2 + e % 2;
          sums[PartOffset(head, warp_ * 64 + m * 16 + lane_ / 4 + e / 2 * 8)] = o_[t][m][e];
        }
      }
    }
    if (lane_ % Base::kHeadLanes == 0) s_.part[Base::scored_head()] = {max_, sum_};
  }

  PartShared<kHeads>& s_;
  const TokenKeys& keys_;
};

// Registers: up to 16 heads start beside a block of the query products. kPaired: of 16 heads two
// blocks share a multiprocessor, which leaves each fewer than it needs (a step of one token at 128K
// on ranks took 1.5% longer so).
template <int kHeads, bool kPaired>
__global__ void __maxnreg__(kHeads == 8 || kPaired ? 128
                            : kHeads == 16         ? 144
                                                   : 255)
    DecodeAttentionKernel(const __grid_constant__ CudaSparseAttentionParams p,
                          AttentionParts parts) {
  if (p.allows_early) AllowSuccessor();
  extern __shared__ uint8_t dynamic[];
  auto& shared = AlignedShared<PartShared<kHeads>>(dynamic);
  const int split = blockIdx.x, token = blockIdx.z;
  const TokenKeys keys(p, token);
  if (keys.is_padding()) {
    WaitForPredecessor();
    AllowSuccessor();
    return;
  }
  keys.PrefetchTable();
  if constexpr (kPaired) {
    keys.PrefetchEntries((blockIdx.y * gridDim.x + split) * blockDim.x + threadIdx.x,
                         gridDim.y * gridDim.x * blockDim.x);
  }
  const int each = KeysOfSplit(keys.size(), gridDim.x, parts.least_keys);
  const int first = min(split * each, keys.size()), end = min(first + each, keys.size());
  if (first == end) return;  // the launch ends with others, which wait
  DecodeAttention<kHeads> attention(p, shared, keys, token, static_cast<int>(blockIdx.y) * kHeads);
  attention.Run(first, end);
  attention.WritePart(parts, split);
}

}  // namespace fathom::kernels
