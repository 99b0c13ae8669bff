// The producer warpgroup of attention: fetches tiles of 64 keys, two rows a thread, and puts them
// into shared memory (key_rows.cuh). Device code only.
#pragma once

#include "kernels/sparse_attention/key_rows.cuh"

namespace fathom::kernels {

inline constexpr int kProducerThreads = 128;
inline constexpr int kProducerBarrier = 3;  // named

class KeyProducer {
 public:
  struct Shared {
    KeyBytes keys[2][kKeyTile];
  };

  // Tiles [first, end) of the token; `tiles` is the shared address of two tiles; thread < 128.
  __device__ KeyProducer(const TokenKeys& keys, int first, int end, uint32_t tiles, Shared& shared,
                         uint64_t* full, uint64_t* empty, uint32_t thread)
      : keys_(keys),
        first_(first),
        num_tiles_(end - first),
        tiles_(tiles),
        shared_(shared),
        full_(full),
        empty_(empty),
        thread_(thread) {}

  // A row of the next tile is on its way while the other one is widened; none while the fence waits
  // for what the thread has begun.
  __device__ void Run() {
    const uint32_t row = thread_ / 4, lane = thread_ % 4;
    const int first = Entry(0), second = Entry(1);
    int next_entry = Entry(2), entry_after = Entry(3);
    const int first_page = Page(0, first), second_page = Page(1, second);
    Locate(0, first, first_page);
    Locate(1, second, second_page);
    NamedBarrier(kProducerBarrier, kProducerThreads);
    rows_[0].Fetch(shared_.keys[0][row], lane);
    rows_[1].Fetch(shared_.keys[0][row + 32], lane);
    int next_page = Page(2, next_entry);
    for (int i = 0; i < num_tiles_; ++i) {
      NamedBarrier(kProducerBarrier, kProducerThreads);  // all have read where this tile's keys are
      const KeyBytes* next = shared_.keys[(i + 1) % 2] + row;
      Locate(i + 2, next_entry, next_page);
      next_entry = entry_after;
      next_page = Page(i + 3, next_entry);
      entry_after = Entry(i + 4);
      if (i >= 2) BarrierWait(empty_ + i % 2, (i / 2 - 1) % 2);
      const uint32_t tile = tiles_ + i % 2 * kKeyTileBytes;
      rows_[0].Place(tile, row, lane);
      rows_[0].Fetch(next[0], lane);
      rows_[1].Place(tile, row + 32, lane);
      FenceSharedForWgmma();
      BarrierArrive(full_ + i % 2);
      rows_[1].Fetch(next[32], lane);
    }
  }

 private:
  // Of 64 threads a key each.
  __device__ int Key(int tile) const { return (first_ + tile) * kKeyTile + thread_; }
  __device__ bool HasKey(int tile) const { return thread_ < kKeyTile && tile < num_tiles_; }
  __device__ int Entry(int tile) const { return HasKey(tile) ? keys_.Entry(Key(tile)) : 0; }
  __device__ int Page(int tile, int entry) const {
    return HasKey(tile) ? keys_.Page(Key(tile), entry) : 0;
  }
  __device__ void Locate(int tile, int entry, int page) const {
    if (thread_ >= kKeyTile) return;
    shared_.keys[tile % 2][thread_] =
        HasKey(tile) ? keys_.Bytes(Key(tile), entry, page) : KeyBytes{};
  }

  const TokenKeys& keys_;
  int first_;
  int num_tiles_;
  uint32_t tiles_;
  Shared& shared_;
  uint64_t* full_;
  uint64_t* empty_;
  uint32_t thread_;
  KeyRow rows_[2];
};

}  // namespace fathom::kernels
