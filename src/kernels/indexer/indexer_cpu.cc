#include <algorithm>
#include <bit>

#include "base/check.h"
#include "kernels/gemm/gemm_rows.h"
#include "kernels/indexer/index_vector.h"
#include "kernels/indexer/indexer.h"
#include "kernels/parallel.h"
#include "kernels/quantize/quantize.h"
#include "kernels/rope/rope.h"

namespace fathom::kernels {
namespace {

constexpr int kKeyTile = 32;
constexpr int kHeadTile = 64;

// A key that sorts as (score descending, entry ascending) when sorted descending, NaN included.
uint64_t SortKey(float score, int32_t entry) {
  const auto u = std::bit_cast<uint32_t>(score + 0.0f);
  const uint32_t ordered = (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(entry));
}
int32_t EntryOf(uint64_t key) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key));
}

// Scores of the n keys from entry j0, into scores[0, n).
template <typename T>
void ScoreTile(const IndexSelectParams<T>& p, int64_t token, const int32_t* blocks, int32_t j0,
               int n, float* scores) {
  float keys[kKeyTile * kMaxIndexHeadDim];
  for (int i = 0; i < n; ++i) {
    const int32_t j = j0 + i;
    const EntrySlot slot =
        p.keys.At(blocks[j / p.keys.entries_per_page], j % p.keys.entries_per_page);
    LoadIndexKey(slot, p.dim, p.dtype, keys + i * p.dim);
  }
  const WeightMatrix key_rows{WeightDType::kF32, n, p.dim,
                              reinterpret_cast<const std::byte*>(keys)};
  std::fill(scores, scores + n, 0.0f);
  float q[kHeadTile * kMaxIndexHeadDim], dots[kHeadTile * kKeyTile];
  for (int h0 = 0; h0 < p.num_heads; h0 += kHeadTile) {
    const int heads = std::min(kHeadTile, p.num_heads - h0);
    const int64_t first_head = token * p.num_heads + h0;
    WidenRow(p.q + first_head * p.dim, q, int64_t{heads} * p.dim);
    Simd().dot_block({.x = q,
                      .x_stride = p.dim,
                      .m = heads,
                      .w = key_rows,
                      .n = n,
                      .y = dots,
                      .y_stride = kKeyTile});
    for (int h = 0; h < heads; ++h) {
      const float weight = Round<T>(ToFloat(p.projected[first_head + h]) * p.weight_scale);
      for (int i = 0; i < n; ++i) {
        scores[i] = scores[i] + std::max(dots[h * kKeyTile + i], 0.0f) * weight;
      }
    }
  }
}

template <typename T>
void SelectToken(const IndexSelectParams<T>& p, int64_t token, uint64_t* keys) {
  const auto t = static_cast<size_t>(token);
  const int32_t visible = (p.batch.positions[t] + 1) / 4;
  int32_t* selected = p.selected + token * p.topk;
  p.counts[token] = std::min(visible, p.topk);
  if (visible <= p.topk) {
    for (int32_t j = 0; j < visible; ++j) selected[j] = j;
    return;
  }
  CHECK_LE(visible, p.max_entries);
  const int32_t* blocks =
      p.batch.block_tables.data() + int64_t{p.batch.token_seq[t]} * p.batch.max_blocks;
  for (int32_t j0 = 0; j0 < visible; j0 += kKeyTile) {
    const int n = std::min(kKeyTile, visible - j0);
    float scores[kKeyTile];
    ScoreTile(p, token, blocks, j0, n, scores);
    for (int i = 0; i < n; ++i) keys[j0 + i] = SortKey(scores[i], j0 + i);
  }
  std::nth_element(keys, keys + p.topk - 1, keys + visible, std::greater<>());
  for (int i = 0; i < p.topk; ++i) selected[i] = EntryOf(keys[i]);
  std::sort(selected, selected + p.topk);
}

// What the cache's type holds of the vector.
template <typename T>
void RoundIndexVector(float* values, int dim, config::IndexKeyDType dtype) {
  std::byte data[kMaxIndexHeadDim * 4], scales[8];
  const EntrySlot slot{data, scales};
  StoreIndexKey(values, dim, dtype, slot);
  LoadIndexKey(slot, dim, dtype, values);
}

}  // namespace

template <typename T>
void Launch(const IndexQueryParams<T>& p, device::Stream& stream) {
  CHECK_LE(p.dim, kMaxIndexHeadDim);
  stream.thread_pool().ParallelFor(p.num_tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * p.num_heads; row < end * p.num_heads; ++row) {
      T* q = p.q + row * p.dim;
      float values[kMaxIndexHeadDim];
      WidenRow(q, values, p.dim);
      float* tail = values + p.dim - p.rope_dim;
      RotateRow(tail, p.angles + row / p.num_heads * p.rope_dim, p.rope_dim, false);
      for (int i = 0; i < p.rope_dim; ++i) tail[i] = Round<T>(tail[i]);
      RotateIndexVector<T>(values, p.dim);
      RoundIndexVector<T>(values, p.dim, p.dtype);
      for (int i = 0; i < p.dim; ++i) q[i] = FromFloat<T>(values[i]);
    }
  });
}

template <typename T>
void Launch(const IndexSelectParams<T>& p, device::Stream& stream) {
  CHECK_LE(p.dim, kMaxIndexHeadDim);
  ParallelSlots(stream.thread_pool(), p.batch.num_tokens(), [&](int64_t slot, int64_t token) {
    SelectToken(p, token, p.scratch + slot * p.max_entries);
  });
}

template void Launch(const IndexQueryParams<BFloat16>&, device::Stream&);
template void Launch(const IndexQueryParams<float>&, device::Stream&);
template void Launch(const IndexSelectParams<BFloat16>&, device::Stream&);
template void Launch(const IndexSelectParams<float>&, device::Stream&);

}  // namespace fathom::kernels
