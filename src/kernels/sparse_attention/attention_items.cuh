// What the blocks of attention_sm90.cuh have to do, one item after another, and who deals it out.
// Device code only.
#pragma once

#include "kernels/gemm/ring_place.cuh"
#include "kernels/sm90.cuh"
#include "kernels/sparse_attention/token_keys.cuh"

namespace fathom::kernels {

inline constexpr int kProducerThreads = 128;

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

// Deals a block's items out and goes from tile to tile of them: by each warp of a warpgroup, of
// which the first one tells the others in the block.
class ItemDealer {
 public:
  // A step's items: every token has `head_tiles` times `max_splits`.
  __device__ ItemDealer(const CudaSparseAttentionParams& p, int head_tiles, int max_splits,
                        AttentionItems& items)
      : p_(p), head_tiles_(head_tiles), max_splits_(max_splits), items_(items), keys_(p, 0) {}

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
      is_first_ = true;
      token_ = token, first_head_ = row % head_tiles_ * kHeadTile;
      Deal(token, first_head_, split);
      next_ += static_cast<int>(gridDim.x);
      return;
    }
    if (is_over_) return;
    is_over_ = true;
    Deal(0, 0, 0);
  }
  __device__ void NextTile() {
    is_first_ = false;
    if (++tile_ >= end_) TakeItem();
  }

  __device__ bool is_over() const { return is_over_; }
  // Of the item of the tile at hand.
  __device__ bool is_first_tile() const { return is_first_; }
  __device__ int token() const { return token_; }
  __device__ int first_head() const { return first_head_; }
  __device__ const TokenKeys& keys() const { return keys_; }
  // Of the tile at hand. Past the token's last key that takes the place: its scores are left out.
  __device__ int Key(uint32_t row) const {
    return min(tile_ * kKeyTile + static_cast<int>(row), keys_.size() - 1);
  }

 private:
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

  const CudaSparseAttentionParams& p_;
  const int head_tiles_, max_splits_;
  AttentionItems& items_;
  // What is at hand: a tile of a token, the item's end, and items from next_ on.
  TokenKeys keys_;
  int next_ = static_cast<int>(blockIdx.x);
  int tile_ = 0, end_ = 0;
  bool is_over_ = false, is_first_ = false;
  int token_ = 0, first_head_ = 0;
  int num_dealt_ = 0;
};

}  // namespace fathom::kernels
