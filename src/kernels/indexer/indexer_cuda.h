// The CUDA side of indexer.h, official numerics (index head size 128): which compressed entries
// each token of a ratio-4 layer attends to, from the raw products to the selection.
//   Queries: rope, Hadamard, FP4 (or FP8) as indexer.h; w_h as there.
//   Scores on FP8 tensor cores: a row's codes, times powers of two relative to its largest block
//     scale, are FP8 numbers exactly (blocks up to 2^14 apart); the row's scale is applied in FP32.
//     The tensor core's own accumulation inside a dot product of 128 is accepted.
//   Selection exact: higher score, then lower entry; all entries when there are at most topk.
//   Order: ascending in a step of a prompt, and so the same in a step of any size; in other steps,
//     of tokens that several blocks select for, best first.
// Tokens that see at most topk entries are not scored. Deterministic. In a step of few tokens, keys
// and angles are read before the wait (launch.cuh): the launch just before must not write them. A
// token's blocks then wait for each other: they all fit at once.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "config/model_config.h"
#include "device/device.h"
#include "kernels/batch_cuda.h"
#include "kernels/collective/peer_view.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/kv_entry/kv_entry.h"
#include "kernels/launch_number.h"

namespace fathom::kernels {

inline constexpr int kMaxIndexTopk = 1024;

struct CudaIndexSelectParams {
  CudaBatch batch;
  // False: the caller knows that no token sees more than topk entries; the products are not read.
  bool any_scoring = true;
  bool prefill = false;              // ascending
  const __nv_bfloat16* q = nullptr;  // [num_tokens, num_heads, 128], of the weight product
  // Instead of q, where MakesIndexQueries: the product that q is, which the selection makes itself:
  // its y is not written. The launch just before has made its x, which the one behind may read as
  // early (CudaGemmParams::x_is_early). The selection's blocks tell each other the queries in
  // query_packets, a place that has no other use.
  GemmProblem product;             // without tiles: none
  uint4* query_packets = nullptr;  // [kQueryPackets]
  // Instead of q, where AwaitsWords: its pairs as numbered words (numbered_words.cuh) of the launch
  // just before, beside which entries are selected. Who waits for the selection waits for both.
  const uint2* q_words = nullptr;  // [num_tokens, num_heads, 64]
  // Of q_words, query_packets, selected_words and lists: steps of few tokens have one.
  LaunchNumber number = {};
  const __nv_bfloat16* projected = nullptr;  // [num_tokens, num_heads], rows projected_stride apart
  int64_t projected_stride = 0;
  float weight_scale = 0;         // 128^-0.5 * num_heads^-0.5
  int num_heads = 0;              // at most 64
  const float* angles = nullptr;  // [num_tokens, 64]
  int topk = 0;                   // at most kMaxIndexTopk
  PagedEntries keys;              // 64 a page
  config::IndexKeyDType dtype = config::IndexKeyDType::kFp4;
  int max_entries = 0;  // no token sees more
  std::byte* workspace = nullptr;
  int64_t workspace_bytes = 0;
  // IndexListsBytes, zero before the first launch, of no other use: where a token's blocks tell
  // each other entries. Launches that may run at the same time need their own.
  std::byte* lists = nullptr;
  // Where RanksShareEntries: each rank scores a part, and all ranks tell all what is best of theirs
  // in `lists`, SharedIndexListsBytes of the ranks' shared memory. The launch's number is the same
  // on all ranks. Between two such launches they exchange something else.
  PeerView peers = {};          // of size 1: they do not
  int32_t* selected = nullptr;  // [num_tokens, topk]
  // Instead of selected, where MakesIndexQueries: the same as words of the number, so that who
  // awaits them waits for no launch's end.
  uint2* selected_words = nullptr;
  int32_t* counts = nullptr;  // [num_tokens]
};

// Up to this many tokens a step counts as decode: their scores are all kept at once.
inline constexpr int kMaxIndexDecodeTokens = 132;
int64_t IndexListsBytes();
int64_t SharedIndexListsBytes();

// Of query_packets: a head's 128 codes and its weight, three words each, and 64 heads.
inline constexpr int kHeadPackets = 11, kQueryPackets = 64 * kHeadPackets;

// What num_tokens need when all their scores are kept at once, and the least that works (tokens are
// then scored in several rounds).
int64_t IndexWorkspaceBytes(int num_tokens, int num_heads, int max_entries);
int64_t MinIndexWorkspaceBytes(int num_tokens, int num_heads, int max_entries);

// Whether the selection of a step that scores entries finds room beside the products of which the
// first one are its queries, and so may have q_words.
bool AwaitsWords(const CudaGemmParams& products, int num_heads, int max_entries);
// One token at long contexts: whether the selection may make the first of these products, the index
// queries. The others then are a launch behind it (ProductsBehindSelection), beside it.
bool MakesIndexQueries(const CudaGemmParams& products, int num_heads, int max_entries);
CudaGemmParams ProductsBehindSelection(const CudaGemmParams& products, const PeerView& peers,
                                       int max_entries);
// Whether a selection that makes its queries leaves some of the scores to the other ranks.
bool RanksShareEntries(const PeerView& peers, int max_entries);

void Launch(const CudaIndexSelectParams& params, device::Stream& stream);

}  // namespace fathom::kernels
