// Reading and writing other ranks' memory (peer_view.h): packets that carry their exchange's number
// beside each word, and flags behind plain data. A wait that finds nothing for the view's timeout
// says so to the host and is the last: from then on no kernel of this rank waits, and what it
// computes means nothing. Device code only.
#pragma once

#include <cstdint>

#include "kernels/collective/peer_view.h"
#include "kernels/sm90.cuh"

namespace fathom::kernels {

// May be read before a kernel's wait: the counter's last change was visible before its successor
// could start (CudaEndExchangesParams).
__device__ __forceinline__ uint64_t ExchangeNumber(const PeerExchange& exchange) {
  return *static_cast<volatile const uint64_t*>(exchange.peers.exchanges) + exchange.index;
}

__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Bounds a wait. Looks at the clock once in a while only.
class Patience {
 public:
  __device__ Patience(const PeerView& peers, int from) : peers_(peers), from_(from) {}

  // Whether to look again, at what `from` sends.
  __device__ bool Wait(int from) {
    from_ = from;
    return Wait();
  }
  // Whether to look again.
  __device__ bool Wait() {
    if (++looks_ % 64 != 0) return true;
    if (*static_cast<volatile const uint32_t*>(peers_.failed) != 0) return false;
    const uint64_t now = Nanoseconds();
    if (begin_ == 0) begin_ = now;
    if (now - begin_ < peers_.timeout_ns) return true;
    *static_cast<volatile uint32_t*>(peers_.failed) = 1;
    *peers_.timed_out = static_cast<uint32_t>(from_) + 1;
    __threadfence_system();
    return false;
  }

 private:
  const PeerView& peers_;
  int from_;
  uint32_t looks_ = 0;
  uint64_t begin_ = 0;
};

// Packet `i` of rank `from` in the memory of rank `to`.
__device__ __forceinline__ uint4* PacketAt(const PeerView& peers, int to, int from, uint64_t number,
                                           int64_t i) {
  const int64_t place = static_cast<int64_t>(number & 1) * peers.size + from;
  return reinterpret_cast<uint4*>(peers.memory[to]) + place * kMaxPackets + i;
}

// What stands beside the words of a packet. Each changes with every exchange, both together never
// repeat, and neither is what memory holds that was never written.
__device__ __forceinline__ uint2 Tags(uint64_t number) {
  const auto low = static_cast<uint32_t>(number), high = static_cast<uint32_t>(number >> 32);
  return {low + high, ~low + 2 * high};
}

__device__ __forceinline__ void StorePacket(uint4* packet, uint2 words, uint2 tags) {
  StoreTogether(packet, uint4{words.x, tags.x, words.y, tags.y});
}
__device__ __forceinline__ void SendPacket(const PeerView& peers, uint64_t number, int64_t i,
                                           uint2 words) {
  for (int to = 0; to < peers.size; ++to) {
    if (to == peers.rank) continue;
    StorePacket(PacketAt(peers, to, peers.rank, number, i), words, Tags(number));
  }
}

// To this rank's own memory, too: who reads all ranks' packets alike need not wait for this kernel.
__device__ __forceinline__ void SendPacketToAll(const PeerView& peers, uint64_t number, int64_t i,
                                                uint2 words) {
  for (int to = 0; to < peers.size; ++to) {
    StorePacket(PacketAt(peers, to, peers.rank, number, i), words, Tags(number));
  }
}

__device__ __forceinline__ bool HasTags(uint4 packet, uint2 tags) {
  return packet.y == tags.x && packet.w == tags.y;
}

__device__ __forceinline__ uint2 ReceivePacket(const PeerView& peers, uint64_t number, int64_t i,
                                               int from) {
  const uint4* const packet = PacketAt(peers, peers.rank, from, number, i);
  const uint2 tags = Tags(number);
  Patience patience(peers, from);
  uint4 p = LoadTogether(packet);
  while (!HasTags(p, tags) && patience.Wait()) p = LoadTogether(packet);
  return {p.x, p.z};
}

// The packet of a row's FP32 sums in `column` and the next one. Of 32 quads of columns the packets
// of the first halves are side by side, then those of the others.
__device__ __forceinline__ int64_t SumPacket(int64_t row, int64_t width, int64_t column) {
  return (row * width + column / 128 * 128) / 2 + column / 2 % 2 * 32 + column % 128 / 4;
}

// Four columns of the experts' row for one token: of group 0 the shared expert's, of the others
// what the plan's groups are (expert_plan.h).
__host__ __device__ __forceinline__ int64_t RowPacket(int64_t group, int64_t width,
                                                      int64_t column) {
  return (group * width + column) / 4;
}

// The flag of a block of rank `from` in the memory of rank `to`.
__device__ __forceinline__ uint64_t* FlagAt(const PeerView& peers, int to, int from, int block) {
  auto* const flags = reinterpret_cast<uint64_t*>(peers.memory[to] + peers.layout.flags_offset);
  return flags + from * kMaxGatherBlocks + block;
}

// By one thread, behind a barrier after the block's writes.
__device__ __forceinline__ void RaiseFlag(uint64_t* flag, uint64_t number) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(number) : "memory");
}

// What was written before the flag was raised is there for the kernels after this one. The other
// rank may be one exchange ahead.
__device__ __forceinline__ void AwaitFlag(const PeerView& peers, const uint64_t* flag,
                                          uint64_t number, int from) {
  Patience patience(peers, from);
  uint64_t seen;
  do {
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
  } while (seen < number && patience.Wait());
}

}  // namespace fathom::kernels
