#include "kv_cache/kv_layout.h"

#include "base/check.h"

namespace fathom::kv_cache {
namespace {

using config::LayerKind;

// Every kind begins at a multiple of this, for wide loads.
constexpr int64_t kAlignment = 256;

int64_t AlignUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int EntryBytes(const config::ModelConfig& config, config::Numerics numerics) {
  if (numerics == config::Numerics::kFp32) return config.head_dim * 4;
  const int num_fp8 = config.head_dim - config.rope_dim;
  CHECK_EQ(num_fp8 % 64, 0);
  const int scale_bytes = (num_fp8 / 64 + 7) / 8 * 8;
  return num_fp8 + config.rope_dim * 2 + scale_bytes;
}

int IndexKeyBytes(const config::ModelConfig& config, IndexKeyDType dtype) {
  switch (dtype) {
    case IndexKeyDType::kFp4:
      return config.index_head_dim / 2 + config.index_head_dim / 32;
    case IndexKeyDType::kFp8:
      return config.index_head_dim + 4;
    case IndexKeyDType::kFp32:
      break;
  }
  return config.index_head_dim * 4;
}

// Places one kind after `end` and returns its layout; `end` moves behind it.
EntryLayout Place(int num_layers, int entries_per_layer, int entry_bytes, int64_t& end) {
  EntryLayout layout{num_layers, entries_per_layer, entry_bytes, end};
  end = AlignUp(end + num_layers * layout.layer_bytes());
  return layout;
}

StateLayout MakeStateLayout(const config::ModelConfig& config) {
  StateLayout state;
  const int64_t float_bytes = 4;
  state.c4_layer_bytes = kC4StateRows * 4 * (config.head_dim + config.index_head_dim) * float_bytes;
  state.c128_layer_bytes =
      kC128StateHeaderBytes + (3 + kC128StateRows * 2) * config.head_dim * float_bytes;
  state.c128_offset = AlignUp(config.num_layers_of(LayerKind::kC4) * state.c4_layer_bytes);
  state.slot_bytes =
      AlignUp(state.c128_offset + config.num_layers_of(LayerKind::kC128) * state.c128_layer_bytes);
  return state;
}

SnapshotLayout MakeSnapshotLayout(const config::ModelConfig& config, const StateLayout& state) {
  // The four tokens before a boundary are the last rows of the ring.
  static_assert(kBlockTokens % kC4StateRows == 0);
  constexpr int kOverlap = 4;
  SnapshotLayout snapshot;
  const auto keep = [&snapshot](int64_t rows_offset, int width) {
    const int64_t row_bytes = int64_t{4} * width * 4;
    const int64_t offset = rows_offset + (kC4StateRows - kOverlap) * row_bytes;
    snapshot.ranges.push_back({offset, snapshot.bytes, kOverlap * row_bytes});
    snapshot.bytes += kOverlap * row_bytes;
  };
  for (int i = 0; i < config.num_layers_of(LayerKind::kC4); ++i) {
    const int64_t offset = state.c4_layer_offset(i);
    keep(offset, config.head_dim);
    keep(offset + int64_t{kC4StateRows} * 4 * config.head_dim * 4, config.index_head_dim);
  }
  for (int i = 0; i < config.num_layers_of(LayerKind::kC128); ++i) {
    snapshot.merged_ends.push_back(state.c128_layer_offset(i));
  }
  snapshot.bytes = AlignUp(snapshot.bytes);
  return snapshot;
}

}  // namespace

KvLayout MakeKvLayout(const config::ModelConfig& config, config::Numerics numerics,
                      IndexKeyDType index_dtype) {
  CHECK_EQ(numerics == config::Numerics::kFp32, index_dtype == IndexKeyDType::kFp32);
  const int entry_bytes = EntryBytes(config, numerics);
  const int num_c4 = config.num_layers_of(LayerKind::kC4);
  const int num_c128 = config.num_layers_of(LayerKind::kC128);
  KvLayout layout;
  layout.c4 = Place(num_c4, kBlockTokens / 4, entry_bytes, layout.block_bytes);
  layout.index =
      Place(num_c4, kBlockTokens / 4, IndexKeyBytes(config, index_dtype), layout.block_bytes);
  layout.c128 = Place(num_c128, kBlockTokens / 128, entry_bytes, layout.block_bytes);
  layout.window = Place(config.num_layers + config.num_draft_blocks, kWindowPageTokens, entry_bytes,
                        layout.window_page_bytes);
  layout.state = MakeStateLayout(config);
  layout.snapshot = MakeSnapshotLayout(config, layout.state);
  return layout;
}

int KindLayer(const config::ModelConfig& config, int layer) {
  CHECK_LT(layer, config.num_layers);
  int index = 0;
  for (int i = 0; i < layer; ++i) index += config.layer_kind(i) == config.layer_kind(layer) ? 1 : 0;
  return index;
}

}  // namespace fathom::kv_cache
