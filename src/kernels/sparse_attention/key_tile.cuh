// How tiles of 64 keys come into shared memory for attention_sm90.cuh: a warpgroup deals out the
// block's items, looks up where their keys lie two tiles ahead, and fetches and widens them
// (key_rows.cuh), 32 rows while the next ones are on their way into the same registers. Device code
// only.
#pragma once

#include "kernels/gemm/ring_place.cuh"
#include "kernels/sparse_attention/key_rows.cuh"

namespace fathom::kernels {

inline constexpr int kProducerThreads = 128;
inline constexpr int kKeyTiles = 2;      // in shared memory
inline constexpr int kTilesLocated = 4;  // more than the one at hand and the two behind it

// Up to 64 heads of a token over some tiles of its keys. Uniform over the block.
struct AttentionItem {
  int token = 0, first_head = 0, split = 0;
  int num_tiles = 0;            // 0: there are no more items
  int num_keys = 0;             // from its first tile on
  float2 angles[kRopeDim / 2];  // of the token
};

// A block's items in turn: more than there are tiles from the one whose output is written to the
// one whose keys are looked up.
struct AttentionItems {
  static constexpr int kCount = 8;
  using Place = RingPlace<kCount>;

  AttentionItem items[kCount];
  uint64_t full[kCount];

  __device__ void Init() {
    for (uint64_t& barrier : full) BarrierInit(&barrier, kWarpArrivals);
  }
  __device__ const AttentionItem& Await(Place& place) {
    BarrierWait(&full[place.index], place.parity);
    const AttentionItem& item = items[place.index];
    place.Next();
    return item;
  }
};

// Where the keys of tiles lie; past the last tile keys without data.
struct LocatedKeys {
  KeyBytes keys[kTilesLocated][kKeyTile];
  uint64_t full[kTilesLocated];

  __device__ void Init() {
    for (uint64_t& barrier : full) BarrierInit(&barrier, kKeyTile / 32 * kWarpArrivals);
  }
};

// A warpgroup's. Of each tile a thread has a quarter of two keys, one after the other, and half of
// the threads look up a key each of the tile after the next.
class KeyProducer {
 public:
  // A step's items: every token has `head_tiles` times `max_splits`. `tiles`: the shared address of
  // kKeyTiles tiles.
  __device__ KeyProducer(const CudaSparseAttentionParams& p, int head_tiles, int max_splits,
                         uint32_t tiles, LocatedKeys& located, AttentionItems& items,
                         uint64_t* full, uint64_t* empty)
      : p_(p),
        head_tiles_(head_tiles),
        max_splits_(max_splits),
        tiles_(tiles),
        located_(located),
        items_(items),
        full_(full),
        empty_(empty),
        keys_(p, 0) {}

  __device__ void Run() {
    const uint32_t row = thread() / 4, lane = thread() % 4;
    TakeItem();
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
  __device__ static uint32_t thread() { return threadIdx.x % kProducerThreads; }

  // The next item that there is, every gridDim.x-th of all; behind the last, once, that it was.
  __device__ void TakeItem() {
    const int rows = p_.batch.num_tokens * head_tiles_;
    for (; next_ < rows * max_splits_; next_ += static_cast<int>(gridDim.x)) {
      const int split = next_ / rows, row = next_ % rows, token = row / head_tiles_;
      keys_.MoveTo(token);
      if (keys_.is_padding()) continue;
      const KeySplits splits(keys_.size(), max_splits_);
      if (split >= splits.num_splits) continue;
      tile_ = split * splits.tiles_per_split;
      end_ = min(tile_ + splits.tiles_per_split, splits.num_tiles);
      Deal(token, row % head_tiles_ * kHeadTile, split);
      next_ += static_cast<int>(gridDim.x);
      return;
    }
    if (is_over_) return;
    is_over_ = true;
    Deal(0, 0, 0);
  }
  __device__ void Deal(int token, int first_head, int split) {
    const int place = num_dealt_++ % AttentionItems::kCount;
    if (thread() < 32) {
      AttentionItem& item = items_.items[place];
      if (thread() == 0) {
        const int heads = is_over_ ? 0 : min(kHeadTile, p_.num_heads - first_head);
        PrefetchBulk(p_.q + (int64_t{token} * p_.num_heads + first_head) * kHeadDim,
                     static_cast<uint32_t>(heads * kHeadDim) * 2);
        item.token = token, item.first_head = first_head, item.split = split;
        item.num_tiles = is_over_ ? 0 : end_ - tile_;
        item.num_keys = keys_.size() - tile_ * kKeyTile;
      }
      item.angles[thread()] =
          reinterpret_cast<const float2*>(p_.angles + int64_t{token} * kRopeDim)[thread()];
      WarpArrive(&items_.full[place]);
    }
  }

  // The key that the thread looks up of tile i, -1 where it has none. Past the token's last key
  // that takes the place: its scores are left out.
  __device__ int Key(int i) const {
    if (static_cast<int>(thread() / kKeyTile) != i % 2 || is_over_) return -1;
    return min(tile_ * kKeyTile + static_cast<int>(thread() % kKeyTile), keys_.size() - 1);
  }
  __device__ int Entry(int i) const { return Key(i) < 0 ? 0 : keys_.Entry(Key(i)); }
  __device__ int Page(int i, int entry) const { return Key(i) < 0 ? 0 : keys_.Page(Key(i), entry); }
  __device__ const KeyBytes* Located(int i) const {
    BarrierWait(&located_.full[i % kTilesLocated], i / kTilesLocated % 2);
    return located_.keys[i % kTilesLocated];
  }
  // Tells where tile i's keys are, and goes on to the next one.
  __device__ void Put(int i, int entry, int page) {
    const int key = Key(i);
    if (static_cast<int>(thread() / kKeyTile) == i % 2) {
      located_.keys[i % kTilesLocated][thread() % kKeyTile] =
          key < 0 ? KeyBytes{} : keys_.Bytes(key, entry, page);
      WarpArrive(&located_.full[i % kTilesLocated]);
    }
    if (++tile_ >= end_) TakeItem();
  }

  const CudaSparseAttentionParams& p_;
  const int head_tiles_, max_splits_;
  const uint32_t tiles_;
  LocatedKeys& located_;
  AttentionItems& items_;
  uint64_t* const full_;
  uint64_t* const empty_;
  // What it looks up next: a tile of a token, the item's end, and items from next_ on.
  TokenKeys keys_;
  int next_ = static_cast<int>(blockIdx.x);
  int tile_ = 0, end_ = 0;
  bool is_over_ = false;
  int num_dealt_ = 0;
};

}  // namespace fathom::kernels
