// The compressor: pools rows c = wkv h and z = wgate h + ape[position mod r] into one entry per r
// tokens by a softmax of z per channel, FP32 throughout; the pool is then rounded, normed, rounded,
// rotated as position r * j, rounded and stored.
//   Ratio 4 (width 2d): entry j pools tokens 4j-4..4j-1 with columns [0, d) and 4j..4j+3 with
//     columns [d, 2d); entry 0 has only the latter.
//   Ratio 128 (width d): entry j pools its 128 tokens, one by one in position order:
//     m' = max(m, z); l = l * exp(m - m') + exp(z - m'); acc = acc * exp(m - m') + exp(z - m') * c.
// Rows of earlier steps come from the state slot, which is then brought up to date. Its layout:
//   Ratio 4: float rows[ring_rows][2 * width] (c, z); row p mod ring_rows is token p.
//   Ratio 128: int32 merged_end in kC128StateHeaderBytes, float m[d], l[d], acc[d] over the tokens
//     [merged_end / 128 * 128, merged_end), then the same rows. merged_end runs max_rollback tokens
//     behind, so that a sequence can be taken back that far.
#pragma once

#include <cstdint>
#include <span>

#include "device/device.h"
#include "kernels/activation.h"
#include "kernels/batch.h"
#include "kernels/kv_entry/kv_entry.h"

namespace fathom::kernels {

inline constexpr int kC128StateHeaderBytes = 64;

// An entry that a step completes.
struct CompressedEntry {
  int32_t seq = 0;
  int32_t entry = 0;  // j
};

// Fills `out` (room for T / ratio + S) and returns how many.
int PlanCompressedEntries(const BatchView& batch, int ratio, std::span<CompressedEntry> out);

enum class CompressorOutput { kKvEntry, kIndexKey };

template <typename T>
struct CompressorParams {
  BatchView batch;
  std::span<const CompressedEntry> entries;
  int ratio = 0;  // 4 or 128
  int dim = 0;    // d; at most kMaxEntrySize
  int rope_dim = 0;
  const float* c = nullptr;               // [T, width]
  const float* z = nullptr;               // [T, width], without ape
  const float* ape = nullptr;             // [ratio, width]
  const BFloat16* norm_weight = nullptr;  // [d]
  float norm_eps = 0;
  std::span<const float> frequencies;  // [rope_dim / 2]
  CompressorOutput output = CompressorOutput::kKvEntry;
  config::IndexKeyDType index_dtype = config::IndexKeyDType::kFp4;
  PagedEntries cache;
  std::byte* state = nullptr;  // of slot 0: this layer's state of this compressor
  int64_t slot_bytes = 0;
  int ring_rows = 0;     // at least 8 + max_rollback for ratio 4, 2 * max_rollback for ratio 128
  int max_rollback = 0;  // tokens

  int width() const { return ratio == 4 ? 2 * dim : dim; }
};

template <typename T>
void Launch(const CompressorParams<T>& params, device::Stream& stream);

}  // namespace fathom::kernels
