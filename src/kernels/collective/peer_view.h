// PeerView: what a kernel of one rank needs to write to the other ranks of its group, GPUs of one
// host that reach each other's memory. Each rank has one range of memory of the same layout, at
// whose places the others write. Values; made by comm/cuda_peers.
//
// Exchanges are numbered: all ranks run the same ones in the same order, each is one number, and
// whatever is written carries it, so that nothing is ever cleared. The number is a counter in each
// rank's own memory, which a kernel advances at the end of a step (gather_cuda.h), plus the
// exchange's place in the step: a captured graph can be replayed.
//
// Why no rank writes where another one still reads. In every exchange e every rank A waits for
// something of every other rank B, who sends even if it has no values. B sends for e only after its
// wait for all of its earlier kernels. So when A has ended e, nobody reads any more what was
// written for e - 1, and A's kernels of e + 1 write after that. Hence two places that take turns
// (the packets') are never written, for e + 1, while they are read, for e - 1; and so is shared
// memory, if no part of it is written in two exchanges in a row. Copies of an exchange that begin
// before its kernel do so behind the end of the one before, and end before that kernel. A flag only
// grows. One token's experts send for two exchanges in one launch, for the second one only what is
// made of what every rank sent for the first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fathom::kernels {

inline constexpr int kMaxPeers = 8;

// A packet is 16 bytes, written at once: two words of values, each beside what names the
// exchange, so that whoever reads a pair of them knows that it has arrived.
inline constexpr int64_t kPacketBytes = 16;
// Packets are twice their values, and each is stored for every other rank. Plain values are faster
// among more than two ranks, and from so many bytes on between two.
inline constexpr int64_t kMaxPacketBytesSent = int64_t{192} << 10;
constexpr bool GoesAsPackets(int64_t num_packets, int size) {
  return size == 2 && num_packets * kPacketBytes <= kMaxPacketBytesSent;
}
// Room for one rank's in one exchange: a row of 129,280 logits, or 16 tokens of 7,168 values, on
// two.
inline constexpr int64_t kMaxPackets = int64_t{1} << 16;

// Plain values on their way to memory that is not shared, of one exchange and all ranks together.
inline constexpr int64_t kLandingBytes = int64_t{16} << 20;

// What each rank has of something: rank r the range [begin[r], begin[r + 1]).
struct RankParts {
  int64_t begin[kMaxPeers + 1] = {};  // ascending

  constexpr int64_t count(int rank) const { return begin[rank + 1] - begin[rank]; }
  // The rank that has `i`, which is below all ranks' end.
  constexpr int OwnerOf(int64_t i) const {
    int owner = 0;
    while (i >= begin[owner + 1]) ++owner;
    return owner;
  }
  constexpr int64_t most(int size) const {
    int64_t most = 0;
    for (int r = 0; r < size; ++r) most = count(r) > most ? count(r) : most;
    return most;
  }
  constexpr int64_t least(int size) const {
    int64_t least = count(0);
    for (int r = 1; r < size; ++r) least = count(r) < least ? count(r) : least;
    return least;
  }
};

// Blocks of a kernel that writes plain values: each has a flag.
inline constexpr int kMaxGatherBlocks = 264;

// Where everything is in a rank's memory, in bytes. In front are the packets, then the landings:
// two places of each that take turns, in each a part for every rank.
struct PeerLayout {
  int64_t landing_offset = 0;
  int64_t shared_offset = 0;  // what the model keeps there
  int64_t flags_offset = 0;   // uint64 [size, kMaxGatherBlocks]
  int64_t bytes = 0;
};
constexpr PeerLayout MakePeerLayout(int size, int64_t shared_bytes) {
  constexpr int64_t kAlignment = 1024;
  const auto align = [](int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  PeerLayout l;
  l.landing_offset = align(2 * size * kMaxPackets * kPacketBytes);
  l.shared_offset = l.landing_offset + align(2 * kLandingBytes);
  l.flags_offset = l.shared_offset + align(shared_bytes);
  l.bytes = l.flags_offset + align(int64_t{size} * kMaxGatherBlocks * 8);
  return l;
}

struct PeerView {
  int rank = 0;
  int size = 1;
  std::byte* memory[kMaxPeers] = {};  // of each rank, this one's among them
  PeerLayout layout;
  int num_multiprocessors = 0;  // of each rank's GPU; 0: they differ
  // Of this rank's device.
  uint64_t* exchanges = nullptr;  // 1 + how many there were before this step
  uint32_t* failed = nullptr;     // not 0: nobody waits any more
  // Pinned host memory: 1 + the rank that was waited for in vain; 0: none.
  volatile uint32_t* timed_out = nullptr;
  uint64_t timeout_ns = 0;
};

// Whether these bytes of the rank are in its shared memory, at a multiple of 16.
inline bool IsShared(const PeerView& peers, const void* data, int64_t bytes) {
  const int64_t place = static_cast<const std::byte*>(data) - peers.memory[peers.rank];
  return place % 16 == 0 && place >= peers.layout.shared_offset &&
         place + bytes <= peers.layout.flags_offset;
}

// Where else a value goes that one rank computes and all read: to the same place of the others'
// shared memory, so many bytes from this rank's.
struct Mirrors {
  int count = 0;
  int64_t offsets[kMaxPeers - 1] = {};
};

// One exchange: the `index`-th of a step. size 1: none.
struct PeerExchange {
  PeerView peers;
  uint32_t index = 0;
};

}  // namespace fathom::kernels
