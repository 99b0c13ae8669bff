// The CUDA side of sparse_attention.h, official numerics (head_dim 512, rotary 64, window 128),
// with what surrounds it: the norm of the query heads and their rope on the way in; the inverse
// rope on the way out, into tiles for the grouped output product. K and V are the same entries.
//   q = rope(b(head norm(q))); s = q . k * 512^-0.5, FP32; p = exp(s - m), the running maximum m;
//   o = b(sum b(p) * k / (sum p + exp(sink - m))); out = b(inverse rope(o)).
// A token of ratio 4 attends to the first min(topk, visible) of its selected entries.
// A step of few tokens spreads a token's keys over blocks (splits); how many depends on num_tokens,
// max_blocks, the token's keys and whether there are more than 64 heads only, so a step of the same
// shape gives the same bits. Prefill does not: a block adds up a token's keys in their order, 64 at
// a time, in a step of any size.
// Angles and what earlier steps left in pages and entries are read before the wait (launch.cuh),
// and where they are early q and what this step adds: the launch just before must not write them.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/device.h"
#include "kernels/batch_cuda.h"
#include "kernels/kv_entry/kv_entry.h"
#include "kernels/launch_number.h"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

// Pairs of queries and selected entries as numbered words (numbered_words.cuh): of the query
// products just before and of the selection before these, beside which attention starts. Who waits
// for it waits for them.
struct AttentionWords {
  const uint2* q = nullptr;         // [num_tokens, num_heads, 256]
  const uint2* selected = nullptr;  // [num_tokens, topk]
  LaunchNumber number = {};
};

// Room for a prompt's keys as BF16, which a launch before attention widens, each once: where every
// token widens its own, that takes longer than its products.
struct WideKeys {
  uint8_t* rows = nullptr;  // of 512 values
  int64_t bytes = 0;
};

struct CudaSparseAttentionParams {
  CudaBatch batch;
  bool prefill = false;              // the same bits in a step of any size
  const __nv_bfloat16* q = nullptr;  // [num_tokens, num_heads, 512], of the weight product
  // Of few tokens: q is there before this launch starts, as a selection let it start behind its own
  // wait for the query products.
  bool q_is_early = false;
  // Of few tokens: what the step adds to pages, entries and fresh is, too.
  bool step_is_early = true;
  // Of few tokens in tiles of their own: the launches behind this one may start when it does, not
  // behind its wait, so that their weights are on their way while it works.
  bool allows_early = false;
  int num_heads = 0;  // any up to 128
  float norm_eps = 0;
  const float* angles = nullptr;   // [num_tokens, 64]
  const float* sink = nullptr;     // [num_heads]
  const uint8_t* fresh = nullptr;  // [num_tokens] entries, rows of 1024 bytes
  PagedEntries pages;              // like `compressed`: a power of two of entries a page
  int ratio = 0;                   // 0: window only; 4: the selected entries; 128: all visible ones
  PagedEntries compressed;
  const int32_t* selected = nullptr;  // [num_tokens, topk], ratio 4
  int topk = 0;
  AttentionWords words = {};   // instead of q and selected, where AwaitsWords
  Bf16Tiles out;               // K = num_heads * 512
  float* workspace = nullptr;  // SparseAttentionWorkspaceBytes
  WideKeys wide = {};          // prefill
  int num_fresh = 0;           // then: rows of `fresh`
};

// Enough for any number of tokens.
int64_t SparseAttentionWorkspaceBytes(int num_heads);

// Whether a prompt's keys are widened before its attention: of 512 tokens and more, where they find
// room in `wide` and are not too many for so few tokens. Else each token widens its own; the bits
// are the same.
bool WidensKeys(const CudaSparseAttentionParams& params);

// Whether queries and selection may be words: one token's.
bool AwaitsWords(const CudaSparseAttentionParams& params);

void Launch(const CudaSparseAttentionParams& params, device::Stream& stream);

}  // namespace fathom::kernels
