// KvLayout: where every byte of the KV cache is. Filled once from the config; host metadata only, a
// value. Byte offsets are 64-bit throughout.
//
// Two pools and a slot array:
//  - A history block belongs to 256 tokens and holds, for every layer of the kind, 64 C4 entries,
//    64 index keys (ratio-4 layers) and 2 C128 entries. The three kinds of the same tokens live and
//    die together, so one id names them; each kind is packed, none pays another's padding.
//  - A window page holds the entries of 64 tokens for every layer (each has a 128-token window). A
//    sequence keeps only the pages that its window and a rollback can still reach.
//  - A state slot holds one running sequence's compressor state: never paged, FP32.
// Inside a block or page one layer's entries are contiguous: all 576-byte token parts (448 FP8, 64
// BF16), then all 8-byte scale parts (7 ue8m0 and a zero). FP4 keys: all 64-byte codes, then all
// 4-byte scales. FP8 keys: 128-byte codes, then FP32 scales. fp32 numerics: rows of 512 or 128
// floats.
#pragma once

#include <cstdint>
#include <vector>

#include "config/model_config.h"

namespace fathom::kv_cache {

inline constexpr int kBlockTokens = 256;
inline constexpr int kWindowPageTokens = 64;
// A sequence can be taken back by this many tokens without losing window or compressor state.
inline constexpr int kMaxRollbackTokens = 8;

using config::IndexKeyDType;

// One kind of entry inside a history block or window page.
struct EntryLayout {
  int num_layers = 0;
  int entries_per_layer = 0;  // in one block or page
  int entry_bytes = 0;
  int64_t offset = 0;  // of layer 0 inside the block or page
  int64_t layer_bytes() const { return int64_t{entries_per_layer} * entry_bytes; }
  int64_t layer_offset(int kind_layer) const { return offset + kind_layer * layer_bytes(); }
};

// Compressor state in a slot, all in bytes. It is a pure function of the tokens before num_computed
// and of earlier tokens that a rollback removed, so a copy of a slot restores a sequence exactly. A
// step whose num_computed is 0 starts from nothing, whatever the slot holds.
//   One C4 layer: float main[kC4StateRows][4 * head_dim], then
//     float index[kC4StateRows][4 * index_head_dim];
//     row p mod kC4StateRows is token p: c (2d values), then z = gate + ape (2d values).
//   One C128 layer: int32 merged_end and 60 unused bytes, float m[d], l[d], acc[d] over the tokens
//     [merged_end / 128 * 128, merged_end), then float rows[kC128StateRows][2 * d] (c, z) of newer
//     tokens.
struct StateLayout {
  int64_t c4_offset = 0;  // of C4 layer 0 in the slot
  int64_t c4_layer_bytes = 0;
  int64_t c128_offset = 0;
  int64_t c128_layer_bytes = 0;
  int64_t slot_bytes = 0;

  int64_t c4_layer_offset(int kind_layer) const { return c4_offset + kind_layer * c4_layer_bytes; }
  int64_t c128_layer_offset(int kind_layer) const {
    return c128_offset + kind_layer * c128_layer_bytes;
  }
};
inline constexpr int64_t kC128StateHeaderBytes = 64;

// What a snapshot keeps of a state slot at a block boundary, where every ratio's group has just
// ended: the C4 rows that the next entry overlaps. C128 starts anew there, so its merged_end is set
// and nothing is kept.
struct SnapshotLayout {
  struct Range {
    int64_t slot_offset = 0;
    int64_t offset = 0;  // in the snapshot
    int64_t bytes = 0;
  };
  std::vector<Range> ranges;
  std::vector<int64_t> merged_ends;  // slot offsets of int32s that become the position
  int64_t bytes = 0;
};

struct KvLayout {
  EntryLayout c4, index, c128;  // in a history block
  EntryLayout window;           // in a window page; layers, then draft blocks
  int64_t block_bytes = 0;
  int64_t window_page_bytes = 0;
  StateLayout state;
  SnapshotLayout snapshot;

  // History bytes per token in the steady state (block_bytes / 256).
  double bytes_per_token() const { return static_cast<double>(block_bytes) / kBlockTokens; }
};

// fp32 numerics go with kFp32 index keys, official numerics with the others.
KvLayout MakeKvLayout(const config::ModelConfig& config, config::Numerics numerics,
                      IndexKeyDType index_dtype);

// The index of `layer` among the layers of its kind (C4 or C128; a draft block never is).
int KindLayer(const config::ModelConfig& config, int layer);

// The window pages before a block boundary that the next token reaches.
inline int NumSnapshotPages(int sliding_window) {
  return (sliding_window - 1 + kWindowPageTokens - 1) / kWindowPageTokens;
}
// Of host memory or a file: the state, then the window pages, oldest first.
inline int64_t SnapshotBytesWithPages(const KvLayout& layout, int sliding_window) {
  return layout.snapshot.bytes + NumSnapshotPages(sliding_window) * layout.window_page_bytes;
}

// The ring sizes of the compressor state (tokens): see StateLayout.
// C4: entry j pools rows 4j-4..4j+3, so 8 rows reach back from any position, and 8 more for a
// rollback.
inline constexpr int kC4StateRows = 16;
// C128: rows not yet merged into the running (m, l, acc), because a rollback may still remove them.
inline constexpr int kC128StateRows = 16;

}  // namespace fathom::kv_cache
