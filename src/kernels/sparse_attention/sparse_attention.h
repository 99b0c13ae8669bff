// Attention of every head over one shared entry per key (K = V): the window, then compressed ones.
//   WindowStore rounds the step's own entries to what the cache holds (in place, so that this step
//     reads what later steps will), and writes to the window pages those a later step can reach.
//   SparseAttention, in place on q: the keys of position i are max(0, i - window + 1)..i, then the
//     selected (ratio 4) or all visible (ratio 128) compressed entries, ascending.
//     s = q . k * scale; m = max s (the sink left out); p = exp(s - m); l = sum p + exp(sink - m);
//     o = b((sum b(p) * k) / l). Sums run over the keys in that order.
// Window positions before the step come from the pages, the step's own from `fresh`, so chunks of
// any size give the same bits.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/activation.h"
#include "kernels/batch.h"
#include "kernels/kv_entry/kv_entry.h"

namespace fathom::kernels {

inline constexpr int kMaxAttentionHeads = 256;

template <typename T>
struct WindowStoreParams {
  BatchView batch;
  T* kv = nullptr;  // [num_tokens, head_dim], after norm and rope; in place
  int head_dim = 0;
  int rope_dim = 0;
  int window = 0;
  int max_rollback = 0;  // tokens that a later step may go back
  PagedEntries pages;
};

template <typename T>
struct SparseAttentionParams {
  BatchView batch;
  T* q = nullptr;  // [num_tokens, num_heads, head_dim]; becomes o
  int num_heads = 0;
  int head_dim = 0;
  int rope_dim = 0;
  int window = 0;
  float scale = 0;
  const float* sink = nullptr;  // [num_heads]
  const T* fresh = nullptr;     // [num_tokens, head_dim], after WindowStore
  PagedEntries pages;
  int ratio = 0;  // 0: window only; 4: the selected entries; 128: all visible ones
  PagedEntries compressed;
  const int32_t* selected = nullptr;  // [num_tokens, topk], ratio 4
  const int32_t* counts = nullptr;    // [num_tokens], ratio 4
  int topk = 0;
  float* scratch = nullptr;  // [num_threads, AttentionScratchFloats(...)]
  int64_t max_keys = 0;      // window and compressed entries of one token, at most
};

// Scratch of one thread, in floats.
int64_t AttentionScratchFloats(int num_heads, int head_dim, int64_t max_keys);

template <typename T>
void Launch(const WindowStoreParams<T>& params, device::Stream& stream);
template <typename T>
void Launch(const SparseAttentionParams<T>& params, device::Stream& stream);

}  // namespace fathom::kernels
