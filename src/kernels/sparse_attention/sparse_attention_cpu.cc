#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "kernels/gemm/gemm_rows.h"
#include "kernels/parallel.h"
#include "kernels/sparse_attention/sparse_attention.h"

namespace fathom::kernels {
namespace {

constexpr int kKeyTile = 32;
// Keys that stay widened from the scores to the sums; a token with more widens its keys twice.
constexpr int kKeptKeys = 256;

// One token's keys in canonical order: window positions of earlier steps (in pages), the step's own
// window positions (contiguous rows of `fresh`), then compressed entries.
template <typename T>
class TokenKeys {
 public:
  TokenKeys(const SparseAttentionParams<T>& params, int64_t token)
      : p_(params), token_(token), seq_(params.batch.token_seq[static_cast<size_t>(token)]) {
    const int32_t position = p_.batch.positions[static_cast<size_t>(token)];
    const int32_t computed = p_.batch.num_computed[static_cast<size_t>(seq_)];
    first_position_ = std::max(0, position - p_.window + 1);
    num_paged_ = std::max(0, computed - first_position_);
    num_fresh_ = position + 1 - first_position_ - num_paged_;
    num_compressed_ = p_.ratio == 0   ? 0
                      : p_.ratio == 4 ? p_.counts[token]
                                      : (position + 1) / p_.ratio;
  }

  int num_paged() const { return num_paged_; }
  int num_fresh() const { return num_fresh_; }
  int size() const { return num_paged_ + num_fresh_ + num_compressed_; }

  WeightMatrix FreshRows() const {
    const int64_t row = p_.batch.row(seq_, first_position_ + num_paged_);
    const auto dtype = kIsOfficial<T> ? WeightDType::kBF16 : WeightDType::kF32;
    return {dtype, num_fresh_, p_.head_dim,
            reinterpret_cast<const std::byte*>(p_.fresh + row * p_.head_dim)};
  }

  // A key of the pages or the compressed entries.
  EntrySlot Slot(int key) const {
    return key < num_paged_ ? WindowSlot(key) : CompressedSlot(key - num_paged_ - num_fresh_);
  }

 private:
  EntrySlot WindowSlot(int key) const {
    const auto seq = static_cast<size_t>(seq_);
    const int32_t position = first_position_ + key;
    const int32_t page = position / p_.pages.entries_per_page - p_.batch.first_window_page[seq];
    CHECK_GE(page, 0);
    CHECK_LT(page, p_.batch.max_window_pages);
    const int32_t id = p_.batch.window_tables[seq * static_cast<size_t>(p_.batch.max_window_pages) +
                                              static_cast<size_t>(page)];
    CHECK_GE(id, 0);
    return p_.pages.At(id, position % p_.pages.entries_per_page);
  }

  EntrySlot CompressedSlot(int index) const {
    const int32_t entry = p_.ratio == 4 ? p_.selected[token_ * p_.topk + index] : index;
    const int per_page = p_.compressed.entries_per_page;
    const int32_t id =
        p_.batch.block_tables[static_cast<size_t>(seq_ * p_.batch.max_blocks + entry / per_page)];
    CHECK_GE(id, 0);
    return p_.compressed.At(id, entry % per_page);
  }

  const SparseAttentionParams<T>& p_;
  int64_t token_;
  int32_t seq_;
  int32_t first_position_ = 0;
  int num_paged_ = 0;
  int num_fresh_ = 0;
  int num_compressed_ = 0;
};

// Heads [h0, h0 + heads) of one token.
template <typename T>
class TokenHeads {
 public:
  TokenHeads(const SparseAttentionParams<T>& params, int64_t token, int h0, int heads,
             float* scratch)
      : p_(params),
        keys_(params, token),
        h0_(h0),
        heads_(heads),
        keep_(keys_.size() - keys_.num_fresh() <= kKeptKeys),
        row_(params.q + (token * params.num_heads + h0) * params.head_dim),
        q_(scratch),
        o_(q_ + int64_t{heads} * params.head_dim),
        tile_(o_ + int64_t{heads} * params.head_dim),
        scores_(tile_ + int64_t{kKeptKeys} * params.head_dim) {
    CHECK_LE(keys_.size(), params.max_keys);
  }

  void Run() {
    WidenRow(row_, q_, int64_t{heads_} * p_.head_dim);
    ForEachTile(true, [&](int k0, const WeightMatrix& keys) {
      Simd().dot_block({.x = q_,
                        .x_stride = p_.head_dim,
                        .m = heads_,
                        .w = keys,
                        .n = static_cast<int>(keys.rows),
                        .y = scores_ + k0,
                        .y_stride = p_.max_keys});
    });
    float l[kMaxAttentionHeads];
    Softmax(l);
    std::fill(o_, o_ + int64_t{heads_} * p_.head_dim, 0.0f);
    ForEachTile(!keep_, [&](int k0, const WeightMatrix& keys) {
      Simd().weighted_sum({.p = scores_ + k0,
                           .p_stride = p_.max_keys,
                           .m = heads_,
                           .v = keys,
                           .o = o_,
                           .o_stride = p_.head_dim});
    });
    for (int h = 0; h < heads_; ++h) {
      float* o = o_ + h * p_.head_dim;
      for (int i = 0; i < p_.head_dim; ++i) o[i] = o[i] / l[h];
      NarrowRow(o, row_ + h * p_.head_dim, p_.head_dim);
    }
  }

 private:
  // Calls body(first key, keys) for consecutive keys; reads those of the cache when `load` is set.
  template <typename Body>
  void ForEachTile(bool load, const Body& body) {
    CachedTiles(0, keys_.num_paged(), 0, load, body);
    if (keys_.num_fresh() > 0) body(keys_.num_paged(), keys_.FreshRows());
    const int begin = keys_.num_paged() + keys_.num_fresh();
    CachedTiles(begin, keys_.size(), keys_.num_paged(), load, body);
  }

  // `kept` keys are in the tile already.
  template <typename Body>
  void CachedTiles(int begin, int end, int kept, bool load, const Body& body) {
    for (int k0 = begin; k0 < end; k0 += kKeyTile) {
      const int n = std::min(kKeyTile, end - k0);
      float* rows = tile_ + (keep_ ? int64_t{kept} + k0 - begin : 0) * p_.head_dim;
      for (int k = 0; load && k < n; ++k) {
        LoadKvEntry<T>(keys_.Slot(k0 + k), p_.head_dim, p_.rope_dim,
                       rows + int64_t{k} * p_.head_dim);
      }
      body(k0, WeightMatrix{WeightDType::kF32, n, p_.head_dim,
                            reinterpret_cast<const std::byte*>(rows)});
    }
  }

  // Scores become b(p).
  void Softmax(float* l) {
    const int n = keys_.size();
    for (int h = 0; h < heads_; ++h) {
      float* s = scores_ + h * p_.max_keys;
      float max = s[0] * p_.scale;
      for (int k = 0; k < n; ++k) {
        s[k] = s[k] * p_.scale;
        max = std::max(max, s[k]);
      }
      for (int k = 0; k < n; ++k) s[k] = s[k] - max;
      Simd().exp(s, s, n);
      l[h] = p_.sink[h0_ + h] - max;
    }
    Simd().exp(l, l, heads_);
    // Sums of several heads at once: each is a chain of additions in key order.
    constexpr int kChains = 4;
    int h = 0;
    for (; h + kChains <= heads_; h += kChains) SumKeys<kChains>(h, l);
    for (; h < heads_; ++h) SumKeys<1>(h, l);
    if constexpr (kIsOfficial<T>) {
      for (h = 0; h < heads_; ++h) {
        float* s = scores_ + h * p_.max_keys;
        Simd().round_to_bf16(s, s, n);
      }
    }
  }

  // l[h] = sum of p over the keys, plus l[h].
  template <int kHeads>
  void SumKeys(int h0, float* l) const {
    const float* s = scores_ + h0 * p_.max_keys;
    float sums[kHeads] = {};
    for (int k = 0; k < keys_.size(); ++k) {
      for (int h = 0; h < kHeads; ++h) sums[h] = sums[h] + s[h * p_.max_keys + k];
    }
    for (int h = 0; h < kHeads; ++h) l[h0 + h] = sums[h] + l[h0 + h];
  }

  const SparseAttentionParams<T>& p_;
  TokenKeys<T> keys_;
  int h0_;
  int heads_;
  bool keep_;  // all widened keys fit the tile
  T* row_;     // q, then o
  float* q_;
  float* o_;
  float* tile_;
  float* scores_;
};

}  // namespace

int64_t AttentionScratchFloats(int num_heads, int head_dim, int64_t max_keys) {
  return int64_t{2 * num_heads + kKeptKeys} * head_dim + num_heads * max_keys;
}

template <typename T>
void Launch(const SparseAttentionParams<T>& p, device::Stream& stream) {
  CHECK_LE(p.head_dim, kMaxEntrySize);
  CHECK_LE(p.num_heads, kMaxAttentionHeads);
  ThreadPool& pool = stream.thread_pool();
  // Few tokens: their heads are shared out; the keys are then widened once a part.
  const int parts = p.batch.num_tokens() >= pool.num_threads()
                        ? 1
                        : std::min(pool.num_threads(), std::max(1, p.num_heads / 4));
  const int heads = (p.num_heads + parts - 1) / parts;
  const int64_t scratch = AttentionScratchFloats(p.num_heads, p.head_dim, p.max_keys);
  ParallelSlots(pool, int64_t{p.batch.num_tokens()} * parts, [&](int64_t slot, int64_t task) {
    const int h0 = static_cast<int>(task % parts) * heads;
    const int n = std::min(heads, p.num_heads - h0);
    if (n > 0) TokenHeads<T>(p, task / parts, h0, n, p.scratch + slot * scratch).Run();
  });
}

template void Launch(const SparseAttentionParams<BFloat16>&, device::Stream&);
template void Launch(const SparseAttentionParams<float>&, device::Stream&);

}  // namespace fathom::kernels
