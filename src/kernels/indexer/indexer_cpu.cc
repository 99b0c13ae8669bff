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

// The n entries from `entry` of one page as rows; those that are not stored as a matrix are widened
// into `scratch`.
WeightMatrix KeyRows(const PagedEntries& keys, int dim, config::IndexKeyDType dtype, int32_t block,
                     int entry, int n, float* scratch) {
  const EntrySlot slot = keys.At(block, entry);
  if (dtype == config::IndexKeyDType::kFp4) {
    CHECK_EQ(keys.scale_bytes, dim / kFp4Block);
    return {WeightDType::kFp4, n, dim, slot.data, reinterpret_cast<const uint8_t*>(slot.scales)};
  }
  for (int i = 0; i < n; ++i) {
    LoadIndexKey(keys.At(block, entry + i), dim, dtype, scratch + i * dim);
  }
  return {WeightDType::kF32, n, dim, reinterpret_cast<const std::byte*>(scratch)};
}

// One token's queries and head weights against key after key.
template <typename T>
class TokenScorer {
 public:
  TokenScorer(const IndexSelectParams<T>& params, int64_t token) : p_(params), token_(token) {
    WidenHeads(0);
  }

  // scores[i] of key row i.
  void Score(const WeightMatrix& keys, float* scores) {
    const auto n = static_cast<int>(keys.rows);
    std::fill(scores, scores + n, 0.0f);
    float dots[kHeadTile * kKeyTile];
    for (int h0 = 0; h0 < p_.num_heads; h0 += kHeadTile) {
      if (h0 != first_head_) WidenHeads(h0);
      Simd().dot_block({.x = q_,
                        .x_stride = p_.dim,
                        .m = num_heads_,
                        .w = keys,
                        .n = n,
                        .panel = panel_,
                        .y = dots,
                        .y_stride = kKeyTile});
      for (int h = 0; h < num_heads_; ++h) {
        for (int i = 0; i < n; ++i) {
          scores[i] = scores[i] + std::max(dots[h * kKeyTile + i], 0.0f) * weights_[h];
        }
      }
    }
  }

 private:
  void WidenHeads(int h0) {
    first_head_ = h0;
    num_heads_ = std::min(kHeadTile, p_.num_heads - h0);
    const int64_t first = token_ * p_.num_heads + h0;
    WidenRow(p_.q + first * p_.dim, q_, int64_t{num_heads_} * p_.dim);
    for (int h = 0; h < num_heads_; ++h) {
      weights_[h] = Round<T>(ToFloat(p_.projected[first + h]) * p_.weight_scale);
    }
  }

  const IndexSelectParams<T>& p_;
  int64_t token_;
  int first_head_ = 0;
  int num_heads_ = 0;
  float weights_[kHeadTile];
  float q_[kHeadTile * kMaxIndexHeadDim];
  float panel_[kKeyTile * kMaxIndexHeadDim];
};

template <typename T>
void SelectToken(const IndexSelectParams<T>& p, int64_t token, uint64_t* sort_keys) {
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
  TokenScorer<T> scorer(p, token);
  float widened[kKeyTile * kMaxIndexHeadDim];
  for (int32_t j0 = 0, n = 0; j0 < visible; j0 += n) {
    const int entry = j0 % p.keys.entries_per_page;
    n = std::min({kKeyTile, visible - j0, p.keys.entries_per_page - entry});
    float scores[kKeyTile];
    scorer.Score(
        KeyRows(p.keys, p.dim, p.dtype, blocks[j0 / p.keys.entries_per_page], entry, n, widened),
        scores);
    for (int i = 0; i < n; ++i) sort_keys[j0 + i] = SortKey(scores[i], j0 + i);
  }
  std::nth_element(sort_keys, sort_keys + p.topk - 1, sort_keys + visible, std::greater<>());
  for (int i = 0; i < p.topk; ++i) selected[i] = EntryOf(sort_keys[i]);
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
