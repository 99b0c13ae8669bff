// What the blocks of a cluster tell each other: a value each, combined in rank order, so that every
// block has the same result. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/sm90.cuh"

namespace fathom::kernels {

inline constexpr int kRowBlocks = 8;  // of a row: one cluster
inline constexpr int kRowThreads = 512;
inline constexpr int kRowWarps = kRowThreads / 32;

template <typename T>
__device__ __forceinline__ T LoadOf(const T& shared, int rank) {
  return *static_cast<const T*>(
      __cluster_map_shared_rank(const_cast<T*>(&shared), static_cast<unsigned>(rank)));
}

// Over a warp; every lane has the result. `combine` is associative and commutative.
template <typename T, typename Combine>
__device__ T OverWarp(T value, const Combine& combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine(value, T::FromLane(value, static_cast<int>(threadIdx.x % 32) ^ offset));
  }
  return value;
}

// Values that pass between blocks, of up to 32 bytes. Two places in turn: a block writes one while
// another may still read the other.
struct Exchange {
  struct alignas(16) Place {
    unsigned char bytes[32];
  };
  Place of_warp[kRowWarps];
  Place of_block[2];
};

class ClusterValues {
 public:
  __device__ explicit ClusterValues(Exchange& exchange) : exchange_(exchange) {}

  // Over all threads of the block.
  template <typename T, typename Combine>
  __device__ T OverBlock(T value, const Combine& combine) {
    static_assert(sizeof(T) <= sizeof(Exchange::Place));
    value = OverWarp(value, combine);
    if (threadIdx.x % 32 == 0) At<T>(exchange_.of_warp[threadIdx.x / 32]) = value;
    __syncthreads();
    value = At<T>(exchange_.of_warp[0]);
    for (int w = 1; w < kRowWarps; ++w) value = combine(value, At<T>(exchange_.of_warp[w]));
    __syncthreads();
    return value;
  }

  // Shows `value`, the same in all threads of a block, to the other blocks; then Of(rank) reads.
  template <typename T>
  __device__ void Show(const T& value) {
    turn_ ^= 1;
    if (threadIdx.x == 0) At<T>(exchange_.of_block[turn_]) = value;
    ClusterSync();
  }
  template <typename T>
  __device__ T Of(int rank) const {
    return LoadOf(At<T>(exchange_.of_block[turn_]), rank);
  }

  // Over all threads of the cluster.
  template <typename T, typename Combine>
  __device__ T OverCluster(T value, const Combine& combine) {
    Show(OverBlock(value, combine));
    value = Of<T>(0);
    for (int r = 1; r < kRowBlocks; ++r) value = combine(value, Of<T>(r));
    return value;
  }

 private:
  template <typename T>
  __device__ static T& At(Exchange::Place& place) {
    return *reinterpret_cast<T*>(&place);
  }
  template <typename T>
  __device__ static const T& At(const Exchange::Place& place) {
    return *reinterpret_cast<const T*>(&place);
  }
  Exchange& exchange_;
  int turn_ = 0;
};

// The best logit and the lowest id that has it, and what else a scan over a row tells.
struct Best {
  float logit;
  int32_t token_id;  // INT32_MAX: none
  uint32_t flags;    // of the scan, united
  __device__ static Best FromLane(const Best& b, int lane) {
    return {__shfl_sync(0xffffffffu, b.logit, lane), __shfl_sync(0xffffffffu, b.token_id, lane),
            __shfl_sync(0xffffffffu, b.flags, lane)};
  }
  __device__ static Best None() { return {-INFINITY, INT32_MAX, 0}; }
};
struct Better {
  __device__ Best operator()(const Best& a, const Best& b) const {
    const bool first = a.logit > b.logit || (a.logit == b.logit && a.token_id < b.token_id);
    return {first ? a.logit : b.logit, first ? a.token_id : b.token_id, a.flags | b.flags};
  }
};

// A number of tokens and their weight.
struct Mass {
  unsigned long long weight;
  unsigned long long count;
  __device__ static Mass FromLane(const Mass& m, int lane) {
    return {__shfl_sync(0xffffffffu, m.weight, lane), __shfl_sync(0xffffffffu, m.count, lane)};
  }
};
struct Add {
  __device__ Mass operator()(const Mass& a, const Mass& b) const {
    return {a.weight + b.weight, a.count + b.count};
  }
};

// A sum of doubles, always added in the same order.
struct Sum {
  double value;
  __device__ static Sum FromLane(const Sum& s, int lane) {
    return {__shfl_sync(0xffffffffu, s.value, lane)};
  }
};
struct AddSum {
  __device__ Sum operator()(const Sum& a, const Sum& b) const { return {a.value + b.value}; }
};

}  // namespace fathom::kernels
