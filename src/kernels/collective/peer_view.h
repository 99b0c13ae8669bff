// PeerView: what a kernel of one rank needs to write to the other ranks of its group, GPUs of one
// process that reach each other's memory. Each rank has one range of memory of the same layout, at
// whose places the others write. Values; made by comm/cuda_peers.
//
// Exchanges are numbered: all ranks run the same ones in the same order, each is one number, and
// whatever is written carries it, so that nothing is ever cleared. The number is a counter in each
// rank's own memory, which a kernel advances at the end of a step (all_reduce_cuda.h), plus the
// exchange's place in the step: a captured graph can be replayed.
//
// Why no rank writes where another one still reads. Let a kernel of rank A take part in exchange e.
// It ends only when A has what every other rank B wrote for e. B writes for e only after its wait
// for all of its earlier kernels, so those of exchange e - 1 have ended, and with them all that B
// reads for e - 1. So when A has ended e, nobody reads what was written for e - 1. A's kernels of
// e + 1 write after A has ended e. Hence two places that take turns (the packets') are never
// written, for e + 1, while they are read, for e - 1. Of the others there is one:
//   - scatter, e + 1: A writes B's after A has ended e, for which it had to receive the part that B
//     summed, chunk by chunk: B wrote a chunk after it had read the scatter for it.
//   - sums, e + 1: A writes a chunk to B after it has received B's values of it for e + 1, which B
//     writes after its wait for all kernels before, those that read the sums of e among them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fathom::kernels {

inline constexpr int kMaxPeers = 8;

// A packet is 16 bytes, written at once: two words of values, each beside what names the
// exchange, so that whoever reads a pair of them knows that it has arrived.
inline constexpr int64_t kPacketBytes = 16;
inline constexpr int64_t kPacketValues = 4;  // BF16
// Up to so many tokens a sum can go as packets: where the boundary for many tokens begins.
inline constexpr int64_t kMaxPacketTokens = 255;
// Packets are twice their values, to each of the others, in one phase. From so many bytes sent on,
// two phases of plain values are faster, though their flags cost some microseconds more.
inline constexpr int64_t kMaxPacketBytesSent = int64_t{6} << 20;
constexpr bool GoesAsPackets(int64_t num_tokens, int64_t hidden, int size) {
  return num_tokens <= kMaxPacketTokens &&
         num_tokens * hidden / kPacketValues * kPacketBytes * (size - 1) <= kMaxPacketBytesSent;
}

// How `count` values are summed in two phases: rank r sums the values [r * slice, (r + 1) * slice)
// and sends the sums to all. A chunk is one block's work and has a flag. The last ranks' slices may
// end early or be empty.
inline constexpr int kMaxChunks = 132;
inline constexpr int64_t kChunkUnit = 4096;
struct TwoPhaseSplit {
  int64_t chunk = 0;
  int num_chunks = 0;  // of a slice
  int64_t slice = 0;
};
constexpr TwoPhaseSplit SplitTwoPhase(int64_t count, int size) {
  const int64_t share = (count + size - 1) / size;
  const int64_t least = (share + kMaxChunks - 1) / kMaxChunks;
  const int64_t chunk = (least + kChunkUnit - 1) / kChunkUnit * kChunkUnit;
  const int64_t num_chunks = (share + chunk - 1) / chunk;
  return {chunk, static_cast<int>(num_chunks), num_chunks * chunk};
}

// Where everything is in a rank's memory, in bytes.
struct PeerLayout {
  int64_t num_packets = 0;  // of one rank in one of the two places
  int64_t max_values = 0;   // of a sum in two phases
  int64_t max_slice = 0;
  int64_t scatter_offset = 0;  // BF16 [size, max_slice]: what each rank has of this rank's slice
  int64_t sums_offset = 0;     // BF16 [max_values]
  int64_t flags_offset = 0;    // uint64 [2, size, kMaxChunks]: scatter's, sums'
  int64_t bytes = 0;
};
// For sums of up to max_tokens tokens of `hidden` values, a multiple of 128.
constexpr PeerLayout MakePeerLayout(int size, int64_t hidden, int64_t max_tokens) {
  constexpr int64_t kAlignment = 1024;
  const auto align = [](int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  PeerLayout l;
  l.num_packets = kMaxPacketTokens * hidden / kPacketValues;
  l.max_values = max_tokens * hidden;
  const int64_t share = (l.max_values + size - 1) / size;
  l.max_slice = (share + share / kMaxChunks) / kChunkUnit * kChunkUnit + 3 * kChunkUnit;
  l.scatter_offset = align(2 * size * l.num_packets * kPacketBytes);
  l.sums_offset = l.scatter_offset + align(size * l.max_slice * 2);
  l.flags_offset = l.sums_offset + align(l.max_values * 2);
  l.bytes = l.flags_offset + align(int64_t{2} * size * kMaxChunks * 8);
  return l;
}

struct PeerView {
  int rank = 0;
  int size = 1;
  std::byte* memory[kMaxPeers] = {};  // of each rank, this one's among them
  PeerLayout layout;
  // Of this rank's device.
  uint64_t* exchanges = nullptr;  // 1 + how many there were before this step
  uint32_t* failed = nullptr;     // not 0: nobody waits any more
  // Pinned host memory: 1 + the rank that was waited for in vain; 0: none.
  volatile uint32_t* timed_out = nullptr;
  uint64_t timeout_ns = 0;
};

// One exchange: the `index`-th of a step. size 1: none.
struct PeerExchange {
  PeerView peers;
  uint32_t index = 0;
};

}  // namespace fathom::kernels
