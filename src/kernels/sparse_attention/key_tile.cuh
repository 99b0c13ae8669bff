// How tiles of 64 keys come into shared memory for attention_sm90.cuh: a warpgroup deals out the
// block's items, looks up where their keys lie two tiles ahead, and fetches and widens them
// (key_rows.cuh), 32 rows while the next ones are on their way into the same registers. Device code
// only.
#pragma once

#include "kernels/sparse_attention/attention_items.cuh"
#include "kernels/sparse_attention/key_rows.cuh"

namespace fathom::kernels {

inline constexpr int kKeyTiles = 2;      // in shared memory
inline constexpr int kTilesLocated = 4;  // more than the one at hand and the two behind it

// Where the keys of tiles lie; past the last tile keys without data.
struct LocatedKeys {
  KeyBytes keys[kTilesLocated][kKeyTile];
  uint64_t full[kTilesLocated];

  __device__ void Init() {
    for (uint64_t& barrier : full) BarrierInit(&barrier, kKeyTile / 32 * kWarpArrivals);
  }
};

// Of each tile a thread has a quarter of two keys, one after the other, and half of the threads
// look up a key each of the tile after the next.
class KeyProducer {
 public:
  // `tiles`: the shared address of kKeyTiles tiles.
  __device__ KeyProducer(const ItemDealer& dealer, uint32_t tiles, LocatedKeys& located,
                         uint64_t* full, uint64_t* empty)
      : dealer_(dealer), tiles_(tiles), located_(located), full_(full), empty_(empty) {}

  __device__ void Run() {
    const uint32_t row = thread() / 4, lane = thread() % 4;
    dealer_.TakeItem();
    for (int i = 0; i < 2; ++i) {
      const int entry = Entry(i);
      Put(i, entry, Page(i, entry));
    }
    KeyRow keys;
    KeyBytes next = Located(0)[row];
    bool more = next.data != nullptr;
    keys.Fetch(next, lane);
    for (int i = 0; more; ++i) {
      const int entry = Entry(i), tile = i % kKeyTiles;
      if (i >= kKeyTiles) BarrierWait(empty_ + tile, i / kKeyTiles % 2 ^ 1);
      const uint32_t to = tiles_ + static_cast<uint32_t>(tile) * kKeyTileBytes;
      next = located_.keys[i % kTilesLocated][row + 32];
      keys.PlaceAndFetch(to, row, next, lane);
      const int page = Page(i, entry);
      const KeyBytes after = Located(i + 1)[row];
      more = after.data != nullptr;
      if (more) next = after;  // else once more the same, for nothing
      keys.PlaceAndFetch(to, row + 32, next, lane);
      // What is written are stores: who multiplies fences. A fence here would wait for the loads
      // under way, too.
      WarpArrive(full_ + tile);
      Put(i + 2, entry, page);
    }
  }

 private:
  __device__ static uint32_t thread() { return ItemDealer::thread(); }

  // The key that the thread looks up of tile i, -1 where it has none.
  __device__ int Key(int i) const {
    if (static_cast<int>(thread() / kKeyTile) != i % 2 || dealer_.is_over()) return -1;
    return dealer_.Key(thread() % kKeyTile);
  }
  __device__ int Entry(int i) const { return Key(i) < 0 ? 0 : dealer_.keys().Entry(Key(i)); }
  __device__ int Page(int i, int entry) const {
    return Key(i) < 0 ? 0 : dealer_.keys().Page(Key(i), entry);
  }
  __device__ const KeyBytes* Located(int i) const {
    BarrierWait(&located_.full[i % kTilesLocated], i / kTilesLocated % 2);
    return located_.keys[i % kTilesLocated];
  }
  // Tells where tile i's keys are, and goes on to the next one.
  __device__ void Put(int i, int entry, int page) {
    const int key = Key(i);
    if (static_cast<int>(thread() / kKeyTile) == i % 2) {
      located_.keys[i % kTilesLocated][thread() % kKeyTile] =
          key < 0 ? KeyBytes{} : dealer_.keys().Bytes(key, entry, page);
      WarpArrive(&located_.full[i % kTilesLocated]);
    }
    dealer_.NextTile();
  }

  ItemDealer dealer_;  // of the tile that is looked up next
  const uint32_t tiles_;
  LocatedKeys& located_;
  uint64_t* const full_;
  uint64_t* const empty_;
};

}  // namespace fathom::kernels
