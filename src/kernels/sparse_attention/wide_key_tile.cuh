// How keys that were widened before (wide_keys.cuh) come into shared memory for attention_sm90.cuh,
// and queries: a warpgroup deals out the block's items and copies both. Device code only.
#pragma once

#include "kernels/sparse_attention/key_tile.cuh"

namespace fathom::kernels {

// Queries of an item there; room for the next one's.
struct QueryBarriers {
  uint64_t full, empty;

  __device__ void Init() {
    BarrierInit(&full, kProducerThreads / 32 * kWarpArrivals);
    BarrierInit(&empty, 4 * kWarpArrivals);
  }
};

// Of each tile a warp copies 16 keys that were widened before, and half of its lanes have looked up
// which rows these are; of each item 16 heads' queries.
class WideKeyProducer {
 public:
  // Shared addresses: `tiles` of kKeyTiles tiles, `queries` of what is like one.
  __device__ WideKeyProducer(const CudaSparseAttentionParams& p, const ItemDealer& dealer,
                             uint32_t tiles, uint64_t* full, uint64_t* empty, uint32_t queries,
                             QueryBarriers& query_barriers)
      : p_(p),
        dealer_(dealer),
        tiles_(tiles),
        full_(full),
        empty_(empty),
        queries_(queries),
        query_barriers_(query_barriers) {}

  __device__ void Run() {
    dealer_.TakeItem();
    int row = Row();
    RingPlace<kKeyTiles> tile;
    while (!dealer_.is_over()) {
      const bool is_first = dealer_.is_first_tile();
      const int token = dealer_.token(), first_head = dealer_.first_head();
      dealer_.NextTile();
      const int next = Row();
      if (!tile.first_round) BarrierWait(empty_ + tile.index, tile.parity ^ 1);
      CopyRows(row, tiles_ + static_cast<uint32_t>(tile.index) * kKeyTileBytes);
      BarrierAwaitCopies(full_ + tile.index);
      WarpArrive(full_ + tile.index);
      if (is_first) CopyQueries(token, first_head);
      row = next;
      tile.Next();
    }
  }

 private:
  static constexpr int kRows = kKeyTile / (kProducerThreads / 32);  // of a warp

  __device__ static uint32_t warp() { return ItemDealer::thread() / 32; }
  __device__ static uint32_t lane() { return threadIdx.x % 32; }

  // Of lane l, and of lane l + 16, that of the warp's l-th key.
  __device__ int Row() const {
    if (dealer_.is_over()) return 0;
    const TokenKeys& keys = dealer_.keys();
    const int key = dealer_.Key(warp() * kRows + lane() % kRows);
    return keys.WideRow(key, keys.Entry(key));
  }
  // A row's halves, a lane 16 bytes of each.
  __device__ void CopyRows(int row, uint32_t tile) const {
    const uint32_t first = warp() * kRows, to = tile + lane() / 8 * kColumnBlockBytes + first * 128;
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
      const uint8_t* const from =
          p_.wide.rows +
          int64_t{__shfl_sync(0xffffffffu, row, static_cast<int>(r))} * kWideRowBytes + lane() * 16;
      CopyRow(to, r, from, true);
    }
  }
  // As they are, behind the last item's scores.
  __device__ void CopyQueries(int token, int first_head) {
    if (!query_.first_round) BarrierWait(&query_barriers_.empty, query_.parity ^ 1);
    const uint32_t first = warp() * kRows;
    const uint32_t to = queries_ + lane() / 8 * kColumnBlockBytes + first * 128;
    const int head = first_head + static_cast<int>(first), heads = p_.num_heads - head;
    const auto* from = reinterpret_cast<const uint8_t*>(p_.q) +
                       (int64_t{token} * p_.num_heads + head) * kWideRowBytes + lane() * 16;
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
      const bool exists = static_cast<int>(r) < heads;
      CopyRow(to, r, exists ? from + r * kWideRowBytes : reinterpret_cast<const uint8_t*>(p_.q),
              exists);
    }
    BarrierAwaitCopies(&query_barriers_.full);
    WarpArrive(&query_barriers_.full);
    query_.Next();
  }
  __device__ void CopyRow(uint32_t to, uint32_t r, const uint8_t* from, bool exists) const {
    const uint32_t place = to + r * 128 + (lane() % 8 ^ r % 8) * 16;
    CopyAhead(place, from, exists);
    CopyAhead(place + 4 * kColumnBlockBytes, from + kWideRowBytes / 2, exists);
  }

  const CudaSparseAttentionParams& p_;
  ItemDealer dealer_;  // of the tile behind the one at hand
  const uint32_t tiles_;
  uint64_t* const full_;
  uint64_t* const empty_;
  const uint32_t queries_;
  QueryBarriers& query_barriers_;
  RingPlace<1> query_;
};

}  // namespace fathom::kernels
