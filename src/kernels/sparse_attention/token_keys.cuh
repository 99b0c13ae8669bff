// Which keys a token attends to and where they are: window positions of earlier steps (pages), the
// step's own (rows of `fresh`), then compressed entries, as NUMERICS orders them. Device code only.
#pragma once

#include "kernels/kv_entry/kv_entry.cuh"
#include "kernels/numbered_words.cuh"
#include "kernels/sparse_attention/sparse_attention_cuda.h"

namespace fathom::kernels {

inline constexpr int kWindow = 128;
inline constexpr int kKeyTile = 64;
inline constexpr int kHeadTile = 64;  // of wgmma
inline constexpr int kWideRowBytes = 2 * kHeadDim;
// Blocks that a step of few tokens is spread over.
inline constexpr int kTargetBlocks = 132;

// A key's entry; null past the last key.
struct KeyBytes {
  const uint8_t* data = nullptr;
  const uint8_t* scales = nullptr;

  __device__ static KeyBytes At(const PagedEntries& entries, int32_t page, int entry) {
    const DeviceEntry e = EntryAt(entries, page, entry);
    return {e.data, e.scales};
  }
  // Of the step's own.
  __device__ static KeyBytes Fresh(const CudaSparseAttentionParams& p, int row) {
    const uint8_t* const bytes = p.fresh + int64_t{row} * kFreshRowBytes;
    return {bytes, bytes + kKvDataBytes};
  }
};

// Which rows of CudaSparseAttentionParams::wide a sequence's keys have: entries as they lie in
// its table of blocks, those of the sequences before it first; behind all of these the window's,
// kWindow positions before the step's and the step's own.
class WideRows {
 public:
  __device__ WideRows(const CudaSparseAttentionParams& p, int seq) {
    const int entries = p.ratio == 0 ? 0 : p.batch.max_blocks * p.compressed.entries_per_page;
    first_entry_ = seq * entries;
    first_window_ = p.batch.num_seqs * entries + (seq + 1) * kWindow;
  }
  __device__ int Compressed(int entry) const { return first_entry_ + entry; }
  // `fresh`: a position's row among the step's own, counted on from these to those before it.
  __device__ int Window(int fresh) const { return first_window_ + fresh; }

 private:
  int first_entry_, first_window_;
};

class TokenKeys {
 public:
  // Reads the batch only, like all but Entry of ratio 4: may be called before the wait.
  __device__ TokenKeys(const CudaSparseAttentionParams& params, int token)
      : TokenKeys(params, token, params.batch.token_seq[token]) {}
  // Of a step of one token: its sequence is the first, which need not be looked up.
  __device__ explicit TokenKeys(const CudaSparseAttentionParams& params)
      : TokenKeys(params, 0, 0) {}
  // Another token's.
  __device__ void MoveTo(int token) { Read(token, p_.batch.token_seq[token]); }

  // Whether the launch before this cannot have written the key: with ratio 4 it may be the
  // selection.
  __device__ bool IsEarly(int k) const {
    if (k < num_window_) return p_.step_is_early || k < num_paged_;
    return p_.ratio != 4 && (p_.step_is_early || k - num_window_ < num_old_);
  }
  // Brings the block table near: one thread a line of it.
  __device__ void PrefetchTable() const {
    const int entries = min(static_cast<int>(blockDim.x), p_.batch.max_blocks / 32);
    if (p_.ratio != 4 || static_cast<int>(threadIdx.x) >= entries) return;
    const int32_t* line =
        p_.batch.block_tables + int64_t{seq_} * p_.batch.max_blocks + threadIdx.x * 32;
    asm volatile("{\n.reg .b32 x;\nld.global.ca.b32 x, [%0];\n}" ::"l"(line));
  }

  // Brings the entries of ratio 4 that may be selected into the L2 cache, where they are few: by
  // `thread` of the token's `threads`.
  __device__ void PrefetchEntries(int thread, int threads) const {
    constexpr int kMostPages = 32, kLineBytes = 128;
    const PagedEntries& e = p_.compressed;
    const int visible = (first_position_ + num_window_) / 4;
    const int pages = (visible + e.entries_per_page - 1) >> PageShift(e);
    if (p_.ratio != 4 || pages > kMostPages) return;
    const int lines = e.entries_per_page * (e.data_bytes + e.scale_bytes) / kLineBytes;
    const int32_t* table = p_.batch.block_tables + int64_t{seq_} * p_.batch.max_blocks;
    for (int i = thread; i < pages * lines; i += threads) {
      const uint8_t* line = EntryAt(e, table[i / lines], 0).data + i % lines * kLineBytes;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }
  }

  __device__ bool is_padding() const { return seq_ < 0; }
  __device__ int size() const { return size_; }

  // Whether the words with the number are there that tell the selected entries which the lanes'
  // keys k are, of lanes that want one. By whole warps: what follows is one instruction stream.
  __device__ bool IsTold(int k, bool wants, uint32_t number, int& entry) const {
    const uint2* word = p_.words.selected + int64_t{token_} * p_.topk + k - num_window_;
    const uint2 seen = wants ? LoadTogether(word) : uint2{0, number};
    entry = static_cast<int>(seen.x);
    return __all_sync(0xffffffffu, seen.y == number);
  }

  // The compressed entry that key k is, or what Bytes needs else: to be read ahead of Bytes.
  __device__ int Entry(int k) const {
    if (k < num_window_ || k >= size_) return 0;
    const int i = k - num_window_;
    return p_.ratio == 4 ? p_.selected[int64_t{token_} * p_.topk + i] : i;
  }

  // The page that it is in, of keys in pages: to be read ahead of Bytes, too.
  __device__ int Page(int k, int entry) const {
    const CudaBatch& b = p_.batch;
    if (k >= size_) return 0;
    if (k >= num_window_) {
      return b.block_tables[int64_t{seq_} * b.max_blocks + (entry >> PageShift(p_.compressed))];
    }
    if (k >= num_paged_) return 0;
    const int page = ((first_position_ + k) >> PageShift(p_.pages)) - b.first_window_page[seq_];
    return b.window_tables[int64_t{seq_} * b.max_window_pages + page];
  }

  __device__ KeyBytes Bytes(int k, int entry, int page) const {
    if (k >= size_) return {};
    if (k >= num_window_) {
      return KeyBytes::At(p_.compressed, page, entry & (p_.compressed.entries_per_page - 1));
    }
    if (k >= num_paged_) return KeyBytes::Fresh(p_, fresh_row_ + k);
    return KeyBytes::At(p_.pages, page, (first_position_ + k) & (p_.pages.entries_per_page - 1));
  }
  __device__ KeyBytes Bytes(int k, int entry) const { return Bytes(k, entry, Page(k, entry)); }

  // The key's among the widened ones (wide_keys.cuh).
  __device__ int WideRow(int k, int entry) const {
    const WideRows rows(p_, seq_);
    return k < num_window_ ? rows.Window(fresh_row_ + k) : rows.Compressed(entry);
  }

 private:
  __device__ TokenKeys(const CudaSparseAttentionParams& params, int token, int seq) : p_(params) {
    Read(token, seq);
  }
  __device__ void Read(int token, int seq) {
    token_ = token, seq_ = seq;
    const int position = p_.batch.positions[token];
    seq = max(seq, 0);
    const int computed = p_.batch.num_computed[seq];
    first_position_ = max(0, position - kWindow + 1);
    num_paged_ = max(0, computed - first_position_);
    num_window_ = position + 1 - first_position_;
    fresh_row_ = p_.batch.cu_seqlens_q[seq] + first_position_ - computed;
    num_old_ = computed / 128;
    size_ = num_window_;
    if (p_.ratio == 4) size_ += min((position + 1) / 4, p_.topk);
    if (p_.ratio == 128) size_ += (position + 1) / 128;
  }
  // Pages hold a power of two of entries.
  __device__ static int PageShift(const PagedEntries& entries) {
    return __ffs(entries.entries_per_page) - 1;
  }

  const CudaSparseAttentionParams& p_;
  int token_ = 0;
  int seq_ = 0;
  int first_position_ = 0;
  int num_paged_ = 0;
  int num_window_ = 0;
  int fresh_row_ = 0;  // of window key 0, were it this step's
  int num_old_ = 0;    // entries of ratio 128 of earlier steps
  int size_ = 0;
};

// How a token's tiles of 64 keys are dealt out to at most `max_splits` blocks: `tiles_per_split`
// consecutive ones each, which grows with the number of tiles so that adding up the parts stays
// cheap.
struct KeySplits {
  int num_tiles = 0;
  int tiles_per_split = 0;
  int num_splits = 0;

  __device__ KeySplits(int num_keys, int max_splits) {
    num_tiles = (num_keys + kKeyTile - 1) / kKeyTile;
    tiles_per_split = max((num_tiles + max_splits - 1) / max_splits, 1 + num_tiles / 64);
    if (max_splits == 1) tiles_per_split = num_tiles;
    num_splits = (num_tiles + tiles_per_split - 1) / tiles_per_split;
  }
};

}  // namespace fathom::kernels
