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

  __device__ void Run() {
    const uint32_t row = thread_ / 4, lane = thread_ % 4;
    int next_entry = Entry(0);
    Locate(0, next_entry);
    next_entry = Entry(1);
    for (int i = 0; i < num_tiles_; ++i) {
      NamedBarrier(kProducerBarrier, kProducerThreads);
      const KeyBytes* keys = shared_.keys[i % 2] + row;
      rows_[0].Fetch(keys[0], lane);
      rows_[1].Fetch(keys[32], lane);
      Locate(i + 1, next_entry);
      next_entry = Entry(i + 2);
      if (i >= 2) BarrierWait(empty_ + i % 2, (i / 2 - 1) % 2);
      const uint32_t tile = tiles_ + i % 2 * kKeyTileBytes;
      rows_[0].Place(tile, row, lane);
      rows_[1].Place(tile, row + 32, lane);
      FenceSharedForWgmma();
      BarrierArrive(full_ + i % 2);
    }
  }

 private:
  __device__ int Key(int tile) const { return (first_ + tile) * kKeyTile + thread_; }
  __device__ int Entry(int tile) const { return thread_ < kKeyTile ? keys_.Entry(Key(tile)) : 0; }
  __device__ void Locate(int tile, int entry) const {
    if (thread_ < kKeyTile) shared_.keys[tile % 2][thread_] = keys_.Bytes(Key(tile), entry);
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
