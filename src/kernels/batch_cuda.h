// The step as CUDA kernels see it: the arrays of BatchView in device memory, with fixed row strides
// so that a captured graph can be replayed. A padding token has token_seq -1: kernels skip it and
// write nothing for it outside its own row.
#pragma once

#include <cstdint>

#include "kernels/batch.h"

namespace fathom::kernels {

struct CudaBatch {
  const int32_t* cu_seqlens_q = nullptr;       // [num_seqs + 1]
  const int32_t* num_computed = nullptr;       // [num_seqs]
  const int32_t* token_seq = nullptr;          // [num_tokens], -1: padding
  const int32_t* positions = nullptr;          // [num_tokens]
  const int32_t* block_tables = nullptr;       // [num_seqs, max_blocks], padded with -1
  const int32_t* window_tables = nullptr;      // [num_seqs, max_window_pages], padded with -1
  const int32_t* first_window_page = nullptr;  // [num_seqs]
  const int32_t* state_slots = nullptr;        // [num_seqs], -1: a padding sequence
  int max_blocks = 0;
  int max_window_pages = 0;
  int num_seqs = 0;    // rows of the arrays, padding included
  int num_tokens = 0;  // likewise
};

}  // namespace fathom::kernels
