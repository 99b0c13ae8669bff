// One token's index queries, each head made once: by a warp that tells all blocks its codes and its
// weight, as packets that carry the launch's number (numbered_words.cuh). Device code only.
#pragma once

#include "kernels/indexer/decode_scores.cuh"
#include "kernels/indexer/index_query.cuh"
#include "kernels/numbered_words.cuh"

namespace fathom::kernels {

// A head's packets: its codes in the order of shared memory, three words each, then its weight.
inline constexpr int kHeadWords = kIndexDim / 4;
static_assert(kHeadPackets == (kHeadWords + 1) / 3 && (kHeadWords + 1) % 3 == 0);

// By a warp, whose lanes' codes and whose weight they are. to: of all heads.
__device__ inline void TellQuery(const IndexQueryRow<32>& query, int head, uint4* to,
                                 uint32_t number) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  uint32_t words[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int word = 3 * lane + i, chunk = word / 4 ^ head % 8;
    words[i] = __shfl_sync(0xffffffffu, query.codes[0], chunk + word % 4 * 8);
  }
  if (lane >= kHeadPackets) return;
  if (lane == kHeadPackets - 1) words[2] = __float_as_uint(0.5f * query.weight);
  StoreNumberedPacket(to + head * kHeadPackets + lane, {words[0], words[1], words[2]}, number);
}

// By kThreads threads of a block, of which this is the thread-th. A __syncthreads has to follow.
template <int kThreads>
__device__ inline void AwaitQueries(int thread, const uint4* from, uint32_t number,
                                    DecodeQueries& queries) {
  constexpr int kPackets = kDecodeHeads * kHeadPackets, kEach = (kPackets - 1) / kThreads + 1;
  uint4 packets[kEach];
  bool there;
  do {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = thread + e * kThreads;
      if (i < kPackets) packets[e] = LoadNumberedPacket(from + i);
    }
    there = true;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (thread + e * kThreads < kPackets) there = there && packets[e].w == number;
    }
  } while (!__all_sync(0xffffffffu, there));
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int i = thread + e * kThreads, head = i / kHeadPackets, packet = i % kHeadPackets;
    if (i >= kPackets) continue;
    auto* const codes = reinterpret_cast<uint32_t*>(queries.codes) + head * kHeadWords + 3 * packet;
    codes[0] = packets[e].x, codes[1] = packets[e].y;
    if (packet == kHeadPackets - 1) {
      queries.weights[head] = __uint_as_float(packets[e].z);
    } else {
      codes[2] = packets[e].z;
    }
  }
  FenceSharedForWgmma();
}

// By a warp that needs none of them: until one of them is there.
__device__ inline void AwaitTold(const uint4* from, uint32_t number) {
  const uint4* const own = from + (threadIdx.x / 32 * 4 + 1) * kHeadPackets - 1;
  while (!__all_sync(0xffffffffu, LoadNumberedPacket(own).w == number)) {
  }
}

}  // namespace fathom::kernels
