#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "kernels/gemm/gemm_rows.h"
#include "kernels/parallel.h"
#include "kernels/sparse_attention/sparse_attention.h"

namespace fathom::kernels {
namespace {

constexpr int kKeyTile = 32;

// One token's keys in canonical order: key k < num_window is a window position, the others are
// compressed.
template <typename T>
class TokenKeys {
 public:
  TokenKeys(const SparseAttentionParams<T>& params, int64_t token)
      : p_(params), token_(token), seq_(params.batch.token_seq[static_cast<size_t>(token)]) {
    const int32_t position = p_.batch.positions[static_cast<size_t>(token)];
    first_position_ = std::max(0, position - p_.window + 1);
    num_window_ = position - first_position_ + 1;
    num_compressed_ = p_.ratio == 0   ? 0
                      : p_.ratio == 4 ? p_.counts[token]
                                      : (position + 1) / p_.ratio;
  }

  int size() const { return num_window_ + num_compressed_; }

  void Load(int key, float* values) const {
    const EntrySlot slot = key < num_window_ ? WindowSlot(key) : CompressedSlot(key - num_window_);
    if (slot.data == nullptr) {
      const int32_t row = p_.batch.row(seq_, first_position_ + key);
      return WidenRow(p_.fresh + int64_t{row} * p_.head_dim, values, p_.head_dim);
    }
    LoadKvEntry<T>(slot, p_.head_dim, p_.rope_dim, values);
  }

 private:
  // Empty for the step's own tokens.
  EntrySlot WindowSlot(int key) const {
    const int32_t position = first_position_ + key;
    const auto seq = static_cast<size_t>(seq_);
    if (position >= p_.batch.num_computed[seq]) return {};
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
  int num_window_ = 0;
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
        row_(params.q + (token * params.num_heads + h0) * params.head_dim),
        q_(scratch),
        o_(q_ + int64_t{heads} * params.head_dim),
        tile_(o_ + int64_t{heads} * params.head_dim),
        scores_(tile_ + int64_t{kKeyTile} * params.head_dim) {
    CHECK_LE(keys_.size(), params.max_keys);
  }

  void Run() {
    Score();
    float l[kMaxAttentionHeads];
    for (int h = 0; h < heads_; ++h) l[h] = Softmax(h);
    std::fill(o_, o_ + int64_t{heads_} * p_.head_dim, 0.0f);
    ForEachTile([&](int k0, int n) {
      Simd().weighted_sum({.p = scores_ + k0,
                           .p_stride = p_.max_keys,
                           .m = heads_,
                           .v = tile_,
                           .v_stride = p_.head_dim,
                           .n = n,
                           .size = p_.head_dim,
                           .o = o_,
                           .o_stride = p_.head_dim});
    });
    for (int h = 0; h < heads_; ++h) {
      for (int i = 0; i < p_.head_dim; ++i) {
        row_[h * p_.head_dim + i] = FromFloat<T>(o_[h * p_.head_dim + i] / l[h]);
      }
    }
  }

 private:
  template <typename Body>
  void ForEachTile(const Body& body) {
    for (int k0 = 0; k0 < keys_.size(); k0 += kKeyTile) {
      const int n = std::min(kKeyTile, keys_.size() - k0);
      for (int k = 0; k < n; ++k) keys_.Load(k0 + k, tile_ + int64_t{k} * p_.head_dim);
      body(k0, n);
    }
  }

  void Score() {
    WidenRow(row_, q_, int64_t{heads_} * p_.head_dim);
    ForEachTile([&](int k0, int n) {
      const WeightMatrix keys{WeightDType::kF32, n, p_.head_dim,
                              reinterpret_cast<const std::byte*>(tile_)};
      Simd().dot_block({.x = q_,
                        .x_stride = p_.head_dim,
                        .m = heads_,
                        .w = keys,
                        .n = n,
                        .y = scores_ + k0,
                        .y_stride = p_.max_keys});
    });
  }

  // Scores become b(p); returns l.
  float Softmax(int h) {
    float* s = scores_ + h * p_.max_keys;
    const int n = keys_.size();
    float max = s[0] * p_.scale;
    for (int k = 0; k < n; ++k) {
      s[k] = s[k] * p_.scale;
      max = std::max(max, s[k]);
    }
    float l = 0;
    for (int k = 0; k < n; ++k) {
      const float e = std::exp(s[k] - max);
      l = l + e;
      s[k] = Round<T>(e);
    }
    return l + std::exp(p_.sink[h0_ + h] - max);
  }

  const SparseAttentionParams<T>& p_;
  TokenKeys<T> keys_;
  int h0_;
  int heads_;
  T* row_;  // q, then o
  float* q_;
  float* o_;
  float* tile_;
  float* scores_;
};

}  // namespace

int64_t AttentionScratchFloats(int num_heads, int head_dim, int64_t max_keys) {
  return int64_t{2 * num_heads + kKeyTile} * head_dim + num_heads * max_keys;
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
