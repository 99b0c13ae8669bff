// Everything between the first weight products of a layer's attention and its scores, in one launch
// (CUDA, official numerics: head_dim 512, rotary 64, window 128):
//   Queries: q_norm of qr, FP8 per 128, into tiles for wq_b and the index queries' product.
//   Window: kv_norm, rope, FP8 per 64: every entry into fresh, those a later step can reach into
//     the window pages: WindowStore of sparse_attention.h.
//   Compressors: the entries that the step completes into the block pool, and the state brought up
//     to date: compressor.h, ratio 128 within rounding.
// Which entries are complete is found on the device, from the batch: a captured graph can be
// replayed. Within one unit in the last place of the CPU's norms, so an FP8 code may differ by one.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "config/model_config.h"
#include "device/device.h"
#include "kernels/batch_cuda.h"
#include "kernels/kv_entry/kv_entry.h"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

// Fixed on the device; the cache's layout has the same.
inline constexpr int kCompressorRingRows = 16;
inline constexpr int kCompressorMaxRollback = 8;

// One compressor of width w: 2d for ratio 4, d for ratio 128 (d = 512, or 128 for index keys).
struct CudaCompressor {
  const float* c = nullptr;  // [num_tokens, w], rows `row_stride` floats apart
  const float* z = nullptr;  // likewise, without ape
  int64_t row_stride = 0;
  const float* ape = nullptr;           // [ratio, w]
  const __nv_bfloat16* norm = nullptr;  // [d]
  PagedEntries cache;                   // in the block pool
  std::byte* state = nullptr;           // of slot 0; see compressor.h
};

struct CudaAttentionPrologueParams {
  CudaBatch batch;
  float norm_eps = 0;
  const float* angles = nullptr;  // [num_tokens, 64], of the layer's kind

  // Of all tokens, or of some: no query needs another token. Queries and the rest may come in two
  // launches, in any order: without entries, and with no queries.
  int num_queries = -1;               // -1: num_tokens
  const __nv_bfloat16* qr = nullptr;  // [num_queries, q_lora_rank], rows qr_stride apart
  int64_t qr_stride = 0;
  int q_lora_rank = 0;  // a multiple of 128
  const __nv_bfloat16* q_norm = nullptr;
  Fp8Tiles q;

  bool has_entries = true;            // false: queries alone
  const __nv_bfloat16* kv = nullptr;  // [num_tokens, 512], rows kv_stride apart
  int64_t kv_stride = 0;
  const __nv_bfloat16* kv_norm = nullptr;
  uint8_t* fresh = nullptr;  // [num_tokens] entries, rows of 1024 bytes; may be kv
  PagedEntries pages;

  int ratio = 0;  // 0: no compressor; 4: main and index; 128: main
  CudaCompressor main;
  CudaCompressor index;
  int64_t slot_bytes = 0;
  const float* frequencies = nullptr;  // [32], compressed
  config::IndexKeyDType index_dtype = config::IndexKeyDType::kFp4;
};

void Launch(const CudaAttentionPrologueParams& params, device::Stream& stream);

}  // namespace fathom::kernels
